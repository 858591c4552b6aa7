"""The probe's part on scoring: a token has one log-probability, whoever computes it.

Each score program tells of the same prompt, chunk by chunk; and where a chunk ends, the
sampling program tells of the same logits. See probe.py for what is made of the prints.
"""

import dataclasses
import hashlib

import jax.numpy as jnp
import numpy as np

from headrace.engine.logprobs import TokenScores
from headrace.engine.model_runner import ModelRunner
from headrace.engine.slots import empty_slots

_UNLIKE_SAMPLING = "unlike sampling"


class ScorePrint:
    """Collects what a score program tells of one prompt."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._digest = hashlib.sha256()
        self._is_like_sampling = True

    def add(
        self, scores: TokenScores, row: int, length: int, *, has_logits: bool
    ) -> None:
        """Takes the scores [R, T] of a chunk; its last logits may be in row 0."""
        found: TokenScores = self._runner.read(scores)
        for token in range(length):
            for leaf in found:
                self._digest.update(leaf[row, token].tobytes())
        if not has_logits:
            return
        drawn = self._sampled()
        last = TokenScores(*(leaf[row, length - 1] for leaf in found))
        self._is_like_sampling &= all(
            getattr(last, name).tobytes() == getattr(drawn, name)[0].tobytes()
            for name in ("top_ids_XJ", "top_logprobs_XJ", "log_total_X")
        )

    def text(self) -> str:
        """Equal for programs with equal scores."""
        return self._digest.hexdigest() + (
            "" if self._is_like_sampling else _UNLIKE_SAMPLING
        )

    def _sampled(self) -> TokenScores:
        """What generation would report of the logits in row 0."""
        runner = self._runner
        slots = empty_slots(runner.layout)
        is_first_B = jnp.array(np.arange(runner.layout.num_slots) == 0)
        runner.slots = dataclasses.replace(slots, active_B=is_first_B)
        packed = runner.layout.unchanged(does_decode=True)
        bucket = (runner.config.decode_batch_sizes or ())[-1]
        output = runner.sample(("sample", "full", bucket), packed)
        assert output.scores is not None
        found: TokenScores = runner.read(output.scores)
        return found


def without_equal_scores(found: dict[str, set[tuple[str, str]]]) -> dict[str, set[str]]:
    """Prints by program from (logits, scores): logits only where all scores agree."""
    scores = {score for prints in found.values() for _, score in prints}
    agree = len(scores) == 1 and not scores.pop().endswith(_UNLIKE_SAMPLING)
    return {
        name: {logits if agree else f"{logits} {score}" for logits, score in prints}
        for name, prints in found.items()
    }
