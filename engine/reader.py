"""One request's outputs on their way from the engine's thread to an event loop. No jax.

The thread makes them, the loop takes them; between the two goes only the word that
there is news.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Iterable

from headrace.engine.outputs import RequestOutput
from headrace.engine.request_state import RequestState


class Reader(AsyncIterator[RequestOutput]):
    """One request's outputs on their way to the event loop; see `AsyncLLM.add`.

    Attributes:
      state: of the request.
    """

    def __init__(self, state: RequestState, loop: asyncio.AbstractEventLoop) -> None:
        self.state = state
        self._loop = loop
        self._news = asyncio.Event()

    @property
    def request_id(self) -> str:
        """Unique in its engine."""
        return self.state.request_id

    async def __anext__(self) -> RequestOutput:
        """What came since the last call; waits until there is something."""
        while not self.state.has_news:
            # The engine's thread sets the end last, so what came with it is seen now.
            if self.state.is_finished and not self.state.has_news:
                raise StopAsyncIteration
            self._news.clear()
            if not self.state.has_news:
                await self._news.wait()
        return self.state.take_news()


def tell(readers: Iterable[Reader]) -> None:
    """There is news for them; may be called from any thread.

    Each event loop is woken once, for all of its readers: a wake is a system call in
    which the caller loses the interpreter to the loop, and then waits for it.
    """
    by_loop = collections.defaultdict(list)
    for reader in readers:
        by_loop[reader._loop].append(reader._news)
    for loop, news in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed: nobody reads any more
            loop.call_soon_threadsafe(_set_all, news)


def _set_all(news: list[asyncio.Event]) -> None:
    for one in news:
        one.set()
