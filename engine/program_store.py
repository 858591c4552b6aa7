"""Serialized executables and the probe's verdict, kept from one start to the next.

Lowering alone costs about a second a program, so a warm start loads machine code and
traces nothing. What is stored is trusted code: the folder is private, every file
lands by atomic rename and is checked by hash before it is loaded.
"""

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import platform
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from headrace.checkpoints.cache_dir import atomic_write
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.compile_options import compiler_options
from headrace.engine.num_threads import num_threads
from headrace.pallas_kernels.paged_attention import api as paged_attention
from headrace.pallas_kernels.quantized_matmul import api as quantized_matmul
from headrace.pallas_kernels.row_matmul import api as row_matmul

logger = logging.getLogger(__name__)

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Configurations whose programs are kept; a key of SmolLM2 takes about 10 MB.
_MAX_KEYS = 16
_KEY = re.compile("[0-9a-f]{32}")
_REMOVED = ".removed-"
# Settings of the host alone: they change no program, and no bit class.
_HOST_ONLY = {
    "policy", "ageing_s", "max_queued_requests", "max_queued_tokens",
    "max_queue_delay_s", "max_tokens_per_step", "prefill_calls_per_decode",
    "prefix_cache", "multi_tenant", "memory_fraction", "numerics",
    "compile_threads", "host_kv_bytes", "max_grammar_len", "keep_packed", "share_queue",
}  # fmt: skip
# Every file that a traced program passes through.
_CODE = (
    "layers/**/*.py",
    "pallas_kernels/**/*.py",
    "pallas_kernels/**/*.cc",
    "pallas_kernels/**/*.h",
    "engine/compile_options.py",
    "engine/draft_costs.py",
    "engine/draft_model.py",
    "engine/draft_sampling.py",
    "engine/drafting.py",
    "engine/eagle.py",
    "engine/hidden_states.py",
    "engine/logprobs.py",
    "engine/medusa.py",
    "engine/packed_layout.py",
    "engine/page_moves.py",
    "engine/probe.py",
    "engine/probe_sampling.py",
    "engine/probe_scoring.py",
    "engine/processors.py",
    "engine/programs.py",
    "engine/prompt_lookup.py",
    "engine/proposer.py",
    "engine/proposers.py",
    "engine/rejection.py",
    "engine/sample_step.py",
    "engine/sampler.py",
    "engine/slots.py",
    "engine/step_inputs.py",
    "engine/steps.py",
    "engine/thresholds.py",
    "engine/warmup.py",
)


class _JaxCacheSwitch:
    """Turns JAX's own compilation cache off while any thread holds it.

    JAX looks at its setting once a process, not per thread, hence the reset and the
    count of holders. Others who compile meanwhile merely miss their cache.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._was_on = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._num_holders == 0:
                folder = jax.config.jax_compilation_cache_dir
                self._was_on = bool(folder and jax.config.jax_enable_compilation_cache)
                self._set(False)
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                if self._num_holders == 0:
                    self._set(True)

    def _set(self, on: bool) -> None:
        if self._was_on:
            jax.config.update("jax_enable_compilation_cache", on)
            compilation_cache.reset_cache()


_jax_cache = _JaxCacheSwitch()


def compile_fresh(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles without JAX's own cache.

    An executable that came out of that cache serializes without some of its
    functions: it loads, and fails at the first call ("Function ... not found").
    """
    with _jax_cache.off():
        options = compiler_options(jax.default_backend())
        return lowered.compile(compiler_options=options)


def program_key(
    model_config: ModelConfig, engine_config: EngineConfig, weights: str = ""
) -> str:
    """Names everything that a compiled program depends on, as a hash.

    Configs, versions, device, processor, threads, compiler flags and our own code.

    Args:
      model_config, engine_config: resolved.
      weights: how quantized weights are laid out.
    """
    device = jax.devices()[0]
    facts = {
        "model": model_config.to_mapping(),
        "weights": weights,
        "engine": {
            name: value
            for name, value in engine_config.to_mapping().items()
            if name not in _HOST_ONLY
        },
        "versions": [jax.__version__, jaxlib.__version__, platform.python_version()],
        "device": [device.platform, device.device_kind, jax.device_count()],
        "processor": _processor(),
        "threads": num_threads(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "x64": bool(jax.config.jax_enable_x64),
        "precision": str(jax.config.jax_default_matmul_precision),
        "code": _code_hash(),
        "native": _native_kernels(model_config, engine_config),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _native_kernels(model: ModelConfig, engine: EngineConfig) -> list[str]:
    """What the CPU's own kernels depend on; makes them ready for stored programs."""
    shapes = model.group_size, model.head_dim, engine.page_size
    attention = [
        paged_attention.cpu_identity(*shapes, kv_dtype)
        for kv_dtype in sorted(_page_dtypes(engine))
    ]
    dtype = engine.param_dtype or "float32"
    return [
        *attention,
        row_matmul.cpu_identity(dtype),
        quantized_matmul.cpu_identity(),
    ]


def _page_dtypes(engine: EngineConfig) -> set[str]:
    """Storage types of KV pages."""
    pages: set[str] = {engine.kv_dtype or "float32"}
    if engine.kv_dtype_skip:
        pages.add(engine.param_dtype or "float32")
    return pages


def _processor() -> str:
    """Model and features of the CPU: stored code may use any of them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = [x for x in lines if x.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(sorted(set(wanted))).encode()).hexdigest()


def _code_hash() -> str:
    digest = hashlib.sha256()
    for pattern in _CODE:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class ProgramStore:
    """The programs of one key, in one folder.

    A folder may vanish at any time, when other engines have filled the cache since it
    was last used; then its programs are compiled anew.
    """

    def __init__(self, folder: str | os.PathLike[str], key: str) -> None:
        self._folder = pathlib.Path(folder) / key

    def load(self, name: str, in_tree: Any, out_tree: Any) -> Any | None:
        """The program of that name, ready to call; None where it must be compiled."""
        blob = self._read(f"{_file_name(name)}.xla")
        if blob is None:
            return None
        try:
            return serialize_executable.deserialize_and_load(blob, in_tree, out_tree)
        except Exception as error:  # noqa: BLE001 - any failure means: compile anew
            logger.warning("stored program %s does not load: %s", name, error)
            return None

    def save(self, name: str, compiled: Any) -> None:
        """Stores a compiled program; a device that cannot serialize stores none."""
        try:
            blob, _, _ = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError) as error:
            logger.info("program %s cannot be stored: %s", name, error)
            return
        self._write(f"{_file_name(name)}.xla", blob)

    def load_facts(self) -> dict[str, Any] | None:
        """What `save_facts` stored, or None; marks the folder as used now."""
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        blob = self._read("facts.json")
        return None if blob is None else json.loads(blob)

    def save_facts(self, facts: dict[str, Any]) -> None:
        """Stores JSON beside the programs: the verdict and the memory figures.

        The end of a start that compiled; so it also makes room for the next ones.
        """
        self._write("facts.json", json.dumps(facts).encode())
        try:
            _prune(self._folder)
        except OSError as error:
            logger.warning("cannot tidy %s: %s", self._folder.parent, error)

    def _read(self, name: str) -> bytes | None:
        try:
            blob = (self._folder / name).read_bytes()
        except OSError:
            return None
        digest, body = blob[:32], blob[32:]
        if hashlib.sha256(body).digest() != digest:
            logger.warning("stored file %s is damaged; it is made anew", name)
            return None
        return body

    def _write(self, name: str, body: bytes) -> None:
        try:
            with atomic_write(self._folder / name) as file:
                file.write(hashlib.sha256(body).digest() + body)
        except OSError as error:
            logger.warning("cannot store %s: %s", name, error)


def _prune(in_use: pathlib.Path) -> None:
    """Keeps the folders of the `_MAX_KEYS` keys used last, `in_use` among them.

    A folder is renamed before it is emptied: nobody finds half of one.
    """
    for left in in_use.parent.glob(f"{_REMOVED}*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    used_at: dict[pathlib.Path, float] = {}
    for folder in in_use.parent.iterdir():
        if _KEY.fullmatch(folder.name) and folder != in_use:
            with contextlib.suppress(FileNotFoundError):  # another process tidies too
                used_at[folder] = folder.stat().st_mtime
    oldest_first = sorted(used_at, key=lambda folder: used_at[folder])
    for folder in oldest_first[: max(0, len(used_at) + 1 - _MAX_KEYS)]:
        # A unique name, empty: what a rename of a folder may replace.
        removed = tempfile.mkdtemp(dir=folder.parent, prefix=_REMOVED)
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, removed)
            logger.info("removed the programs of %s, long unused", folder.name)
        shutil.rmtree(removed, ignore_errors=True)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).strip("_")
