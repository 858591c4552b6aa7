"""A whole server in one event loop: engine, service, gRPC, and HTTP where asked for.

    bind -> first step -> SERVING -> SIGTERM -> NOT_SERVING, refuse -> grace -> exit

`scripts/serve.py` reads the flags and builds the engine.
"""

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.llm import LLM
from headrace.engine.outputs import RequestOutput
from headrace.engine.serving import access_log, tracing
from headrace.engine.serving.calls import Call, CallRecord, Observer
from headrace.engine.serving.grpc_server import GrpcServer
from headrace.engine.serving.http_server import HttpServer
from headrace.engine.serving.prometheus import Metrics, exposition
from headrace.engine.serving.prompt_log import PromptLog
from headrace.engine.serving.server_options import ServerOptions
from headrace.engine.serving.service import GenerationService
from headrace.engine.serving.tenants import KeyFile, Tenant

logger = logging.getLogger(__name__)

# For what is left when all requests have ended: their last bytes, health watchers.
_LAST_S = 2.0


class FailureWatch:
    """Notices that the engine has failed for good.

    Args:
      engine: that it watches.

    Attributes:
      has_failed: set from then on.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.has_failed = asyncio.Event()

    def on_call(self, record: CallRecord) -> None:
        """A failure ends calls, so looking whenever one ends is enough."""
        if self._engine.has_failed:
            self.has_failed.set()


class _LoggingService(GenerationService):
    """Prompts pass here whichever front they came by."""

    prompt_log = PromptLog("none")

    def stream(self, tenant: Tenant, call: Call) -> AsyncGenerator[RequestOutput]:
        self.prompt_log.write(tenant.name, call)
        return super().stream(tenant, call)


class StopSignals:
    """SIGTERM and SIGINT as events: the first one drains, the second ends the grace."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """What a signal does."""
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the process's signals meanwhile."""
        loop, names = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for name in names:
            loop.add_signal_handler(name, self.stop)
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(name)


async def serve(
    llm: LLM,
    options: ServerOptions,
    *,
    announce: Callable[[str], None],
    observers: Sequence[Observer] = (),
    metrics: Metrics | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, then drains.

    Args:
      llm: compiled; closed at the end.
      options: of the server.
      announce: is told each address once calls are served there.
      observers: of every call.
      metrics: gives text and content type of /metrics over HTTP; None gives the
        engine's.

    Returns:
      The exit code: 0, or 1 where the engine has failed.

    Raises:
      ValueError: a file that cannot be read or does not hold what it should.
      OSError: an address that cannot be bound.
      RuntimeError: the first step failed.
    """
    signals = StopSignals()
    # To the very end: a late signal must not kill it.
    with signals.installed(), _own_observers(options) as own:
        engine = AsyncLLM(llm)
        try:
            watch = FailureWatch(engine)
            service = make_service(engine, options, [watch, *own, *observers])
            metrics = metrics or functools.partial(
                exposition,
                engine,
                model_name=options.model_name,
                prefix=options.metrics_prefix,
                counters=service.counters,
            )
            async with running(service, options, metrics) as (grpc_server, http_server):
                announce(f"serving gRPC on {grpc_server.address}")
                if http_server is not None:
                    announce(f"serving HTTP on {http_server.address}")
                await _first_of(signals.first.wait(), watch.has_failed.wait())
                if watch.has_failed.is_set():
                    logger.error("the engine has failed: the server ends")
                    return 1
                await _drain(service, grpc_server, signals, options.grace_s)
            return 0
        finally:
            await engine.close()


@contextlib.contextmanager
def _own_observers(options: ServerOptions) -> Iterator[list[Observer]]:
    """Those that the options ask for; what they hold is written at the end."""
    with contextlib.ExitStack() as stack:
        own: list[Observer] = []
        if options.access_log is not None:
            own.append(stack.enter_context(access_log.opened(options.access_log)))
        if options.otlp_endpoint is not None:
            traces = tracing.opened(options.otlp_endpoint, options.model_name)
            own.append(stack.enter_context(traces))
        yield own


def make_service(
    engine: AsyncLLM, options: ServerOptions, observers: Sequence[Observer] = ()
) -> GenerationService:
    """The service that the options ask for, not yet started.

    Raises:
      ValueError: the key file cannot be read.
    """
    service = _LoggingService(
        engine,
        model_name=options.model_name,
        limits=options.limits,
        keys=None if options.key_file is None else KeyFile(options.key_file),
        observers=observers,
    )
    service.prompt_log = PromptLog(options.log_prompts)
    return service


@contextlib.asynccontextmanager
async def running(
    service: GenerationService,
    options: ServerOptions,
    metrics: Metrics | None = None,
) -> AsyncIterator[tuple[GrpcServer, HttpServer | None]]:
    """The service behind its fronts, after its first step and healthy.

    Yields:
      The servers; HTTP's where it was asked for.
    """
    grpc_server, http_server = GrpcServer(service, options), None
    try:
        if options.http_port is not None:
            http_server = HttpServer(_http_app(service, options, metrics), options)
        await grpc_server.start()
        if http_server is not None:
            await http_server.start()
        await service.start()
        await grpc_server.set_healthy(True)
        yield grpc_server, http_server
    finally:
        await grpc_server.set_healthy(False)
        if http_server is not None:
            await http_server.stop()
        await grpc_server.stop(_LAST_S)


def _http_app(
    service: GenerationService, options: ServerOptions, metrics: Metrics | None
) -> object:
    try:
        from headrace.engine.serving.http_front import make_app
    except ImportError as error:
        raise ValueError(f"http_port needs the extra `http`: {error}") from None
    return make_app(service, metrics=metrics, max_body_bytes=options.max_message_bytes)


async def _drain(
    service: GenerationService, server: GrpcServer, signals: StopSignals, grace_s: float
) -> None:
    """Unhealthy at once; returns when no call runs any more."""
    logger.warning("draining: %d calls have %g s to end", service.num_calls, grace_s)
    await server.set_healthy(False)
    draining = asyncio.create_task(service.drain(grace_s))
    await _first_of(asyncio.shield(draining), signals.second.wait())
    if not draining.done():
        await service.drain(0)
    await draining


async def _first_of(*waits: Awaitable[object]) -> None:
    """Waits for one, and gives the others up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
