"""Folds the partial outputs of the splits of `mosaic_gpu_decode.py`.

One program per (row, kv head, 64 numbers of the head dim). Splits without keys were
never written and are not read: what is moved grows with the live context.
Source: Dao et al. 2023 (Flash-Decoding).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels import compat
from headrace.pallas_kernels.paged_attention.mosaic_gpu_tiles import LOG2E, MASKED

_PART = 64


def merge_splits(
    partial: tuple[
        Float[Array, "S B K H N"], Float[Array, "S B K N"], Float[Array, "S B K N"]
    ],
    live_B2: Int[Array, "B 2"],
    sinks_KN: Float[Array, "K N"] | None,
    *,
    num_tokens: int,
    group: int,
    interpret: Any = None,
) -> Float[Array, "B T K G H"]:
    """The attention output, bfloat16, as the next product wants it.

    Args:
      partial: acc, m, l, as the decode kernel gives them.
      num_tokens, group: T and G.
      live_B2: first split with keys of each row, and one past the last.
      sinks_KN: natural scores that join the softmax without a value.
      interpret: see `compat.interpreter`.
    """
    acc, m, _ = partial
    _, B, K, H, N = acc.shape
    operands = [*partial, live_B2]
    if sinks_KN is not None:
        operands.append(sinks_KN.astype(jnp.float32))
    wide, narrow = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)

    def load(ref: Any, layout: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def body(acc_ref: Any, m_ref: Any, l_ref: Any, live_ref: Any, *rest: Any) -> None:
        row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        *sinks, out_ref, out_smem = rest

        def spread(x_N: Array) -> Array:
            return lax.broadcast_in_dim(x_N, (_PART, N), [1])

        def fold(split: Array, carry: tuple[Array, Array, Array]) -> tuple:
            out_PN, top_N, total_N = carry
            place = (split, row, head)
            m_N, l_N = (load(ref.at[place], narrow) for ref in (m_ref, l_ref))
            new_top_N = jnp.maximum(top_N, m_N)
            old_N, new_N = jnp.exp2(top_N - new_top_N), jnp.exp2(m_N - new_top_N)
            acc_PN = load(acc_ref.at[(*place, _part_of(part))], wide)
            out_PN = out_PN * spread(old_N) + acc_PN * spread(new_N)
            return out_PN, new_top_N, total_N * old_N + l_N * new_N

        zeros_N = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), narrow)
        top_N, total_N = zeros_N + MASKED, zeros_N
        if sinks:
            top_N = load(sinks[0].at[head], narrow) * LOG2E
            total_N = zeros_N + 1.0
        out_PN = plgpu.layout_cast(jnp.zeros((_PART, N), jnp.float32), wide)
        out_PN, _, total_N = lax.fori_loop(
            live_ref[row, 0], live_ref[row, 1], fold, (out_PN, top_N, total_N)
        )
        # A padded row has seen no key; it becomes zero, not 0 / 0.
        inverse_N = jnp.where(
            total_N > 0, 1.0 / jnp.where(total_N > 0, total_N, 1.0), 0.0
        )
        out_PN = (out_PN * spread(inverse_N)).astype(jnp.bfloat16)
        out_PN = plgpu.layout_cast(out_PN, plgpu.Layout.WGMMA_TRANSPOSED)
        compat.store(out_smem.transpose((1, 0)), out_PN)
        plgpu.commit_smem()
        for token in range(num_tokens):
            queries = out_smem.at[pl.ds(token * group, group)]
            place = out_ref.at[row, token, head, :, _part_of(part)]
            plgpu.copy_smem_to_gmem(queries, place)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, num_tokens, K, group, H), jnp.bfloat16),
        grid=(B, K, H // _PART),
        grid_names=("row", "head", "part"),
        scratch_types=(plgpu.SMEM((N, _PART), jnp.bfloat16),),
        kernel_name="paged_decode_merge",
        **compat.kernel_options(interpret),
    )(*operands)


def _part_of(part: Array) -> Any:
    """The part's slice of the head dim."""
    return pl.ds(part * _PART, _PART)
