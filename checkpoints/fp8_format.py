"""fp8 checkpoints: the quantization method "fp8" of Hugging Face and vLLM.

Scales are of the whole weight or of each output (`weight_scale`), or of blocks
(`weight_scale_inv`). Activations are quantized per token, or by `input_scale`; beside
blocks they are left as they are, which loses less than the method allows.
"""

from headrace.checkpoints.linear_format import FormatOf
from headrace.checkpoints.quant_fields import Fields, is_named
from headrace.checkpoints.stored_linear import StoredLinear


def parse_fp8(fields: Fields) -> FormatOf:
    """How layers are stored, from quantization_config.

    Raises:
      ValueError: a field or value that is not known.
    """
    schemes = ("dynamic", "static")
    is_static = fields.choice("activation_scheme", *schemes) == "static"
    fields.choice("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    plain = (
        *fields.names("modules_to_not_convert"),
        *fields.names("ignored_layers"),
    )
    block = fields.take("weight_block_size")
    fields.must_be_empty("kv_cache_scheme")
    fields.finish("scale_fmt", "dequantize")
    if block is None:
        linear = StoredLinear(
            label="fp8",
            bits=None,
            strategy="tensor or channel",
            activations="float8_e4m3fn",
            is_static=is_static,
        )
    else:
        sizes = as_block(block, f"{fields.where}: weight_block_size")
        if is_static:
            raise ValueError(
                f"{fields.where}: activation_scheme 'static' is not supported with "
                f"weight_block_size; known: ['dynamic']"
            )
        linear = StoredLinear(
            label="fp8",
            bits=None,
            strategy="block",
            block=sizes,
            scale="weight_scale_inv",
        )
    # The head is never quantized by this method.
    return lambda layer: None if is_named(layer, ("lm_head", *plain)) else linear


def as_block(value: object, name: str) -> tuple[int, int]:
    """Outputs and inputs of a block.

    Raises:
      ValueError: no pair of whole numbers, or fewer than two inputs.
    """
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):  # type: ignore[union-attr]
        raise ValueError(f"{name} must be two sizes such as [128, 128], got {value!r}")
    outputs, inputs = value  # type: ignore[misc]
    if inputs < 2:
        raise ValueError(f"{name} must span two inputs or more, got {value!r}")
    return outputs, inputs
