"""Writes a model as a Headrace store: packed arrays, config and tokenizer, hashed.

    python -m headrace.scripts.convert_checkpoint --model=smollm2-135m-instruct \\
        --out=FOLDER --dtype=bfloat16

The store loads without packing or dequantizing: `LLM("FOLDER")`.
"""

import sys

from absl import app, flags, logging

_MODEL = flags.DEFINE_string(
    "model", None, "registry name, folder, .gguf file or hub id", required=True
)
_OUT = flags.DEFINE_string("out", None, "folder to make", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "storage type"
)
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "where downloads are kept")


def main(argv: list[str]) -> None:
    """Loads and saves; a refusal is one line on stderr and exit status 1."""
    if len(argv) > 1:
        sys.exit(f"error: unexpected arguments {argv[1:]}")
    from headrace.checkpoints.load import load_checkpoint
    from headrace.checkpoints.orbax_store import save_store

    logging.set_verbosity(logging.WARNING)  # Orbax tells of every step
    try:
        checkpoint = load_checkpoint(
            _MODEL.value, dtype=_DTYPE.value, cache_dir=_CACHE_DIR.value
        )
        save_store(_OUT.value, checkpoint)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    print(f"{_OUT.value}: {_MODEL.value} as {_DTYPE.value}")


if __name__ == "__main__":
    app.run(main)
