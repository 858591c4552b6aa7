"""One request's output as it comes: an iterator that cleans up after itself. No jax."""

import weakref
from collections.abc import Callable, Iterator

from headrace.engine.outputs import RequestOutput
from headrace.engine.request_state import RequestState


class Stream(Iterator[RequestOutput]):
    """Yields deltas until the request ends; see `LLM.stream`.

    Several streams of one engine may be read in turn: each turn of the loop serves
    all of them, so a delta can hold several tokens.

    Args:
      state: of the request, which is in the scheduler.
      step: runs one turn of the engine's loop.
      drop: ends the request and frees what it holds.
    """

    def __init__(
        self,
        state: RequestState,
        step: Callable[[], object],
        drop: Callable[[RequestState], None],
    ) -> None:
        self._state, self._step = state, step
        self._end = weakref.finalize(self, drop, state)
        self._end.atexit = False  # the process's end frees everything anyway

    def __next__(self) -> RequestOutput:
        """The next delta; steps the engine until there is one."""
        if not self._end.alive:
            raise StopIteration
        while not self._state.has_news:
            self._step()
        output = self._state.take_news()
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Ends the request, wherever it is, and frees its slot and pages."""
        self._end()
