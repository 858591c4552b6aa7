"""OpenAI's completions over HTTP, streamed, as a benchmark reads them: any server's.

A chunk has text, not tokens. Servers that tell a running usage (this one, vLLM, SGLang)
are counted exactly; elsewhere a chunk counts as one token until the last one tells the
sum. httpx is imported here and nowhere else in the benchmark (extra `test`).
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from headrace.scripts.serving_targets import (
    Facts,
    Piece,
    RequestFailed,
    check_end,
    checked_url,
    read_page,
)
from headrace.scripts.serving_workloads import Item

_USAGE = {"include_usage": True, "continuous_usage_stats": True}


class HttpTarget:
    """A server with `/v1/completions`.

    Args:
      url: such as http://127.0.0.1:8000, without /v1.
      model: that is asked; None takes the first of /v1/models.
      key: bearer key.
      ca: PEM file that signed the server's certificate; None takes the system's.
      ignore_eos: outputs have their full length, by vLLM's field of this name.
      metrics_url: None takes url + "/metrics".

    Raises:
      ValueError: httpx is not installed, or the URL is none of HTTP.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        ca: str | None = None,
        ignore_eos: bool = True,
        metrics_url: str | None = None,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ValueError("--http needs httpx: pip install httpx") from None
        url = checked_url("http", url).removesuffix("/v1")
        self._model, self._ignore_eos = model, ignore_eos
        self._metrics_url = checked_url("metrics_url", metrics_url or f"{url}/metrics")
        self._context = ssl.create_default_context(cafile=ca)
        self._errors = httpx.HTTPError
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=None,  # the caller's own limit is of the whole request
            limits=httpx.Limits(max_connections=None),
            verify=self._context,
        )

    async def facts(self) -> Facts:
        """Of /v1/models, for what other servers tell, too."""
        try:
            answer = await self._client.get("/v1/models", timeout=30)
            await _check_status(answer)
            listed = answer.json()["data"]
        except (self._errors, KeyError, TypeError, ValueError) as error:
            message = f"/v1/models: {error or type(error).__name__}"
            raise RequestFailed(type(error).__name__, message) from None
        if self._model is None and listed:
            self._model = listed[0]["id"]
        found = next((one for one in listed if one["id"] == self._model), {})
        return Facts(
            model=self._model or "?", max_context_len=found.get("max_model_len")
        )

    async def stream(self, item: Item) -> AsyncGenerator[Piece]:
        """One completion."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": item.prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": _USAGE,
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        chunks = Chunks()
        try:
            async with self._client.stream(
                "POST", "/v1/completions", json=body
            ) as answer:
                await _check_status(answer)
                async for line in answer.aiter_lines():
                    if (piece := chunks.take(line)) is not None:
                        yield piece
        except self._errors as error:
            name = type(error).__name__
            raise RequestFailed(name, str(error) or name) from None
        yield chunks.end()

    async def counters(self) -> dict[str, float] | None:
        """Of the metrics page."""
        return await asyncio.to_thread(read_page, self._metrics_url, self._context)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


class Chunks:
    """Server-sent events of one completion, in their order."""

    def __init__(self) -> None:
        self._counted, self._total = 0, None
        self._prompt_tokens: int | None = None
        self._reason: str | None = None
        self._is_whole, self._has_running_usage = False, False

    def take(self, line: str) -> Piece | None:
        """What a line of the stream brings; None where it has no tokens.

        Raises:
          RequestFailed: it tells an error, or is not what such a server sends.
        """
        name, _, text = line.partition(":")
        text = text.strip()
        if name != "data":
            return None  # a comment, or a field that says nothing of tokens
        if text == "[DONE]":
            self._is_whole = True
            return None
        try:
            return self._chunk(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"not a completion's chunk ({error}): {text:.80}"
            raise RequestFailed("malformed stream", message) from None

    def end(self) -> Piece:
        """What is left to tell when the stream has ended.

        Raises:
          RequestFailed: it ended before the completion did.
        """
        check_end(self._reason if self._is_whole else None)
        known = None if self._has_running_usage else self._total
        return Piece(tokens=0, prompt_tokens=self._prompt_tokens, total_tokens=known)

    def _chunk(self, chunk: Mapping[str, Any]) -> Piece | None:
        if "error" in chunk:
            error = chunk["error"]
            raise RequestFailed(f"stream error {error.get('code')}", str(error))
        usage, choices = chunk.get("usage"), chunk.get("choices") or []
        if usage is not None:
            self._total = usage["completion_tokens"]
            self._prompt_tokens = usage["prompt_tokens"]
        for choice in choices:
            self._reason = choice.get("finish_reason") or self._reason
        if not choices:
            return None
        if usage is not None:
            self._has_running_usage = True
            tokens = self._total - self._counted
        else:
            tokens = int(bool(choices[0].get("text")))
        self._counted += tokens
        return Piece(tokens=tokens, prompt_tokens=self._prompt_tokens)


async def _check_status(answer: Any) -> None:
    """Raises RequestFailed for an answer that is none."""
    if answer.status_code != 200:
        text = (await answer.aread()).decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise RequestFailed(f"HTTP {answer.status_code}", text[:300])
