"""What is answered to one OpenAI call: one object, or chunks. Knows no HTTP."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.calls import Call
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.http_body import Ask
from headrace.engine.serving.openai_objects import (
    chat_body,
    chat_logprobs,
    completion_body,
    finish_reason,
    text_logprobs,
)
from headrace.engine.serving.tenants import Tenant

if TYPE_CHECKING:
    from headrace.engine.serving.service import GenerationService


class Reply:
    """What is answered to one call, whole or in pieces.

    Args:
      service: runs it.
      tenant: whose call it is.
      ask: what was asked.
      request_id: under which logs and traces know it.
    """

    def __init__(
        self, service: "GenerationService", tenant: Tenant, ask: Ask, request_id: str
    ) -> None:
        self._service, self._tenant, self._ask = service, tenant, ask
        self._request_id = request_id
        prefix = "chatcmpl" if ask.is_chat else "cmpl"
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{request_id.removeprefix('req-')}",
            "created": int(time.time()),
            "model": service.model_name,
        }

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The call's chunks as they come.

        Raises:
          ServiceError: it is refused, or was given up.
        """
        chunks = Chunks(self._ask, **self._head)
        async with contextlib.aclosing(self._outputs(self._ask.params)) as outputs:
            async for place, output in outputs:
                for chunk in chunks.of(place, output):
                    yield chunk
        for chunk in chunks.last():
            yield chunk

    async def whole(self) -> dict[str, Any]:
        """The call's one object.

        Raises:
          ServiceError: it is refused, or was given up.
        """
        params = dataclasses.replace(self._ask.params, output_kind="final_only")
        found: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self._outputs(params)) as pieces:
            async for place, output in pieces:
                check_ended(output)
                found[place] = output
        outputs = [found[place] for place in sorted(found)]
        head = self._head | {"num_top": self._ask.num_top}
        if self._ask.is_chat:
            return chat_body(outputs[0], **head)
        return completion_body(outputs, **head)

    async def _outputs(
        self, params: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        calls, is_one = [], len(self._ask.prompts) == 1
        for place, prompt in enumerate(self._ask.prompts):
            name = self._request_id if is_one else f"{self._request_id}-{place}"
            calls.append(Call(**prompt, params=params, request_id=name))
        if not is_one:
            # A wrong one refuses them all, before another's tokens are told.
            for call in calls:
                await self._service.check(self._tenant, call)
        streams = [self._service.stream(self._tenant, call) for call in calls]
        async with contextlib.aclosing(merged(streams)) as pieces:
            async for piece in pieces:
                yield piece


class Chunks:
    """Outputs of a call as OpenAI's chunk objects; one call's, in their order.

    Args:
      ask: what was asked.
      id: of the reply, the same in all chunks.
      created: seconds since 1970.
      model: name that the reply carries.
    """

    def __init__(self, ask: Ask, *, id: str, created: int, model: str) -> None:
        kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        self._head = {"id": id, "object": kind, "created": created, "model": model}
        self._ask = ask
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._prompt_lens: dict[int, int] = {}
        self._num_output_tokens = 0

    def of(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks of what has come for the prompt at `place`.

        Raises:
          ServiceError: see `check_ended`.
        """
        check_ended(output)
        self._prompt_lens[place] = len(output.prompt_token_ids)
        for one in output.outputs:
            index = place * self._ask.params.n + one.index
            self._num_output_tokens += len(one.token_ids)
            if self._ask.is_chat and index not in self._begun:
                self._begun.add(index)
                yield self._chunk(
                    index, {"delta": {"role": "assistant", "content": ""}}
                )
            make = self._chat_part if self._ask.is_chat else self._text_part
            ended = finish_reason(one) if one.finished() else None
            yield self._chunk(index, make(index, one), ended)

    def last(self) -> Iterator[dict[str, Any]]:
        """What follows when all has come: the usage, if it was asked."""
        if self._ask.has_usage:
            yield self._head | {"choices": [], "usage": self._usage()}

    def _chat_part(self, index: int, one: CompletionOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(one, self._ask.num_top)
        return {"delta": {"content": one.text}, "logprobs": logprobs}

    def _text_part(self, index: int, one: CompletionOutput) -> dict[str, Any]:
        start = self._offsets.get(index, 0)
        logprobs = text_logprobs(one, self._ask.num_top, start)
        if logprobs is not None and logprobs["tokens"]:
            end = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
            self._offsets[index] = end
        return {"text": one.text, "logprobs": logprobs}

    def _chunk(
        self, index: int, part: dict[str, Any], ended: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **part, "finish_reason": ended}
        chunk = self._head | {"choices": [choice]}
        if self._ask.has_running_usage:
            chunk["usage"] = self._usage()
        elif self._ask.has_usage:
            chunk["usage"] = None  # as OpenAI has it: it comes last
        return chunk

    def _usage(self) -> dict[str, int]:
        prompt, outputs = sum(self._prompt_lens.values()), self._num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": outputs,
            "total_tokens": prompt + outputs,
        }


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs of several requests as they come, each with its request's place.

    The first that raises ends all; so does leaving the iteration.
    """
    # One place: a reader who is slow lets outputs join where they are made.
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
    queue = asyncio.Queue(1)

    async def forward(place: int, stream: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    await queue.put((place, output))
        except Exception as error:
            await queue.put((place, error))
        else:
            await queue.put((place, None))

    tasks = [asyncio.ensure_future(forward(i, one)) for i, one in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            place, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_ended(output: RequestOutput) -> None:
    """Whether all completions that have ended are whole.

    Raises:
      ServiceError: one was given up, for a reason that OpenAI's replies have no word
        for.
    """
    for one in output.outputs:
        if one.finish_reason == "cancelled":
            raise ServiceError("unavailable", "the server ended the request early")
        if one.finish_reason == "rejected":
            message = one.finish_message or "it waited too long"
            raise ServiceError("unavailable", message)
        if one.finish_reason == "error":
            # With a message it is what the request itself forbids, else the engine.
            if one.finish_message is None:
                raise ServiceError("internal", "the engine failed")
            raise ServiceError("invalid_argument", one.finish_message)
