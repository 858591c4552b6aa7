"""Downloads a model from the Hugging Face hub, where its client is installed."""

import pathlib

_FILES = ["*.json", "*.safetensors", "*.jinja"]


def download(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Fetches the files of a hub id into the cache; returns their folder.

    Args:
      name: `owner/name`.
      folder: the cache folder.

    Raises:
      ValueError: the client is not installed, the hub is out of reach and the model
        is not cached, or there is no such model.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{name!r} is no file or folder here; to fetch it from the hub install "
            f"huggingface-hub (pip install 'headrace[hub]')"
        ) from None
    try:
        path = huggingface_hub.snapshot_download(
            name, allow_patterns=_FILES, cache_dir=folder / "hub"
        )
    # The client raises its own errors, OSError and those of its transport.
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"{name!r} is no file or folder here, and the hub does not give it: "
            f"{type(error).__name__}: {first}"
        ) from error
    return pathlib.Path(path)
