"""The rules that the folders keep: import arrows, no jax on the host side, sizes.

Each rule returns its complaints of (path, source), and is run on planted sources, too.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Each folder may import itself and those before it; the first two import themselves.
ORDER = ("configs", "pallas_kernels", "layers", "checkpoints", "engine", "scripts")
MAY_IMPORT = {name: set(ORDER[: i + 1]) for i, name in enumerate(ORDER)}
MAY_IMPORT["pallas_kernels"] = {"pallas_kernels"}

# Every other file of engine/ is host side and runs without jax.
DEVICE_SIDE = """
async_llm batch_run device_facts draft_costs draft_model draft_sampling draft_weights
drafting eagle hidden_states llm logprobs loop medusa model_runner page_moves pending
probe probe_sampling probe_scoring processors program_store programs prompt_lookup
proposer proposers rejection sample_step sampler scoring server service slots start_up
step_inputs steps thresholds warmup
""".split()
NEEDS_JAX = {"jax", "jaxlib", "flax", "orbax", "chex", "optax"}  # jax comes with each
MAX_LINES, MAX_KERNEL_LINES, MAX_POSITIONAL = 300, 400, 6
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def package_files() -> list[str]:
    """Paths of the package's files from the root, without what protoc writes."""
    paths = [p for name in MAY_IMPORT for p in (ROOT / name).rglob("*.py")]
    ours = (p.relative_to(ROOT).as_posix() for p in paths if "_pb2" not in p.name)
    return ["__init__.py", "client.py", *sorted(ours)]


def paths_of_tests() -> list[str]:
    """Likewise of the test files."""
    return sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/**/*.py"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def imported_modules(tree: ast.AST) -> list[str]:
    """Dotted names that a piece of code imports, `from a import b` as a.b."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def top_level_imports(source: str) -> list[str]:
    """What importing the module imports: not the bodies of functions."""
    tree = ast.parse(source)

    class DropDeferred(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node):
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return [self.visit(child) for child in node.orelse]
            return self.generic_visit(node)

    return imported_modules(DropDeferred().visit(tree))


def check_arrows(path: str, source: str) -> list[str]:
    """Imports point along MAY_IMPORT, and reach kernels by their api only."""
    folder = path.split("/")[0]
    allowed = MAY_IMPORT.get(folder, set())
    complaints = []
    for name in imported_modules(ast.parse(source)):
        root, *rest = name.split(".")
        if root == "" or root in MAY_IMPORT:
            complaints.append(f"{path}: imports {name}, not headrace.{name}")
        elif root == "headrace" and rest and rest[0] in MAY_IMPORT:
            if rest[0] not in allowed and folder in MAY_IMPORT:
                complaints.append(f"{path}: {folder} must not import {name}")
            is_kernel = rest[0] == "pallas_kernels" and folder in MAY_IMPORT
            is_open = {"api", "gpu_target"} & set(rest)
            if is_kernel and folder != "pallas_kernels" and not is_open:
                complaints.append(f"{path}: imports {name}, not the kernel's api")
    return complaints


def check_device_reads(path: str, source: str) -> list[str]:
    """Engine files read the device through ModelRunner.read alone."""
    if not path.startswith("engine/"):
        return []
    tree = ast.parse(source)
    exempt: set[ast.AST] = set()
    if path == "engine/model_runner.py":
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.name == "read":
                exempt |= set(ast.walk(node))
    complaints = []
    for node in ast.walk(tree):
        if node in exempt:
            continue
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        banned = text in ("np.asarray", "numpy.asarray") or text.endswith(".device_get")
        is_item = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "item"
        )
        named = [n for n in getattr(node, "names", []) if isinstance(n, ast.alias)]
        if banned or is_item or any(n.name == "device_get" for n in named):
            complaints.append(f"{path}:{node.lineno}: reads the device")
    return complaints


def check_size(path: str, source: str) -> list[str]:
    """Short files; functions with few positional parameters."""
    is_kernel = path.startswith("pallas_kernels/")
    limit = MAX_KERNEL_LINES if is_kernel else MAX_LINES
    lines = len(source.splitlines())
    complaints = [f"{path}: {lines} lines, at most {limit}"] if lines > limit else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS):
            args = [a.arg for a in node.args.posonlyargs + node.args.args]
            count = len(args) - (args[:1] in (["self"], ["cls"]))
            if count > MAX_POSITIONAL:
                complaints.append(
                    f"{path}:{node.lineno}: {node.name} takes {count} positional "
                    f"parameters, at most {MAX_POSITIONAL}; make the rest keyword-only"
                )
    return complaints


def check_print(path: str, source: str) -> list[str]:
    """The package logs; only scripts print."""
    if path.startswith("scripts/"):
        return []
    return [
        f"{path}:{node.lineno}: prints"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]


def check_host_side(path: str, source: str) -> list[str]:
    """Host-side engine files name no package that needs jax, not even in a function."""
    stem = pathlib.PurePath(path).stem
    if not path.startswith("engine/") or stem in DEVICE_SIDE:
        return []
    return [
        f"{path}: host side, yet imports {name}"
        for name in imported_modules(ast.parse(source))
        if name.split(".")[0] in NEEDS_JAX
    ]


def reaches_jax(path: str, sources: dict[str, str]) -> list[str]:
    """A chain of files that ends at jax when `path` is imported, or nothing."""
    seen: set[str] = set()

    def walk(path: str, chain: list[str]) -> list[str]:
        seen.add(path)
        for name in top_level_imports(sources[path]):
            parts = name.split(".")
            if parts[0] in NEEDS_JAX:
                return [*chain, name]
            if parts[0] != "headrace":
                continue
            # Importing a.b.c runs the __init__ of a and of a.b as well.
            for end in range(1, len(parts) + 1):
                stem = "/".join(parts[1:end])
                for found in (f"{stem}/__init__.py".lstrip("/"), f"{stem}.py"):
                    if found in sources and found not in seen:
                        if result := walk(found, [*chain, found]):
                            return result
        return []

    return walk(path, [path])


RULES = [check_arrows, check_device_reads, check_size, check_print, check_host_side]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule):
    assert [c for path in package_files() for c in rule(path, read(path))] == []


@pytest.mark.parametrize("rule", [check_arrows, check_size])
def test_tests_keep_the_rule(rule):
    assert [c for path in paths_of_tests() for c in rule(path, read(path))] == []


@pytest.mark.parametrize(
    "rule, path, source",
    [
        (check_arrows, "configs/x.py", "from headrace.engine import llm"),
        (check_arrows, "layers/x.py", "def f():\n  import headrace.checkpoints.load"),
        (check_arrows, "pallas_kernels/x/api.py", "from headrace.configs import y"),
        (check_arrows, "checkpoints/x.py", "from headrace.scripts import generate"),
        (check_arrows, "engine/x.py", "from headrace import scripts"),
        (check_arrows, "engine/x.py", "import engine.llm"),
        (check_arrows, "engine/x.py", "from . import llm"),
        (check_arrows, "tests/x.py", "from configs import schema"),
        (
            check_arrows,
            "layers/x.py",
            "from headrace.pallas_kernels.paged_attention import reference",
        ),
        (check_device_reads, "engine/llm.py", "x = np.asarray([1])"),
        (check_device_reads, "engine/llm.py", "x = jax.device_get(y)"),
        (check_device_reads, "engine/llm.py", "from jax import device_get"),
        (check_device_reads, "engine/llm.py", "def read(x):\n  return x.item()"),
        (check_device_reads, "engine/model_runner.py", "x = y.sum().item()"),
        (check_size, "engine/x.py", "x = 1\n" * 301),
        (check_size, "pallas_kernels/x/mosaic_gpu.py", "x = 1\n" * 401),
        (check_size, "engine/x.py", "def f(a, b, c, d, e, f, g): pass"),
        (check_size, "engine/x.py", "def f(self, a, b, c, d, e, f, g): pass"),
        (check_print, "engine/x.py", "def f():\n  print(1)"),
        (check_host_side, "engine/scheduler.py", "def f():\n  import jax.numpy"),
        (check_host_side, "engine/new_file.py", "from flax import linen"),
    ],
)
def test_rule_complains_about_a_planted_fault(rule, path, source):
    assert len(rule(path, source)) == 1


@pytest.mark.parametrize(
    "rule, path, source",
    [
        (check_arrows, "tests/x.py", "from headrace.scripts import generate"),
        (
            check_arrows,
            "layers/x.py",
            "from headrace.pallas_kernels.paged_attention.api import paged_attention",
        ),
        (
            check_device_reads,
            "engine/model_runner.py",
            "class A:\n  def read(self, x):\n    return np.asarray(jax.device_get(x))",
        ),
        (check_device_reads, "engine/batch.py", "x = np.array([1]); y = z.items()"),
        (check_device_reads, "engine/steps.py", "x = jnp.asarray(y)"),
        (check_size, "engine/x.py", "def f(self, a, b, c, d, e, f, *, g, h): pass"),
        (check_print, "scripts/x.py", "print(1)"),
        (check_print, "engine/x.py", "logger.info('print(1)')"),
        (check_host_side, "engine/steps.py", "import jax"),
    ],
)
def test_rule_accepts_what_is_right(rule, path, source):
    assert rule(path, source) == []


def test_importing_a_host_side_file_reaches_no_jax():
    sources = {path: read(path) for path in package_files()}
    host = ["__init__.py", "client.py", "checkpoints/tokenizer_spec.py"] + [
        path
        for path in sources
        if path.startswith(("configs/", "engine/"))
        and pathlib.PurePath(path).stem not in DEVICE_SIDE
    ]
    assert [chain for path in host if (chain := reaches_jax(path, sources))] == []


def test_chain_to_jax_is_found_through_other_files_and_init_files():
    sources = {
        "__init__.py": "",
        "engine/__init__.py": "",
        "engine/request.py": "from headrace.layers import norm",
        "engine/lazy.py": "def f():\n  from headrace.layers import norm",
        "engine/typed.py": "if TYPE_CHECKING:\n  from headrace.layers import norm",
        "layers/__init__.py": "from headrace.layers.inputs import x",
        "layers/inputs.py": "try:\n  import jax.numpy\nexcept ImportError:\n  pass",
        "layers/norm.py": "",
    }
    chain = ["engine/request.py", "layers/__init__.py", "layers/inputs.py", "jax.numpy"]
    assert reaches_jax("engine/request.py", sources) == chain
    assert reaches_jax("engine/lazy.py", sources) == []
    assert reaches_jax("engine/typed.py", sources) == []


def test_host_side_runs_without_importing_jax():
    names = ["headrace"] + [
        "headrace." + path.removesuffix(".py").replace("/", ".")
        for path in package_files()
        if check_host_side(path, "import jax") and not path.endswith("__init__.py")
    ]
    code = "; ".join([*(f"import {n}" for n in names), "import sys"])
    code += "; sys.exit('jax' in sys.modules)"
    assert len(names) > 1
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
