"""Stands before every gRPC method: keys, malformed messages, statuses of failures.

Nothing that a caller sends may end as INTERNAL or UNKNOWN, and no text of a caller or
of an exception may reach the log: an exception's message can quote a prompt.
"""

import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from headrace.engine.serving.calls import TRACE_PARENT
from headrace.engine.serving.errors import ServiceError

if TYPE_CHECKING:
    from headrace.engine.serving.service import GenerationService

logger = logging.getLogger(__name__)

STATUS = {
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "resource_exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "unimplemented": grpc.StatusCode.UNIMPLEMENTED,
    "internal": grpc.StatusCode.INTERNAL,
}
# gRPC's own retry policies wait for so long; negative would be "do not try again".
# Source: gRFC A6, "Pushback".
PUSHBACK = "grpc-retry-pushback-ms"

# Load balancers ask for it without a key, and also when all places are taken.
_OPEN = "/grpc.health.v1.Health/"
# What takes a place among `max_calls`; Cancel must get through when all are taken.
_COUNTED = frozenset(("Generate", "GenerateOnce", "Score", "Tokenize"))
_NAMES = _COUNTED | {"ModelInfo", "Cancel"}
# Of a status: headers have a bound, and percent-encoding can triple it.
_MAX_MESSAGE_CHARS = 1000

Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):
    """Refuses who has no key, and what no method should see.

    Args:
      service: tells tenants by their keys.
      max_calls: at a time; more are told RESOURCE_EXHAUSTED.
    """

    def __init__(self, service: "GenerationService", *, max_calls: int) -> None:
        self._service, self._max_calls = service, max_calls
        self._num_calls = 0

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The method that serves a call, or one that refuses it."""
        method = details.method
        if not method.startswith(_OPEN):
            try:
                self._service.tenant_of(bearer_key(details.invocation_metadata))
            except ServiceError as error:
                return self._refusal(error, method)
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler  # unknown methods; reflection, which has its own checks
        return self._guarded(handler, method)

    def _guarded(self, handler: Any, method: str) -> Any:
        is_stream = handler.response_streaming
        behaviour = handler.unary_stream if is_stream else handler.unary_unary
        deserialize = handler.request_deserializer

        def read(message: bytes) -> Any:
            try:
                return deserialize(message)
            except DecodeError:
                return None

        async def run(request: Any, context: Any) -> Any:
            return await self._answer(behaviour, method, request, context)

        make = (
            grpc.unary_stream_rpc_method_handler
            if is_stream
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            run,
            request_deserializer=read,
            response_serializer=handler.response_serializer,
        )

    async def _answer(
        self, behaviour: Behaviour, method: str, request: Any, context: Any
    ) -> Any:
        is_counted = method.rpartition("/")[2] in _COUNTED
        TRACE_PARENT.set(_header("traceparent", context.invocation_metadata()))
        self._num_calls += is_counted
        try:
            if request is None:
                raise ServiceError(
                    "invalid_argument",
                    "the message is not what this method takes, or holds text that is "
                    "no UTF-8",
                )
            if is_counted and self._num_calls > self._max_calls:
                raise ServiceError(
                    "resource_exhausted",
                    f"the server takes {self._max_calls} calls at a time",
                    retry_after_s=1.0,
                )
            return await behaviour(request, context)
        except ServiceError as error:
            if error.code == "unauthenticated":  # the key was taken away just now
                self._note_refusal(method, context)
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise  # a method's own status
        except Exception as error:
            if context.done():
                return None  # nobody is left to write to
            log_failure(error, method)
            await _abort(context, ServiceError("internal", "the server has failed"))
        finally:
            self._num_calls -= is_counted

    def _refusal(self, error: ServiceError, method: str) -> Any:
        """A method that refuses before a message is read."""

        async def refuse(requests: Any, context: Any) -> None:
            self._note_refusal(method, context)
            await _abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _note_refusal(self, method: str, context: Any) -> None:
        # A stranger may call a method whatever it likes.
        name = method.rpartition("/")[2]
        self._service.refusals.note(name if name in _NAMES else "other", context.peer())


def bearer_key(metadata: Sequence[tuple[str, Any]] | None) -> str | None:
    """The key of `authorization: Bearer KEY`; None where there is none."""
    scheme, _, key = (_header("authorization", metadata) or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _header(name: str, metadata: Sequence[tuple[str, Any]] | None) -> str | None:
    """The first text of that name."""
    for found, value in metadata or ():
        if found == name and isinstance(value, str):
            return value
    return None


def log_failure(error: BaseException, where: str) -> None:
    """Logs what failed and at which lines, without the messages of exceptions."""
    lines = "".join(_trace(error))
    logger.error("%s failed: %s\n%s", where, type(error).__name__, lines)


def _trace(error: BaseException) -> Iterator[str]:
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _trace(cause)
    yield from traceback.format_tb(error.__traceback__)
    yield f"{type(error).__name__}\n"


async def _abort(context: Any, error: ServiceError) -> None:
    """Ends a call with the status of an error; does not return."""
    trailing: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        trailing = ((PUSHBACK, str(pushback_ms(error.retry_after_s))),)
    message = error.message[:_MAX_MESSAGE_CHARS]
    await context.abort(STATUS[error.code], message, trailing)


def pushback_ms(seconds: float) -> int:
    """A wait as gRPC reads it: whole milliseconds in an int32."""
    return min(math.ceil(seconds * 1000), 2**31 - 1)
