"""The calls of a soak over HTTP: good ones, cut short ones, wrong ones.

Each is `await kind(client, rng)` and returns its status, see soak_tally.py.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.scripts import http_stream_client as http

COMPLETIONS = "/v1/completions"


class HttpClient(NamedTuple):
    """Where and as whom; every call has a connection of its own.

    Attributes:
      address: host:port.
      key: bearer key.
      model: as the server calls it.
      vocab_size: of the model.
    """

    address: str
    key: str
    model: str
    vocab_size: int

    def fields(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        """A good body."""
        prompt = [rng.randrange(1, self.vocab_size) for _ in range(rng.randint(1, 99))]
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": rng.randint(1, 160),
            "temperature": rng.choice([0, 0.8]),
            **more,
        }

    async def status(self, body: Any, **options: Any) -> str:
        """What a request that is answered at once is answered."""
        options = {"path": COMPLETIONS, "key": self.key} | options
        raw = http.request(options.pop("path"), body, **options)
        async with http.opened(self.address) as call:
            with contextlib.suppress(ConnectionError):  # refused before all was sent
                await call.send(raw)
            status = await call.head()
            await call.body()
            return str(status)

    async def stream(self, fields: Mapping[str, Any], stop_after: int | None) -> str:
        """Reads a stream, or vanishes after so many events."""
        raw = http.request(COMPLETIONS, {**fields, "stream": True}, key=self.key)
        async with http.opened(self.address) as call:
            await call.send(raw)
            if (status := await call.head()) != 200:
                return str(status)
            reason, count = "cut off", 0
            async with contextlib.aclosing(call.events()) as events:
                async for event in events:
                    if event is None:
                        return f"{status}:{reason}"
                    if "error" in event:
                        return f"{status}:error"
                    for one in event["choices"]:
                        reason = one["finish_reason"] or reason
                    count += 1
                    if count == stop_after:
                        call.vanish()
                        return "gone"
            return f"{status}:cut off"


async def stream(client: HttpClient, rng: random.Random) -> str:
    return await client.stream(client.fields(rng), None)


async def whole(client: HttpClient, rng: random.Random) -> str:
    raw = http.request(COMPLETIONS, client.fields(rng), key=client.key)
    async with http.opened(client.address) as call:
        await call.send(raw)
        status = await call.head()
        body = await call.body()
        reasons = [r for r in ("length", "stop") if f'"{r}"'.encode() in body]
        return f"{status}:{reasons[0]}" if status == 200 and reasons else str(status)


async def disconnect(client: HttpClient, rng: random.Random) -> str:
    fields = client.fields(rng)
    if rng.random() < 0.5:
        return await client.stream(fields, rng.randint(1, 20))
    is_stream = rng.random() < 0.7
    raw = http.request(COMPLETIONS, fields | {"stream": is_stream}, key=client.key)
    async with http.opened(client.address) as call:
        await call.send(raw)
        await asyncio.sleep(rng.uniform(0, 2))
        call.vanish()
        return "gone"


async def half_a_request(client: HttpClient, rng: random.Random) -> str:
    raw = http.request(COMPLETIONS, client.fields(rng), key=client.key)
    async with http.opened(client.address) as call:
        await call.send(raw[: rng.randrange(1, len(raw))])
        await asyncio.sleep(rng.uniform(0, 1))
        call.vanish()
        return "gone"


async def wrong_value(client: HttpClient, rng: random.Random) -> str:
    spoilt = _SPOILT[rng.randrange(len(_SPOILT))]
    return await client.status(client.fields(rng) | spoilt)


_SPOILT: Sequence[Mapping[str, Any]] = (
    {"temperature": -1},
    {"temperature": "hot"},
    {"max_tokens": 10**6},
    {"max_tokens": -1},
    {"n": 0},
    {"prompt": []},
    {"prompt": [10**9]},
    {"prompt": [1.5]},
    {"prompt": {"a": 1}},
    {"stream": "yes"},
    {"stop": [1]},
    {"logit_bias": {"x": 1}},
    {"model": 3},
)


async def bad_json(client: HttpClient, rng: random.Random) -> str:
    body = rng.choice(
        [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}', b"[" * 5000, rng.randbytes(99)]
    )
    return await client.status(body)


async def oversized(client: HttpClient, rng: random.Random) -> str:
    body = b'{"model": "' + b"x" * (2**16 + rng.randint(0, 2**16)) + b'"}'
    return await client.status(body)


async def wrong_key(client: HttpClient, rng: random.Random) -> str:
    key = rng.choice([None, "hr-nobody", "x" * 2000])
    return await client.status(client.fields(rng), key=key)


async def wrong_route(client: HttpClient, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return await client.status(b"", path="/v1/nothing")
    return await client.status(b"", method="GET")


async def wrong_type(client: HttpClient, rng: random.Random) -> str:
    return await client.status(client.fields(rng), content_type="text/plain")


async def garbage(client: HttpClient, rng: random.Random) -> str:
    async with http.opened(client.address) as call:
        await call.send(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        return str(await call.head())


Kind = Callable[[HttpClient, random.Random], Awaitable[str]]

# Kind -> (share of all calls in percent, how).
KINDS: Mapping[str, tuple[int, Kind]] = {
    "http stream": (10, stream),
    "http whole": (2, whole),
    "http disconnect": (11, disconnect),
    "http half a request": (2, half_a_request),
    "http wrong value": (2, wrong_value),
    "http bad json": (1, bad_json),
    "http oversized": (1, oversized),
    "http wrong key": (1, wrong_key),
    "http wrong route": (1, wrong_route),
    "http wrong type": (1, wrong_type),
    "http garbage": (1, garbage),
}
