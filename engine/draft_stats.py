"""What speculation brings: drafts, accepted ones, tokens per pass. No jax."""

from typing import Any

import numpy as np

from headrace.engine.schedule import Schedule, StepResult


class DraftStats:
    """Counts over the rows of live requests.

    Args:
      num_drafts: most drafts per row and pass; 0 counts nothing.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._passes = self._drafts = 0
        self._draft_tokens = np.zeros(num_drafts, np.int64)
        self._accepted = np.zeros(num_drafts, np.int64)
        self._tokens = 0

    def on_step(self, schedule: Schedule, result: StepResult) -> None:
        """A step was read; its requests have not been told of it yet."""
        if result.num_tokens is None or result.num_drafts is None:
            return
        rows = [
            slot
            for request, slot in zip(
                schedule.decode, schedule.decode_slots.tolist(), strict=True
            )
            if request.finish_reason is None
        ]
        if not rows:
            return
        drafts_B, tokens_B = result.num_drafts[rows], result.num_tokens[rows]
        place_K = np.arange(self._num_drafts)
        self._passes += len(rows)
        self._drafts += int(np.sum(drafts_B > 0))
        self._tokens += int(tokens_B.sum())
        self._draft_tokens += np.sum(place_K < drafts_B[:, None], axis=0)
        self._accepted += np.sum(place_K < tokens_B[:, None] - 1, axis=0)

    def snapshot(self) -> dict[str, Any]:
        """JSON-ready, with vLLM's meanings; empty without speculation.

        `passes` are rows of decode steps, `num_drafts` those of them with drafts,
        `tokens_per_pass` what a row got on average.
        """
        if not self._num_drafts:
            return {}
        return {
            "passes": self._passes,
            "num_drafts": self._drafts,
            "num_draft_tokens": int(self._draft_tokens.sum()),
            "num_accepted_tokens": int(self._accepted.sum()),
            "num_draft_tokens_per_pos": self._draft_tokens.tolist(),
            "num_accepted_tokens_per_pos": self._accepted.tolist(),
            "tokens_per_pass": self._tokens / self._passes if self._passes else 0.0,
        }
