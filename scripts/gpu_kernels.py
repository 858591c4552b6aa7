"""Programs of one kernel each, at every tuned shape. No array is made."""

from typing import Any

_ROWS, _KV_HEADS, _LAYERS, _PAGES, _CONTEXT = 16, 8, 2, 512, 2048


def kernel_programs() -> dict[str, Any]:
    """Shape in words -> `engine.programs.Program`."""
    from headrace.pallas_kernels.paged_attention.api import tuned_shapes

    return {str(shape): kernel_program(shape) for shape in tuned_shapes()}


def kernel_program(shape: Any) -> Any:
    """One call of paged attention.

    Args:
      shape: an `api.KernelShape`.
    """
    import jax
    import jax.numpy as jnp

    from headrace.engine.programs import Program
    from headrace.pallas_kernels.paged_attention import api

    options = api.AttentionOptions(window=shape.window, soft_cap=shape.soft_cap)

    def spec(dims: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

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
