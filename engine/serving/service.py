"""What a server does with a call, whichever protocol brought it.

Checks the caller's limits, runs the request in the engine, and tells the observers how
it went. Knows nothing of gRPC and HTTP; raises `ServiceError`, which they translate.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from headrace.engine.async_llm import AsyncLLM, Reader
from headrace.engine.outputs import RequestOutput
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scoring import ScoreOutput
from headrace.engine.serving.call_reader import CallReader
from headrace.engine.serving.calls import (
    Call,
    CallRecord,
    Observer,
    as_service_errors,
    new_request_id,
)
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.limits import ServiceLimits
from headrace.engine.serving.rate_limits import Gate
from headrace.engine.serving.refusals import Refusals
from headrace.engine.serving.tenants import ANONYMOUS, KeyFile, Tenant

logger = logging.getLogger(__name__)


class GenerationService:
    """The engine behind a server; one event loop uses it.

    Args:
      engine: to run requests.
      model_name: that callers may name.
      limits: of every request.
      keys: whose calls are taken; None takes everybody's.
      observers: told of every call.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        model_name: str,
        limits: ServiceLimits | None = None,
        keys: KeyFile | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.engine, self.model_name = engine, model_name
        self.limits = limits or ServiceLimits()
        self._reader = CallReader(engine, self.limits)
        self.gate = Gate()
        self._keys, self._observers = keys, list(observers)
        self.refusals = Refusals(self._observers)
        self._running: dict[tuple[str, str], Reader] = {}
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_ready, self.is_draining = False, False

    @property
    def needs_key(self) -> bool:
        """Whether callers must show a bearer key."""
        return self._keys is not None

    @property
    def num_calls(self) -> int:
        """Calls that have entered and not ended."""
        return self._num_calls

    def counters(self) -> dict[str, int]:
        """What is counted here, besides the engine's metrics."""
        return {"unauthenticated_calls": self.refusals.num_calls}

    async def start(self) -> None:
        """Runs a real step; from then on the service is ready.

        Raises:
          RuntimeError: the engine fails.
        """
        params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
        output = await self.engine.generate(
            {"prompt_token_ids": [0]}, params, tenant=ANONYMOUS.name, uses_cache=False
        )
        if output.outputs[0].finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the first step failed: {output.outputs[0]}")
        self.is_ready = True

    def tenant_of(self, key: str | None) -> Tenant:
        """Who calls. Whoever tells a caller that it is refused notes it in `refusals`.

        Raises:
          ServiceError: unauthenticated.
        """
        return ANONYMOUS if self._keys is None else self._keys.tenant_of(key)

    async def stream(self, tenant: Tenant, call: Call) -> AsyncGenerator[RequestOutput]:
        """A call's outputs as they come; leaving the iteration ends it.

        Yields:
          At least one output, the last with `finished`. Their `request_id` is the
          caller's.

        Raises:
          ServiceError: it is refused, or the engine failed.
        """
        record = self._record(tenant, "generate", call.request_id)
        with self._observed(record):
            self._check_open()
            ready = await self._reader.read(call)
            record.num_prompt_tokens = len(ready.read.token_ids)
            ticket = self.gate.enter(tenant, ready.most_tokens)
            try:
                with as_service_errors():
                    self._check_open()
                    reader = await self.engine.add(
                        ready.prompt,
                        call.params,
                        read=ready.read,
                        tenant=tenant.name,
                        priority=tenant.priority,
                        uses_cache=call.uses_cache,
                        deadline_s=call.deadline_s,
                        queue_timeout_s=call.queue_timeout_s,
                    )
                # Closed at once: what it notes at its end is of use below.
                outputs = self._read(tenant, reader, record)
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        yield output
            finally:
                ticket.leave(record.num_prompt_tokens + record.num_output_tokens)

    async def check(self, tenant: Tenant, call: Call) -> None:
        """Whether the call itself is right; one that is not counts as a call.

        Raises:
          ServiceError: as `stream` would.
        """
        try:
            self._check_open()
            await self._reader.read(call)
        except ServiceError:
            with self._observed(self._record(tenant, "generate", call.request_id)):
                raise

    async def _read(
        self, tenant: Tenant, reader: Reader, record: CallRecord
    ) -> AsyncGenerator[RequestOutput]:
        place = (tenant.name, record.request_id)
        self._running[place] = reader
        try:
            async for output in reader:
                output.request_id = record.request_id
                if output.finished:
                    record.take(reader)
                yield output
        finally:
            record.take(reader)
            self._running.pop(place, None)
            self.engine.drop(reader)

    async def generate(self, tenant: Tenant, call: Call) -> RequestOutput:
        """A call's whole output; see `stream`."""
        params = dataclasses.replace(call.params, output_kind="final_only")
        outputs = self.stream(tenant, dataclasses.replace(call, params=params))
        async with contextlib.aclosing(outputs):
            (whole,) = [output async for output in outputs]
        return whole

    async def score(
        self, tenant: Tenant, prompt: Any, continuation: Any, **options: Any
    ) -> ScoreOutput:
        """How likely a continuation is; see `LLM.score`.

        Raises:
          ServiceError: it is refused, or could not be scored.
        """
        record = self._record(tenant, "score", None)
        with self._observed(record):
            self._check_open()
            for text in (prompt, continuation):
                if isinstance(text, str):
                    self.limits.check_text(text)
                else:
                    self._reader.check_len(len(text))
            with as_service_errors():
                pair = await self.engine.read_pair(prompt, continuation)
            length = len(pair.prompt.token_ids or ())
            record.num_prompt_tokens = length
            self._reader.check_len(length)
            ticket = self.gate.enter(tenant, length + 1)
            try:
                with as_service_errors():
                    found = await self.engine.score(
                        pair, tenant=tenant.name, priority=tenant.priority, **options
                    )
            finally:
                ticket.leave(length)
            if found.error is not None and self.engine.has_failed:
                raise ServiceError("internal", "the engine has failed")
            if found.error is not None:
                raise ServiceError("invalid_argument", found.error)
        return found

    async def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of a text as `generate` would read it.

        Raises:
          ServiceError: invalid_argument.
        """
        self.limits.check_text(text)
        with as_service_errors():
            return (await self.engine.read(text)).token_ids

    def cancel(self, tenant: Tenant, request_id: str) -> bool:
        """Ends a running request of the tenant with what it has; False if none is."""
        reader = self._running.get((tenant.name, request_id))
        if reader is None:
            return False
        self.engine.cancel(reader)
        return True

    async def drain(self, grace_s: float) -> None:
        """Takes no new calls; those that run have `grace_s` seconds to end.

        What still runs then ends with "cancelled" and what it has.
        """
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        if self._running:
            logger.warning("ending %d requests after the grace", len(self._running))
        for reader in list(self._running.values()):
            self.engine.cancel(reader)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), 10)

    def _check_open(self) -> None:
        if self.is_draining:
            raise ServiceError("unavailable", "the server is shutting down")
        if not self.is_ready:
            raise ServiceError("unavailable", "the server is starting")

    def _record(self, tenant: Tenant, method: str, given: str | None) -> CallRecord:
        request_id = given or new_request_id()
        if (tenant.name, request_id) in self._running:
            raise ServiceError(
                "invalid_argument", f"request_id {request_id!r:.80} is running already"
            )
        return CallRecord(
            request_id=request_id,
            tenant=tenant.name,
            method=method,
            wall_s=time.time(),
            arrival_s=time.perf_counter(),
        )

    @contextlib.contextmanager
    def _observed(self, record: CallRecord) -> Iterator[None]:
        """Counts a call while it runs, and tells the observers how it ended."""
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        except ServiceError as error:
            record.code, record.message = error.code, error.message
            raise
        except (GeneratorExit, asyncio.CancelledError):
            record.code = "cancelled"
            raise
        except Exception:
            record.code = "internal"
            raise
        finally:
            record.finished_s = record.finished_s or time.perf_counter()
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()
            for observer in self._observers:
                observer.on_call(record)
