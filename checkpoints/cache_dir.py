"""Where downloads, conversions and compiled programs live, and how files land there.

Everything lands by atomic rename: a killed run leaves at most a temporary file, which
no later run trusts. The folder is private, since it holds code that is executed.
"""

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

ENVIRONMENT_KEY = "HEADRACE_CACHE_DIR"


def cache_dir(override: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The cache folder: the argument, HEADRACE_CACHE_DIR, or the platform's place."""
    chosen = override or os.environ.get(ENVIRONMENT_KEY)
    if chosen:
        return pathlib.Path(chosen).expanduser()
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches" / "headrace"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA", str(pathlib.Path.home()))
        return pathlib.Path(local) / "headrace" / "cache"
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return pathlib.Path(base) / "headrace"


def make_private_folder(path: pathlib.Path) -> None:
    """Makes a folder; it and each parent that was missing are the owner's alone."""
    if not path.is_dir():
        # Not `parents=True`, which gives the parents the mode of the umask.
        make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that appears under its name whole, or not at all."""
    path = pathlib.Path(path)
    make_private_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A folder that appears under its name whole, or not at all.

    Raises:
      ValueError: the folder exists already.
    """
    path = pathlib.Path(path).absolute()
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield work
        os.replace(work, path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
