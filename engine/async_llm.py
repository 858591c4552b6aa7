"""The engine for asyncio: add, stream, cancel, drain, over the same loop in a thread.

One thread alone touches the engine: it takes what was posted (new requests, cancels),
runs a turn, tells the readers, and again. The event loop never waits for a step. A
reader that is slow lets its own outputs grow; the batch does not wait for it.
"""

import asyncio
import collections
import concurrent.futures
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.engine import prompts, scoring
from headrace.engine.llm import LLM
from headrace.engine.outputs import RequestOutput
from headrace.engine.prompt_reader import ReadPrompt
from headrace.engine.reader import Reader, tell
from headrace.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLM:
    """An LLM whose requests are awaited; after it was built, use only this one.

    Args:
      llm: loaded and compiled. Closing this closes it.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._readers: dict[str, Reader] = {}
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Event()
        self._is_draining = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="headrace", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """For what never changes: configs, tokenizer. Its methods are the thread's."""
        return self._llm

    @property
    def has_failed(self) -> bool:
        """Whether it can serve nothing any more: a step has failed, or it is closed."""
        return self._llm._loop._failure is not None

    async def read(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> ReadPrompt:
        """Tokenizes a prompt, and compiles its grammar; neither holds up the engine.

        Raises:
          ValueError: see `PromptReader.read`.
        """
        (params,) = prompts.spread_params(sampling_params, 1)
        checked, reader = prompts.as_prompt(prompt), self._llm._reader
        if reader.is_quick(checked, params):
            return reader.read(checked, params)
        return await asyncio.to_thread(reader.read, checked, params)

    async def chat_prompt(self, messages: Any) -> prompts.Prompt:
        """A conversation as the model's chat template has it, for `add`.

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        return await asyncio.to_thread(
            self._llm._reader.chat, messages, add_generation_prompt=True
        )

    async def add(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        read: ReadPrompt | None = None,
        **options: Any,
    ) -> "Reader":
        """Puts a request into the queue.

        Args:
          prompt: a str, token ids, or a mapping of either.
          sampling_params: of the request.
          read: of `read` with the same prompt and parameters.
          **options: priority, tenant, uses_cache, deadline_s, queue_timeout_s; see
            `EngineLoop.submit`.

        Returns:
          An iterator over its outputs as they come; close it, or use `stream`.

        Raises:
          ValueError: the prompt or a value is out of its range.
          QueueFullError: the queue's bound is reached.
          RuntimeError: the engine drains, is closed, or has failed.
        """
        self._check_open()
        (params,) = prompts.spread_params(sampling_params, 1)
        checked, loop = prompts.as_prompt(prompt), asyncio.get_running_loop()
        ready = await self.read(checked, params) if read is None else read
        self._check_open()

        def submit() -> Reader:
            state = self._llm._submit(checked, params, ready, **options)
            reader = Reader(state, loop)
            self._readers[reader.request_id] = reader
            return reader

        posted = self._post(submit)
        try:
            return await asyncio.wrap_future(posted)
        except asyncio.CancelledError:
            # The engine may have taken the request already; nobody will read it.
            posted.add_done_callback(self._drop_unread)
            raise

    async def read_pair(self, prompt: Any, continuation: Any) -> scoring.Pair:
        """Tokenizes what `score` is to score.

        Raises:
          ValueError: the engine was built without `scoring`, or one of them is wrong.
        """
        scoring.check_scores(self._llm.engine_config)
        parts = prompts.as_prompt(prompt), prompts.as_prompt(continuation)
        return await asyncio.to_thread(scoring.joined, self._llm._reader, *parts)

    async def score(self, pair: scoring.Pair, **options: Any) -> scoring.ScoreOutput:
        """How likely the model finds a continuation; see `LLM.score`.

        Args:
          pair: of `read_pair`.
          **options: as for `add`.
        """
        output = await self.generate(pair.prompt, scoring.PARAMS, **options)
        return scoring.score_output(output, pair.length)

    async def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yields a prompt's output piece by piece; arguments as for `add`.

        Leaving the iteration, or cancelling its task, ends the request.
        """
        reader = await self.add(prompt, sampling_params, **options)
        try:
            async for output in reader:
                yield output
        finally:
            self.drop(reader)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The whole output of one prompt; arguments as for `add`."""
        reader = await self.add(prompt, sampling_params, **options)
        try:
            async for _ in reader:
                pass
            return reader.state.output()
        finally:
            self.drop(reader)

    def cancel(self, reader: "Reader") -> None:
        """Ends a request with what it has: finish_reason "cancelled"."""

        def end() -> None:
            self._llm._loop.cancel(reader.state)
            tell([reader])

        self._post(end)

    async def drain(self) -> None:
        """Takes no new requests, and returns when all have ended."""
        self._is_draining = True
        while await asyncio.wrap_future(self._post(lambda: self._llm._loop.has_work)):
            await asyncio.sleep(0.01)

    async def stats(self) -> dict[str, Any]:
        """See `LLM.stats`."""
        return await asyncio.wrap_future(self._post(self._llm.stats))

    async def close(self) -> None:
        """Ends every request with "cancelled" and frees the device memory."""
        self._is_closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def _check_open(self) -> None:
        if self._is_draining or self._is_closing:
            raise RuntimeError(
                "the engine takes no new requests: it drains or is closed"
            )

    def drop(self, reader: "Reader") -> None:
        """Ends a request that nobody reads any more, and forgets it."""

        def forget() -> None:
            self._readers.pop(reader.request_id, None)
            self._llm._loop.drop(reader.state)

        self._post(forget)

    def _drop_unread(self, posted: "concurrent.futures.Future[Reader]") -> None:
        if not posted.cancelled() and posted.exception() is None:
            self.drop(posted.result())

    def _post(self, call: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
        """Has the engine's thread run something before its next turn."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # cancelled before its turn came
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        self._inbox.append(run)
        self._wake.set()
        if not self._thread.is_alive():
            self._empty_inbox()  # nobody else will
        return future

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _run(self) -> None:
        """The engine's thread."""
        while not self._is_closing:
            self._wake.clear()
            self._empty_inbox()
            if not self._llm._loop.has_work:
                self._wake.wait()
                continue
            try:
                news = self._llm._loop.turn()
            except RuntimeError as error:
                # The engine has failed and ended every request; later ones are told.
                logger.error("the engine has failed", exc_info=error)
                tell(self._readers.values())
                self._wake.wait()
                continue
            found = [self._readers.get(state.request_id) for state in news]
            tell(reader for reader in found if reader is not None)
        self._llm.close()
        tell(self._readers.values())
        self._empty_inbox()
