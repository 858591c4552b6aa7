"""A step that the host has not read yet, and what is made of it once it is read.

Nothing moves here: `ModelRunner.read` does.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from headrace.engine.logprobs import TokenScores
from headrace.engine.sample_step import StepOutput
from headrace.engine.schedule import Scores, StepResult


class Pending(NamedTuple):
    """What a step leaves on the device, or, once read, on the host.

    Attributes:
      output: of its sample call.
      logits: rows that requests asked for, by slot.
      prompt_scores: of its score call.
    """

    output: StepOutput
    logits: dict[int, Any]
    prompt_scores: TokenScores | None

    def result(self) -> StepResult:
        """The step's result, where the arrays are numpy's."""
        output: Any = self.output
        first, later, counts = output, [], {}
        if output.live_B is not None:
            first, *later = [
                jax.tree.map(lambda leaf, j=j: leaf[j], output)
                for j in range(len(output.live_B))
            ]
            counts = {
                "num_tokens": np.sum(output.live_B, axis=0),
                "num_drafts": np.sum(output.is_draft_B, axis=0),
            }
        return StepResult(
            token_ids=first.token_B,
            finish_codes=first.finish_B,
            scores=_on_host(first.scores),
            logits=self.logits,
            prompt_scores=_on_host(self.prompt_scores),
            later=tuple(_later(one) for one in later if np.any(one.live_B)),
            **counts,
        )


def _later(place: Any) -> StepResult:
    return StepResult(
        token_ids=place.token_B,
        finish_codes=place.finish_B,
        live=place.live_B,
        scores=_on_host(place.scores),
    )


def _on_host(scores: TokenScores | None) -> Scores | None:
    """The numpy arrays that were read, under their host-side name."""
    return None if scores is None else Scores(*scores)  # type: ignore[arg-type]
