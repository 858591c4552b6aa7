"""Programs of one kernel each, at every tuned shape. No array is made."""

from typing import Any

_ROWS, _KV_HEADS, _LAYERS, _PAGES, _CONTEXT = 16, 8, 2, 512, 2048


def kernel_programs() -> dict[str, Any]:
    """Shape in words -> `engine.programs.Program`."""
    from headrace.pallas_kernels.paged_attention import api as paged_attention
    from headrace.pallas_kernels.quantized_matmul import api as quantized_matmul

    attend, multiply = paged_attention.tuned_shapes(), quantized_matmul.tuned_shapes()
    return {
        **{str(shape): attention_program(shape) for shape in attend},
        **{str(shape): matmul_program(shape) for shape in multiply},
    }


def spec(dims: tuple[int, ...], dtype: str = "int32") -> Any:
    """The shape of an argument."""
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def matmul_program(shape: Any) -> Any:
    """One product with a quantized weight.

    Args:
      shape: a `quantized_matmul.api.KernelShape`.
    """
    from headrace.engine.programs import Program
    from headrace.pallas_kernels.quantized_matmul import api

    outputs, inputs = shape.outputs, shape.inputs
    scales = spec((outputs, inputs // shape.group), "float32")
    zeros = spec(scales.shape, "int8") if shape.has_zeros else None

    def multiply(values_OI: Any, scales_OS: Any, zeros_OS: Any, x_RI: Any) -> Any:
        return api.quantized_matmul(
            values_OI, scales_OS, zeros_OS, x_RI,
            most_rows=shape.most_rows, implementation="mosaic_gpu",
        )  # fmt: skip

    values = spec((outputs, inputs), shape.dtype)
    x = spec((shape.rows, inputs), "bfloat16")
    out = spec((shape.rows, outputs), "bfloat16")
    return Program(multiply, (values, scales, zeros, x), (), out)


def attention_program(shape: Any) -> Any:
    """One call of paged attention.

    Args:
      shape: a `paged_attention.api.KernelShape`.
    """
    from headrace.engine.programs import Program
    from headrace.pallas_kernels.paged_attention import api

    options = api.AttentionOptions(window=shape.window, soft_cap=shape.soft_cap)
    B, T, K, G = _ROWS, shape.num_tokens, _KV_HEADS, shape.group
    C, H = shape.page_size, shape.head_dim
    pool = spec((_LAYERS, _PAGES, K, C, H), shape.dtype)
    named = {
        "page_table_BM": spec((B, _CONTEXT // C)),
        "positions_BT": spec((B, T)),
        "context_len_B": spec((B,)),
    }
    if shape.has_tree:
        named["tree_mask_BT"] = spec((B, T))
    if shape.has_sinks:
        named["sinks_KG"] = spec((K, G), "float32")
    if shape.dtype != "bfloat16":
        scale = spec(pool.shape[:4], "float32")
        named["scales"] = (scale, scale)

    def attend(q_BTKGH: Any, pools: Any, named: dict[str, Any]) -> Any:
        return api.paged_attention(
            q_BTKGH, pools, 1, options=options, implementation="mosaic_gpu", **named
        )

    q = spec((B, T, K, G, H), "bfloat16")
    return Program(attend, (q, (pool, pool), named), (), q)
