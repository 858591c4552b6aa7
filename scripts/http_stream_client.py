"""HTTP/1.1 by hand, on asyncio's streams: what trials of a server need, and rudeness.

Cheaper per event than a client library, so that the server is what is measured; and a
caller can send what no library would, or vanish in the middle.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any


class HttpCall:
    """One connection with one request on it.

    Attributes:
      status: of the response's head.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0

    async def send(self, raw: bytes) -> None:
        """Sends bytes as they are."""
        self._writer.write(raw)
        await self._writer.drain()

    async def head(self) -> int:
        """Reads the response's head; returns the status.

        Raises:
          ConnectionError: the server closed without one.
        """
        line = await self._reader.readline()
        if not line.startswith(b"HTTP/1.1 "):
            raise ConnectionError("the server closed without a response")
        while (await self._reader.readline()).strip():
            pass
        self.status = int(line.split()[1])
        return self.status

    async def events(self) -> AsyncGenerator[dict[str, Any] | None]:
        """A stream's objects; None stands for [DONE].

        Chunks' lengths stand on lines of their own, which are no events.
        """
        async for line in self._reader:
            if line.startswith(b"data: "):
                text = line[6:].strip()
                yield None if text == b"[DONE]" else json.loads(text)
                if text == b"[DONE]":
                    return

    async def body(self) -> bytes:
        """The rest, up to the end of the connection."""
        return await self._reader.read()

    def vanish(self) -> None:
        """Ends the connection without a word more."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def opened(address: str) -> AsyncIterator[HttpCall]:
    """A connection to host:port, closed at the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield HttpCall(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def request(
    path: str,
    body: bytes | Mapping[str, Any] | None = None,
    *,
    method: str = "POST",
    key: str | None = None,
    **headers: str,
) -> bytes:
    """A request's bytes; the server closes the connection after its response.

    Args:
      path: of the resource.
      body: bytes, or what becomes JSON.
      method: of HTTP.
      key: bearer key.
      **headers: replace ours; "_" stands for "-".
    """
    if isinstance(body, Mapping):
        body = json.dumps(body).encode()
    fields = {
        "host": "localhost",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(body or b"")),
    }
    if key is not None:
        fields["authorization"] = f"Bearer {key}"
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
