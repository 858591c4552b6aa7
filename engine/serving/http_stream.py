"""JSON objects as server-sent events, and callers who go away.

Speaks ASGI itself and knows no web framework. Whoever goes away, or takes nothing for
too long, is noticed here, and what was done for them ends.
"""

import asyncio
import contextlib
import json
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    MutableMapping,
)
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep the pieces until there are many
}


class GoneError(Exception):
    """The caller has gone away, or takes nothing any more."""


def dumped(fields: Mapping[str, Any]) -> bytes:
    """JSON of ASCII alone: no reader can break a line at U+2028, and half of a
    surrogate pair that a caller sent goes back as it came.

    Raises:
      ValueError: a number is not finite.
    """
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


async def until_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it as soon as the caller goes away.

    Args:
      receive: of ASGI; the request's body has been read.
      work: what is done for the caller.

    Raises:
      GoneError: the caller has gone; `work` has cleaned up by then.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = working, leaving = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(gone()),
    )
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream:
    """An ASGI response of server-sent events; its head waits for the first one.

    Args:
      events: JSON objects; begun and closed here.
      on_error: what went wrong, as a response before the first event, and as a last
        event after it.
      headers: of the response, besides its own.
      stall_s: seconds after which a caller who takes nothing is given up.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        on_error: Callable[[Exception], tuple[Any, dict[str, Any]]],
        *,
        headers: Mapping[str, str],
        stall_s: float,
    ) -> None:
        self._events, self._on_error = events, on_error
        self._headers, self._stall_s = {**_HEADERS, **headers}, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events; whoever goes away ends them."""
        with contextlib.suppress(GoneError):
            await until_gone(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        async with contextlib.aclosing(self._lines()) as lines:
            async for line in lines:
                if isinstance(line, Exception):
                    response, event = self._on_error(line)
                    if not has_begun:
                        return await response(scope, receive, send)
                    line = _event(dumped(event))
                if not has_begun:
                    await self._send(send, self._start())
                    has_begun = True
                body = {"type": "http.response.body", "body": line, "more_body": True}
                await self._send(send, body)
        await self._send(send, {"type": "http.response.body", "body": b""})

    async def _lines(self) -> AsyncGenerator[bytes | Exception]:
        """Events as bytes, then [DONE], or what went wrong."""
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    yield _event(dumped(event))
            except Exception as error:
                yield error
                return
        yield _event(b"[DONE]")

    def _start(self) -> Message:
        pairs = [(k.encode(), v.encode()) for k, v in self._headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": pairs}

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            raise GoneError from None


def _event(text: bytes) -> bytes:
    return b"data: " + text + b"\n\n"
