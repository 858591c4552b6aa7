"""Runs a list of prompts to their ends: submits all, turns the loop, gathers outputs.

One prompt that cannot run has its error in its place; the others are not harmed.
"""

from collections.abc import Callable, Sequence

import tqdm

from headrace.engine import prompts
from headrace.engine.admission import QueueFullError
from headrace.engine.loop import EngineLoop
from headrace.engine.outputs import RequestOutput
from headrace.engine.request_state import RequestState, error_output
from headrace.engine.sampling_params import SamplingParams


class Batch:
    """One way to run prompts on a loop.

    Args:
      loop: of the engine.
      submit: puts one prompt into the loop's queue.
      use_tqdm: show progress and output tokens per second.
    """

    def __init__(
        self,
        loop: EngineLoop,
        submit: Callable[[prompts.Prompt, SamplingParams], RequestState],
        *,
        use_tqdm: bool,
    ) -> None:
        self._loop, self._submit, self._use_tqdm = loop, submit, use_tqdm

    def run(
        self,
        items: Sequence[prompts.Prompt | ValueError],
        sampling_params: prompts.ParamsLike,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        Raises:
          ValueError: the only prompt cannot run, or the parameters do not fit.
        """
        params = prompts.spread_params(sampling_params, len(items))
        states: list[RequestState | RequestOutput] = []
        try:
            for item, one in zip(items, params, strict=True):
                states.append(self._submit_or_error(item, one, len(items) == 1))
            self._finish_all(_running(states))
        finally:
            self._loop.drop(*_running(states))
        return [s.output() if isinstance(s, RequestState) else s for s in states]

    def _submit_or_error(
        self, prompt: prompts.Prompt | ValueError, params: SamplingParams, raises: bool
    ) -> RequestState | RequestOutput:
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            while True:
                try:
                    return self._submit(prompt, params)
                except QueueFullError:
                    self._loop.turn()  # a batch of prompts may be longer than the queue
        except ValueError as error:
            if raises:
                raise
            known = prompt if isinstance(prompt, prompts.Prompt) else prompts.Prompt()
            return error_output(known, self._loop.new_id(), str(error))

    def _finish_all(self, states: list[RequestState]) -> None:
        waiting = {s.request_id for s in states if not s.is_finished}
        num_tokens = sum(state.num_tokens for state in states)
        with tqdm.tqdm(
            total=len(waiting),
            disable=not self._use_tqdm,
            unit="request",
            dynamic_ncols=True,
        ) as bar:
            while waiting:
                news = self._loop.turn()
                num_tokens += len(news)
                ended = {s.request_id for s in news if s.is_finished} & waiting
                if ended:
                    waiting -= ended
                    bar.update(len(ended))
                if self._use_tqdm:
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{num_tokens / elapsed:.1f} tokens/s", False)


def _running(states: list[RequestState | RequestOutput]) -> list[RequestState]:
    return [state for state in states if isinstance(state, RequestState)]
