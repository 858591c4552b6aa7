"""How far a model's predictions are from another's, in numbers. numpy alone."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass
class Agreement:
    """Adds up over windows of a text.

    Attributes:
      base_nll, nll: negative log-likelihoods of the tokens that came next, nat, summed.
      kl: Kullback-Leibler divergence at each place, nat, of the base's distribution
        from the other's.
      num_same: places where both have the same likeliest token.
    """

    base_nll: float = 0.0
    nll: float = 0.0
    num_same: int = 0
    kl: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(
        self, base_TV: np.ndarray, other_TV: np.ndarray, next_T: np.ndarray
    ) -> None:
        """Takes in a window.

        Args:
          base_TV, other_TV: scores before softmax.
          next_T: the token that came next at each place.
        """
        base, other = log_softmax(base_TV), log_softmax(other_TV)
        places = np.arange(next_T.size)
        self.base_nll -= float(base[places, next_T].sum())
        self.nll -= float(other[places, next_T].sum())
        self.num_same += int((base.argmax(-1) == other.argmax(-1)).sum())
        # Rounding can leave a tiny negative number where both agree.
        self.kl.append((np.exp(base) * (base - other)).sum(-1).clip(min=0))

    def facts(self) -> dict[str, Any]:
        """Perplexities, and the keys of a line of the report."""
        kl = np.concatenate(self.kl)
        base, other = (np.exp(nll / kl.size) for nll in (self.base_nll, self.nll))
        return {
            "num_tokens": kl.size,
            "base_perplexity": float(base),
            "perplexity": float(other),
            "perplexity_increase": float(other / base - 1),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.percentile(kl, 99)),
            "top1_agreement": self.num_same / kl.size,
        }


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64."""
    shifted = logits_TV.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def relative_error(weight: np.ndarray, other: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the weight."""
    norm = float(np.linalg.norm(weight))
    return float(np.linalg.norm(weight - other)) / norm if norm else 0.0


def windows(token_ids: list[list[int]], length: int, most: int) -> list[np.ndarray]:
    """Texts cut into windows of length + 1 tokens, each predicting `length` of them.

    Args:
      token_ids: texts, joined one after another.
      length: predicted tokens of a window.
      most: tokens predicted together, at most; whole windows only.

    Raises:
      ValueError: there is no whole window.
    """
    joined = np.concatenate([np.asarray(ids, np.int32) for ids in token_ids])
    count = min(most, joined.size - 1) // length
    if count < 1:
        raise ValueError(
            f"the text has {joined.size} tokens; a window needs {length + 1}, and "
            f"num_tokens must be at least {length}, got {most}"
        )
    return [joined[i * length : (i + 1) * length + 1] for i in range(count)]
