"""Writes a model as a Headrace store: packed arrays, config and tokenizer, hashed.

    python -m headrace.scripts.convert_checkpoint --model=smollm2-135m-instruct \\
        --out=FOLDER --dtype=bfloat16

The store loads without packing or dequantizing: `LLM("FOLDER")`. What comes quantized
is stored so; --quantization=int8 rounds weights first.
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
_QUANTIZATION = flags.DEFINE_string(
    "quantization", None, "rounds weights: int8, w8a8, fp8, int4-g64, ..."
)
_KEEP_PACKED = flags.DEFINE_bool(
    "keep_packed", False, "keep a .gguf file's tensors in fewer bits where exact"
)
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "where downloads are kept")


def main(argv: list[str]) -> None:
    """Loads and saves; a refusal is one line on stderr and exit status 1."""
    if len(argv) > 1:
        sys.exit(f"error: unexpected arguments {argv[1:]}")
    from headrace.checkpoints.load import load_checkpoint
    from headrace.checkpoints.orbax_store import save_store
    from headrace.checkpoints.quantize import Rounding
    from headrace.configs.schema import EngineConfig

    logging.set_verbosity(logging.WARNING)  # Orbax tells of every step
    try:
        checkpoint = load_checkpoint(
            _MODEL.value,
            dtype=_DTYPE.value,
            rounding=Rounding.of(EngineConfig(quantization=_QUANTIZATION.value)),
            keep_packed=_KEEP_PACKED.value,
            cache_dir=_CACHE_DIR.value,
        )
        save_store(_OUT.value, checkpoint)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    scheme = checkpoint.quantization
    kind = f"{scheme} and {_DTYPE.value}" if scheme else _DTYPE.value
    print(f"{_OUT.value}: {_MODEL.value} as {kind}")


if __name__ == "__main__":
    app.run(main)
