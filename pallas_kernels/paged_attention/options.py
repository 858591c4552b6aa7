"""What every implementation of paged attention takes besides queries and pages."""

import dataclasses
import math
from typing import NamedTuple

from jaxtyping import Array, Float, Int

Pools = tuple[Float[Array, "L P K C H"], Float[Array, "L P K C H"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Fixed when a program is traced.

    Attributes:
      scale: of the scores; None is H ** -0.5.
      window: a query sees its own key and the `window - 1` before it; None sees all.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap), before masks.

    Raises:
      ValueError: a number out of its range.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a number above 0, got {value}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    @property
    def is_plain(self) -> bool:
        """Whether scores are products over sqrt(H), of all keys before."""
        return self == AttentionOptions()

    def scale_of(self, head_dim: int) -> float:
        """The factor of the scores."""
        return head_dim**-0.5 if self.scale is None else self.scale


class AttentionArrays(NamedTuple):
    """Where each row's keys are, and what its queries see.

    Query t of row b sees the keys at positions 0 .. positions[b, t] below
    context_len[b], less what the window hides. With a tree mask the row's queries are
    the nodes of a draft tree whose keys lie in order at positions[b, 0] and on; then
    query t sees all keys before those, and the key of node j where bit j of its mask is
    set, its own included.

    Attributes:
      page_table_BM: page ids in order of position; unused entries are 0. Ids outside
        the pool are read as page 0.
      positions_BT: of each query; without a tree mask they count up by one from
        positions[b, 0].
      context_len_B: valid keys of each row; a row with 0 gives zeros.
      tree_mask_BT: int32, None where drafts are a chain.
      sinks_KG: float32 scores that join each head's softmax without a value
        (gpt-oss), None without.
      k_scales, v_scales: of quantized pools, [L, P, K, C] float32, one per key and
        value; None where pools hold the numbers themselves.
    """

    page_table_BM: Int[Array, "B M"]
    positions_BT: Int[Array, "B T"]
    context_len_B: Int[Array, " B"]
    tree_mask_BT: Int[Array, "B T"] | None = None
    sinks_KG: Float[Array, "K G"] | None = None
    k_scales: Float[Array, "L P K C"] | None = None
    v_scales: Float[Array, "L P K C"] | None = None

    @property
    def is_simple(self) -> bool:
        """Whether there are neither trees nor sinks."""
        return self.tree_mask_BT is None and self.sinks_KG is None
