"""HTTP for the tools that speak OpenAI's dialect: a thin layer over the service.

The only file that imports starlette (extra `http`); whoever runs no HTTP never imports
it. No prompt and no output is in its log lines or error messages.
"""

import asyncio
import functools
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.engine.new_request import longest_request
from headrace.engine.serving.calls import TRACE_PARENT, check_request_id, new_request_id
from headrace.engine.serving.errors import ErrorCode, ServiceError
from headrace.engine.serving.http_body import param_of, read_ask
from headrace.engine.serving.http_reply import Reply
from headrace.engine.serving.http_stream import (
    EventStream,
    GoneError,
    dumped,
    until_gone,
)
from headrace.engine.serving.prometheus import Metrics
from headrace.engine.serving.server_options import address
from headrace.engine.serving.strict_json import parse_object
from headrace.engine.serving.tenants import Tenant

if TYPE_CHECKING:
    from headrace.engine.serving.service import GenerationService

logger = logging.getLogger(__name__)

_Endpoint = Callable[[Request], Awaitable[Any]]

# Status, and OpenAI's `type`.
_FORMS: dict[ErrorCode, tuple[int, str]] = {
    "invalid_argument": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "permission_denied": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "resource_exhausted": (429, "rate_limit_error"),
    "internal": (500, "server_error"),
    "unimplemented": (501, "server_error"),
    "unavailable": (503, "server_error"),
}
_INTERNAL = ServiceError("internal", "the server failed to answer")
# Codes that OpenAI's users look for.
_CODES = {"unauthenticated": "invalid_api_key", "not_found": "model_not_found"}
# Else what is still sent of the body would be taken until it ends.
_CLOSE = {"connection": "close"}
_RETRY_S = 1.0  # where a later try may help and nobody knows when


def make_app(
    service: "GenerationService",
    *,
    metrics: Metrics | None = None,
    max_body_bytes: int = 8_388_608,
    stall_s: float = 60.0,
) -> Starlette:
    """The ASGI application; run it in the event loop that uses the service.

    Routes: POST /v1/completions and /v1/chat/completions, GET /v1/models (all three
    want a key where the service does), GET /health and /metrics (which do not).

    Args:
      service: answers the calls.
      metrics: text and content type of /metrics; None has no such route.
      max_body_bytes: of a request; a longer one is refused with 413.
      stall_s: seconds after which a caller who neither sends nor takes anything is
        given up.

    Raises:
      ValueError: a bound that is not above 0.
    """
    for name, bound in {"max_body_bytes": max_body_bytes, "stall_s": stall_s}.items():
        if bound <= 0:
            raise ValueError(f"{name} must be above 0, got {bound}")
    front = _Front(service, max_body_bytes=max_body_bytes, stall_s=stall_s)
    get, post = ["GET"], ["POST"]
    routes = [
        Route("/v1/completions", _guarded(front.completions), methods=post),
        Route("/v1/chat/completions", _guarded(front.chat_completions), methods=post),
        Route("/v1/models", _guarded(front.models), methods=get),
        Route("/v1/models/{model:path}", _guarded(front.model), methods=get),
        Route("/health", _guarded(front.health), methods=get),
    ]
    if metrics is not None:
        read = metrics

        async def answer(request: Request) -> Response:
            text, content_type = await read()
            return Response(text, headers={"content-type": content_type})

        routes.append(Route("/metrics", _guarded(answer), methods=get))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _on_no_route})
    app.router.redirect_slashes = False  # a wrong path is told, not guessed
    return app


class _Front:
    """The endpoints of one service."""

    def __init__(
        self, service: "GenerationService", *, max_body_bytes: int, stall_s: float
    ) -> None:
        self._service = service
        self._max_body_bytes, self._stall_s = max_body_bytes, stall_s
        self._created = int(time.time())

    async def completions(self, request: Request) -> Any:
        return await self._complete(request, is_chat=False)

    async def chat_completions(self, request: Request) -> Any:
        return await self._complete(request, is_chat=True)

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        return _json(200, {"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._tenant(request)
        if request.path_params["model"] != self._service.model_name:
            raise ServiceError("not_found", "no such model is served")
        return _json(200, self._model())

    async def health(self, request: Request) -> Response:
        is_up = self._service.is_ready and not self._service.is_draining
        return _json(200 if is_up else 503, {"status": "ok" if is_up else "not ready"})

    async def _complete(self, request: Request, *, is_chat: bool) -> Any:
        # Strangers are refused before anything of theirs is read.
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        tenant = self._tenant(request, path)
        TRACE_PARENT.set(request.headers.get("traceparent"))
        request_id = _request_id(request)
        body = await self._body(request)
        request.state.body = body  # for what errors are about
        ask = read_ask(body, is_chat=is_chat, model_name=self._service.model_name)
        _check_tenant_can(tenant, len(ask.prompts))
        reply = Reply(self._service, tenant, ask, request_id)
        headers = {"x-request-id": request_id}
        if ask.is_stream:
            return EventStream(
                reply.events(),
                functools.partial(_on_error, body=body),
                headers=headers,
                stall_s=self._stall_s,
            )
        whole = await until_gone(request.receive, reply.whole())
        return _json(200, whole, headers)

    def _tenant(self, request: Request, path: str = "/v1/models") -> Tenant:
        """Who calls; a refusal is noted under the path."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        try:
            return self._service.tenant_of(key.strip() if is_bearer else None)
        except ServiceError:
            host, port = request.client or ("", 0)
            self._service.refusals.note(path, address(host, port))
            raise

    def _model(self) -> dict[str, Any]:
        """As vLLM lists a model."""
        longest, _ = longest_request(self._service.engine.llm.engine_config)
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": self._service.model_name,
            "parent": None,
            "max_model_len": longest,
        }

    async def _body(self, request: Request) -> dict[str, Any]:
        """The request's JSON.

        Raises:
          HTTPException: 413, 415, 408.
          ServiceError: it is not the JSON of an object.
        """
        # Browsers send other types to other people's servers without asking them.
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise HTTPException(415, "Content-Type must be application/json")
        parts, length = [], 0
        pieces = request.stream()
        while True:
            try:
                piece = await asyncio.wait_for(anext(pieces), self._stall_s)
            except StopAsyncIteration:
                break
            except TimeoutError:
                message = f"no more of the body came for {self._stall_s:g} s"
                raise HTTPException(408, message, _CLOSE) from None
            length += len(piece)
            # Most clients look for an answer only after they have sent all; what is
            # too much is thrown away for as long again before they are cut off.
            if length <= self._max_body_bytes:
                parts.append(piece)
            elif length > 2 * self._max_body_bytes:
                break
        if length > self._max_body_bytes:
            raise HTTPException(
                413, f"the body must be at most {self._max_body_bytes} bytes", _CLOSE
            )
        try:
            return parse_object(b"".join(parts))
        except ValueError as error:
            raise ServiceError("invalid_argument", f"the body: {error}") from None


def _request_id(request: Request) -> str:
    """The caller's, where it brought one, as behind a proxy."""
    given = request.headers.get("x-request-id")
    return (
        new_request_id() if given is None else check_request_id("x-request-id", given)
    )


def _check_tenant_can(tenant: Tenant, num_prompts: int) -> None:
    """Refuses several prompts that could never all be let in together."""
    for name in ("max_concurrent", "requests_per_minute"):
        limit = getattr(tenant, name)
        if limit is not None and num_prompts > max(1, limit):
            raise ServiceError(
                "invalid_argument",
                f"prompt must be at most {limit:g} prompts ({name} of this tenant), "
                f"got {num_prompts}",
            )


def _guarded(endpoint: _Endpoint) -> _Endpoint:
    """An endpoint whose every failure is an answer in OpenAI's form."""

    async def answer(request: Request) -> Any:
        try:
            return await endpoint(request)
        except HTTPException:
            raise
        except (ClientDisconnect, GoneError):
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return _on_error(error, getattr(request.state, "body", {}))[0]

    return answer


def _on_error(
    error: Exception, body: Mapping[str, Any]
) -> tuple[Response, dict[str, Any]]:
    """A failure to answer `body`, as a response and as an event of a stream."""
    if not isinstance(error, ServiceError):
        # Where, but not what: the message may quote a prompt.
        where = "".join(traceback.format_tb(error.__traceback__))
        logger.error("%s while answering:\n%s", type(error).__name__, where)
        error = _INTERNAL
    status, kind = _FORMS[error.code]
    code = _CODES.get(error.code, error.code)
    told = _error(error.message, kind, code, param=param_of(error.message, body))
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        wait_s = _RETRY_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    return _json(status, told, headers), told


async def _on_no_route(request: Request, error: Exception) -> Response:
    """What starlette or `_body` refuses: unknown routes, wrong methods, sizes."""
    assert isinstance(error, HTTPException)
    body = _error(error.detail, "invalid_request_error", None)
    return _json(error.status_code, body, error.headers)


def _error(
    message: str, kind: str, code: str | None, *, param: str | None = None
) -> dict[str, Any]:
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": fields}


def _json(
    status: int, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        dumped(fields), status, headers=headers, media_type="application/json"
    )
