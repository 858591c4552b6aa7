"""What drafting keeps on the device between steps; see proposer.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from headrace.engine.packed_layout import PackedLayout
from headrace.engine.request import Request
from headrace.engine.slots import SlotState

# A draft is worth its place where it is right this often, all before it included.
_LEAST_CHANCE = 0.25
# Weight of a draft in the running share of those that were right.
_SKILL_WEIGHT = 0.1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What drafting keeps between steps; a slot's row is `SlotState.extra_row_B`.

    Attributes:
      drafts_BK: by slot, the drafts of this step in order, -1 where there is none.
      history_BL: tokens by position, prompt and output.
      is_ready_B: the proposer's own pages hold the row's whole text.
      num_new_B: tokens that the last step gave the row; under 1 where the proposer
        knows nothing of it.
      skill_B: share of the drafts that were looked at that were right, where the number
        of drafts follows it.
      hidden_BQD: of the target where it gave these tokens, if the proposer reads it.
      weights_BKV: logarithms of how likely the proposer found each token, up to a
        constant, where drafts are accepted by rejection sampling.
    """

    drafts_BK: Int[Array, "B K"]
    history_BL: Int[Array, "B L"]
    is_ready_B: Bool[Array, " B"]
    num_new_B: Int[Array, " B"]
    skill_B: Float[Array, " B"] | None = None
    hidden_BQD: Float[Array, "B Q D"] | None = None
    weights_BKV: Float[Array, "B K V"] | None = None


def empty_drafting(
    layout: PackedLayout,
    *,
    adapts: bool = False,
    hidden: jax.ShapeDtypeStruct | None = None,
    weights: jax.ShapeDtypeStruct | None = None,
) -> Drafting:
    """No tokens and no drafts.

    Args:
      layout: of the engine.
      adapts: `skill_B` is kept.
      hidden: shape of `hidden_BQD`, where it is kept.
      weights: likewise of `weights_BKV`.
    """
    B = layout.num_slots

    def zeros(like: jax.ShapeDtypeStruct | None) -> Array | None:
        return None if like is None else jnp.zeros(like.shape, like.dtype)

    return Drafting(
        drafts_BK=jnp.full((B, layout.num_drafts), -1, jnp.int32),
        history_BL=jnp.zeros((B, layout.max_context_len), jnp.int32),
        is_ready_B=jnp.zeros(B, bool),
        num_new_B=jnp.zeros(B, jnp.int32),
        skill_B=jnp.ones(B, jnp.float32) if adapts else None,
        hidden_BQD=zeros(hidden),
        weights_BKV=zeros(weights),
    )


def history_of(request: Request, layout: PackedLayout) -> np.ndarray:
    """[L] a request's tokens so far, then zeros."""
    tokens_L = np.zeros(layout.max_context_len, np.int32)
    known = request.tokens(0, request.max_len)
    tokens_L[: len(known)] = known
    return tokens_L


def set_history(
    drafting: Drafting, row: Int[Array, ""], tokens_L: Int[Array, " L"]
) -> Drafting:
    """The state (donated) for a row's new request, whose prompt is in the pages."""
    skill_B = drafting.skill_B
    return dataclasses.replace(
        drafting,
        history_BL=drafting.history_BL.at[row].set(tokens_L),
        is_ready_B=drafting.is_ready_B.at[row].set(True),
        num_new_B=drafting.num_new_B.at[row].set(0),
        skill_B=None if skill_B is None else skill_B.at[row].set(1.0),
    )


def add_tokens(
    drafting: Drafting,
    rows: SlotState,
    token_B: Int[Array, " B"],
    live_B: Bool[Array, " B"],
) -> Drafting:
    """The state (donated) after live rows have sampled tokens for `position_B` + 1."""
    L = drafting.history_BL.shape[1]
    place_B = jnp.where(live_B, rows.position_B + 1, L)
    return dataclasses.replace(
        drafting,
        history_BL=drafting.history_BL.at[rows.extra_row_B, place_B].set(
            token_B, mode="drop"
        ),
        num_new_B=drafting.num_new_B.at[rows.extra_row_B].add(live_B),
    )


def begin_step(
    drafting: Drafting,
    rows: SlotState,
    live_B: Bool[Array, " B"],
    is_followed_B: Bool[Array, " B"],
) -> Drafting:
    """The state (donated) before a step's tokens.

    Args:
      drafting: of the steps before.
      rows: of the sample bucket.
      live_B: who samples.
      is_followed_B: whose new tokens the proposer has taken in, or will.
    """
    row_B = jnp.where(live_B, rows.extra_row_B, drafting.num_new_B.shape[0])
    # Far below 0 stays below whatever is added.
    unknown = -drafting.history_BL.shape[1]
    num_new_B = jnp.where(is_followed_B, 0, unknown)
    is_ready_B = drafting.is_ready_B[rows.extra_row_B] & is_followed_B
    return dataclasses.replace(
        drafting,
        num_new_B=drafting.num_new_B.at[row_B].set(num_new_B, mode="drop"),
        is_ready_B=drafting.is_ready_B.at[row_B].set(is_ready_B, mode="drop"),
    )


def most_drafts(
    drafting: Drafting, rows: SlotState, decodes_B: Bool[Array, " B"]
) -> Int[Array, " B"]:
    """Drafts that each row may take in this step; where they adapt, one at least."""
    # One of the tokens that are left is the target's own.
    most_B = jnp.minimum(rows.max_drafts_B, rows.remaining_B - 1)
    if drafting.skill_B is not None:
        skill_B = jnp.clip(drafting.skill_B[rows.extra_row_B], 1e-3, 0.999)
        worth_B = (jnp.log(_LEAST_CHANCE) / jnp.log(skill_B)).astype(jnp.int32)
        most_B = jnp.minimum(most_B, jnp.maximum(worth_B, 1))
    return jnp.where(decodes_B, most_B, 0)


def learn(
    drafting: Drafting,
    rows: SlotState,
    num_right_B: Int[Array, " B"],
    num_drafts_B: Int[Array, " B"],
) -> Drafting:
    """The state (donated) after so many of so many drafts of a bucket's rows came."""
    if (skill_B := drafting.skill_B) is None:
        return drafting
    seen_B = jnp.minimum(num_drafts_B, num_right_B + 1)
    old_B, row_B = skill_B[rows.extra_row_B], rows.extra_row_B
    share_B = num_right_B / jnp.maximum(seen_B, 1)
    new_B = old_B + jnp.minimum(_SKILL_WEIGHT * seen_B, 1) * (share_B - old_B)
    return dataclasses.replace(drafting, skill_B=skill_B.at[row_B].set(new_B))


def with_drafts(
    drafting: Drafting,
    found_BK: Int[Array, "B K"],
    most_B: Int[Array, " B"],
    weights_BKV: Float[Array, "B K V"] | None = None,
) -> Drafting:
    """The state (donated) with the first `most_B` drafts of each row of a bucket.

    Args:
      drafting: of the steps before.
      found_BK: drafts, -1 where there is none.
      most_B: how many of them count.
      weights_BKV: see `Drafting`, where they are kept.
    """
    bucket, K = found_BK.shape
    is_draft_BK = jnp.arange(K, dtype=jnp.int32) < most_B[:, None]
    found_BK = jnp.where(is_draft_BK, found_BK, -1)
    kept_BKV = drafting.weights_BKV
    if kept_BKV is not None and weights_BKV is not None:
        kept_BKV = kept_BKV.at[:bucket].set(weights_BKV)
    drafts_BK = jnp.full_like(drafting.drafts_BK, -1).at[:bucket].set(found_BK)
    return dataclasses.replace(drafting, drafts_BK=drafts_BK, weights_BKV=kept_BKV)
