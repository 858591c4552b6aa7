"""pyproject.toml says what is there: the packages, and what they import."""

import ast
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = (
    "configs", "pallas_kernels", "layers", "checkpoints", "engine", "scripts",
)  # fmt: skip

# Import name -> name in pyproject, where they differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "huggingface_hub": "huggingface-hub",
    "jaxlib": "jax",
    "ml_collections": "ml-collections",
    "ml_dtypes": "ml-dtypes",
    "opentelemetry": "opentelemetry-sdk",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
}


def source_files() -> list[pathlib.Path]:
    return [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]


def third_party_roots(source: str) -> set[str]:
    """Packages that a file imports, ours and the standard library left out."""
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    return roots - sys.stdlib_module_names - {"headrace"}


def test_listed_packages_are_the_folders_that_hold_code():
    folders = {path.parent for path in source_files()}
    names = [".".join(("headrace", *f.relative_to(ROOT).parts)) for f in folders]
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(["headrace", *names])


def test_cpp_sources_are_installed_with_their_package():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for pattern in ("*.cc", "*.h"):
        folders = {p.parent for name in FOLDERS for p in (ROOT / name).rglob(pattern)}
        names = {".".join(("headrace", *f.relative_to(ROOT).parts)) for f in folders}
        assert names == {name for name, patterns in data.items() if pattern in patterns}


def test_the_protocol_is_installed_with_what_was_made_of_it():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    folder = ROOT / "engine" / "serving" / "proto"
    patterns = data["headrace.engine.serving.proto"]
    found = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert found == {"generation.proto", "generation_pb2.pyi"}


def test_every_code_folder_has_an_init_file():
    folders = {path.parent for path in source_files()}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_every_imported_package_is_declared():
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = PROJECT["project"]["dependencies"] + sum(extras.values(), [])
    declared = {re.split(r"[\[<>=~! ]", r)[0] for r in requirements}
    roots = {
        root
        for path in source_files()
        for root in third_party_roots(path.read_text(encoding="utf-8"))
    }
    assert sorted({DISTRIBUTIONS.get(root, root) for root in roots} - declared) == []


def test_third_party_import_is_seen_inside_a_function():
    source = "import os\nfrom headrace import LLM\ndef f():\n  from torch.nn import x"
    assert third_party_roots(source) == {"torch"}


def test_versions_agree():
    source = (ROOT / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{PROJECT["project"]["version"]}"' in source


def test_no_test_folder_is_a_package():
    # A package below the root would make pytest import the root a second time.
    assert list(ROOT.glob("tests/**/__init__.py")) == []


def test_typing_link_points_at_the_root():
    # mypy finds headrace through it; a plain copy would go stale.
    link = ROOT / ".typing" / "headrace"
    assert link.is_symlink() and link.resolve() == ROOT.resolve()
