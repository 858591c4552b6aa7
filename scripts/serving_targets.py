"""What a benchmark sends its requests to: a gRPC server, an HTTP one, or an engine.

A target streams one request's pieces and raises RequestFailed for one that fails; when
that was is the caller's to note. OpenAI's protocol over HTTP is in serving_http.py.
"""

import asyncio
import contextlib
import dataclasses
import ssl
import urllib.request
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from headrace.client import AsyncClient, CallError, Tls
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import serving_counters
from headrace.scripts.serving_workloads import Item


class RequestFailed(Exception):
    """A request that gave less than it was asked for.

    Attributes:
      reason: a short name, by which failures are counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a request's output.

    Attributes:
      tokens: that came with it.
      prompt_tokens: of the request, where the server tells them.
      total_tokens: of the whole output, in the last piece, where `tokens` was a guess.
    """

    tokens: int
    prompt_tokens: int | None = None
    total_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a target says of itself; None: it does not."""

    model: str
    max_context_len: int | None = None
    vocab_size: int | None = None
    num_slots: int | None = None


class Target(Protocol):
    """Takes requests."""

    async def facts(self) -> Facts:
        """Who it is; raises OSError or RequestFailed where it is not there."""
        ...

    def stream(self, item: Item) -> AsyncGenerator[Piece]:
        """A request's pieces as they come; raises RequestFailed."""
        ...

    async def counters(self) -> dict[str, float] | None:
        """A state as in serving_counters.py; None where it shows none."""
        ...

    async def close(self) -> None:
        """Ends what runs."""
        ...


def sampling(item: Item, *, ignore_eos: bool) -> SamplingParams:
    """Greedy, to its length, or to the model's end token before it."""
    return SamplingParams(
        temperature=0.0, max_tokens=item.max_tokens, ignore_eos=ignore_eos
    )


class GrpcTarget:
    """A server of ours.

    Args:
      address: host:port.
      key: bearer key.
      tls: None is plain text.
      ignore_eos: outputs have their full length.
      metrics_url: page of the same server's HTTP front; None: counters are not known.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        tls: Tls | None = None,
        ignore_eos: bool = True,
        metrics_url: str | None = None,
    ) -> None:
        self._metrics_url = metrics_url and checked_url("metrics_url", metrics_url)
        self._client = AsyncClient(address, key=key, tls=tls)
        self._ignore_eos = ignore_eos

    async def facts(self) -> Facts:
        """Of ModelInfo."""
        with _as_failures():
            found = await self._client.model_info(timeout_s=30)
        return Facts(
            model=found.model_name,
            max_context_len=found.max_context_tokens,
            vocab_size=found.vocab_size,
        )

    async def stream(self, item: Item) -> AsyncGenerator[Piece]:
        """One Generate call."""
        params = sampling(item, ignore_eos=self._ignore_eos)
        reason = None
        with _as_failures():
            pieces = self._client.stream(
                item.prompt if isinstance(item.prompt, str) else list(item.prompt),
                params,
            )
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    tokens = sum(len(one.token_ids) for one in piece.outputs)
                    ends = [o.finish_reason for o in piece.outputs if o.finish_reason]
                    reason = ends[0] if ends else reason
                    yield Piece(tokens=tokens, prompt_tokens=piece.prompt_tokens)
        check_end(reason)

    async def counters(self) -> dict[str, float] | None:
        """Of the metrics page."""
        if self._metrics_url is None:
            return None
        return await asyncio.to_thread(read_page, self._metrics_url)

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()


class EngineTarget:
    """An engine in this process, without a server before it.

    Args:
      llm: built; closed with this.
      model: what the report calls it.
      ignore_eos: outputs have their full length.
    """

    def __init__(self, llm: Any, *, model: str, ignore_eos: bool = True) -> None:
        from headrace.engine.async_llm import AsyncLLM  # only here is jax needed

        self._engine, self._ignore_eos = AsyncLLM(llm), ignore_eos
        self._model = model

    async def facts(self) -> Facts:
        """Of its configs."""
        llm = self._engine.llm
        return Facts(
            model=self._model,
            max_context_len=llm.engine_config.max_context_len,
            vocab_size=llm.model_config.vocab_size,
            num_slots=llm.engine_config.num_slots,
        )

    async def stream(self, item: Item) -> AsyncGenerator[Piece]:
        """One request of AsyncLLM."""
        prompt: Any = item.prompt
        if not isinstance(prompt, str):
            prompt = {"prompt_token_ids": list(prompt)}
        params = sampling(item, ignore_eos=self._ignore_eos)
        reason, message = None, None
        pieces: Any = self._engine.stream(prompt, params)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                one = piece.outputs[0]
                reason, message = one.finish_reason, one.finish_message
                length = len(piece.prompt_token_ids)
                yield Piece(tokens=len(one.token_ids), prompt_tokens=length)
        check_end(reason, message)

    async def counters(self) -> dict[str, float] | None:
        """Of the engine's stats."""
        return serving_counters.of_stats(await self._engine.stats())

    async def close(self) -> None:
        """Closes the engine."""
        await self._engine.close()


def check_end(reason: str | None, message: str | None = None) -> None:
    """Whether an output ended as it should.

    Raises:
      RequestFailed: it was given up, or its stream ended before it did.
    """
    if reason not in ("stop", "length"):
        told = message or f"the output ended with {reason!r}"
        raise RequestFailed(reason or "cut off", told)


def checked_url(name: str, url: str) -> str:
    """The URL without a slash at its end; ValueError if it is none of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{name} must be http://... or https://..., got {url!r}")
    return url.rstrip("/")


def read_page(
    url: str, context: ssl.SSLContext | None = None
) -> dict[str, float] | None:
    """The state that a metrics page shows; None where there is no such page.

    Args:
      url: of `checked_url`.
      context: whom to trust; None takes the system's list.
    """
    try:
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:
            return serving_counters.of_page(answer.read().decode()) or None
    except (OSError, ValueError):  # URLError is an OSError
        return None


@contextlib.contextmanager
def _as_failures() -> Any:
    """The client's errors as ours."""
    try:
        yield
    except CallError as error:
        raise RequestFailed(error.code, error.message) from None
