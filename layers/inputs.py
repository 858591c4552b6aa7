"""What goes into and comes out of every model: one contract for all families.

T = 1 decodes, T = Q verifies drafts, T = chunk prefills; the model cannot tell and
need not. Rows are padded by the engine; padded tokens write to page 0.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Key and value pages [L, P, K, C, H]; where these have 8 bits their scales, too,
# [L, P, K, C] each.
KVGroup = tuple[Array, ...]
KVCache = tuple[KVGroup, ...]
Params = dict


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One call's rows.

    Attributes:
      tokens_BT: token ids, int32.
      positions_BT: absolute position of each token, int32.
      query_len_B: valid tokens of the row; those beyond are padding.
      context_len_B: valid keys of the row once this call has written its own.
      page_tables: one `[B, M]` int32 table of page ids per KV group.
      adapter_B: LoRA adapter per row (reserved).
      tree_mask_BT: ancestor bits of a draft tree (reserved).
    """

    tokens_BT: Int[Array, "B T"]
    positions_BT: Int[Array, "B T"]
    query_len_B: Int[Array, " B"]
    context_len_B: Int[Array, " B"]
    page_tables: tuple[Int[Array, "B M"], ...]
    adapter_B: Int[Array, " B"] | None = None
    tree_mask_BT: Int[Array, "B T"] | None = None


def whole_prompt(
    tokens_T: Int[Array, " T"], page_size: int, num_groups: int = 1
) -> ModelInputs:
    """One row that fills pages 1 and on with a prompt, all of it at once.

    Args:
      tokens_T: the prompt.
      page_size: of the pool, which has a page more than the prompt needs.
      num_groups: KV groups of the cache.
    """
    length = tokens_T.shape[0]
    last = pages_of(length, page_size)
    full_B = jnp.full(1, length, jnp.int32)
    table_BM = jnp.arange(1, last + 1, dtype=jnp.int32)[None]
    return ModelInputs(
        tokens_BT=tokens_T[None],
        positions_BT=jnp.arange(length, dtype=jnp.int32)[None],
        query_len_B=full_B,
        context_len_B=full_B,
        page_tables=(table_BM,) * num_groups,
    )


def pages_of(length: int, page_size: int) -> int:
    """Pages that so many tokens take."""
    return -(-length // page_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """Final hidden states (normed) and, for draft heads, those of inner layers."""

    hidden_BTD: Float[Array, "B T D"]
    aux_hidden: tuple[Float[Array, "B T D"], ...] = ()
