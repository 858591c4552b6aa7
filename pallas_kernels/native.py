"""C++ kernels for the CPU, compiled on the machine that runs them.

XLA cannot read pages in place on a CPU, and Pallas does not compile for one. So a
kernel may have a `cpu.cc`: built once with the machine's own C++ compiler for its own
processor, kept in the cache folder, called through XLA's foreign function interface.
Without a compiler the plain XLA form serves. The environment decides: CXX names the
compiler, HEADRACE_NATIVE=0 turns these kernels off, HEADRACE_CACHE_DIR is the folder.
"""

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import jax
import jaxlib

logger = logging.getLogger(__name__)

# Contraction is off: what is fused is written so, see multiply_add.
_FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared",
    "-w",
)  # fmt: skip
_SHARED = tuple(sorted(pathlib.Path(__file__).parent.glob("*.h")))
_TIMEOUT_S = 300


@functools.cache
def compiler() -> str | None:
    """Path of the C++ compiler; None where there is none, or it is off."""
    if os.environ.get("HEADRACE_NATIVE", "1") == "0":
        return None
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


@functools.cache
def identity() -> str:
    """What the machine code depends on besides its source: for keys of stored programs.

    The empty string where native kernels are not used.
    """
    path = compiler()
    if path is None:
        return ""
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    facts = [version, *_FLAGS, _processor(), jaxlib.__version__]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@functools.cache
def load(
    source: pathlib.Path, defines: tuple[tuple[str, int], ...] = ()
) -> ctypes.CDLL | None:
    """The library of a C++ source, built if this machine has not built it before.

    Args:
      source: the file.
      defines: preprocessor names and their values.

    Returns:
      The library, or None where plain XLA must serve; the reason is logged once.
    """
    path = compiler()
    if path is None:
        logger.warning("no C++ compiler: plain XLA instead of %s", source.name)
        return None
    text = b"".join(path.read_bytes() for path in (source, *_SHARED))
    key = hashlib.sha256(repr((identity(), defines)).encode() + text).hexdigest()[:32]
    library = _folder() / f"{source.parent.name}-{key}.so"
    try:
        if not library.is_file():
            _build(path, source, defines, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("plain XLA instead of %s: %s", source.name, detail)
        return None


def _build(
    path: str,
    source: pathlib.Path,
    defines: tuple[tuple[str, int], ...],
    library: pathlib.Path,
) -> None:
    """Compiles into a file that appears whole or not at all."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as work:
        built = pathlib.Path(work) / library.name
        command = [
            path,
            *_FLAGS,
            *(f"-D{name}={value}" for name, value in defines),
            f"-I{jax.ffi.include_dir()}",
            str(source),
            "-o",
            str(built),
        ]
        subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        os.replace(built, library)


def _folder() -> pathlib.Path:
    # As checkpoints/cache_dir.py has it, which kernels may not import.
    chosen = os.environ.get("HEADRACE_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen).expanduser() / "native"
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return pathlib.Path(base) / "headrace" / "native"


def _processor() -> str:
    """The CPU's model and features: -march=native uses any of them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({x for x in lines if x.startswith(wanted)}))
