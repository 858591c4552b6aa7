"""A call on its way through the service: what was asked, and how it went."""

import contextlib
import contextvars
import dataclasses
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine.admission import QueueFullError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.errors import ServiceError

if TYPE_CHECKING:
    from headrace.engine.async_llm import Reader


# The header of that name, which the fronts note for the call at hand.
TRACE_PARENT: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "traceparent", default=None
)
# It stands in logs and traces: nothing that could pass for another line.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def new_request_id() -> str:
    """An id for a call that brought none."""
    return f"req-{secrets.token_hex(12)}"


def check_request_id(name: str, value: str) -> str:
    """A caller's own id, whichever protocol brought it.

    Args:
      name: of the field or header that it stood in.
      value: as the caller wrote it.

    Raises:
      ServiceError: invalid_argument.
    """
    if not _REQUEST_ID.fullmatch(value):
        raise ServiceError(
            "invalid_argument",
            f"{name} must be 1 to 128 printable ASCII characters without spaces, got "
            f"{value!r:.80}",
        )
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A request for text.

    Attributes:
      prompt: a text or token ids; None where there are `messages`.
      messages: a conversation, for the model's chat template.
      params: how to sample.
      deadline_s: seconds after which it ends with what it has.
      queue_timeout_s: seconds after which it ends if it has not begun.
      uses_cache: may reuse pages of its tenant's earlier prompts.
      request_id: the caller's, for `cancel`; None draws one.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Any] | None = None
    params: SamplingParams = SamplingParams()
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    uses_cache: bool = True
    request_id: str | None = None


@dataclasses.dataclass(kw_only=True)
class CallRecord:
    """How a call went, for metrics, traces and the access log. No text is in it.

    Attributes:
      tenant: None where the caller is not known.
      method: "generate" or "score"; of a caller who is not known what it asked for.
      wall_s: when it arrived, seconds of the epoch.
      arrival_s, admitted_s, first_token_s, finished_s: seconds of
        `time.perf_counter`; None where it never came to that.
      has_run: the engine took it, so the times and counts are known.
      code: "ok", or a `ServiceError` code.
      trace_parent: of the caller's trace, as in W3C Trace Context.
      peer: the address of a caller who is not known; else None.
      num_untold: such callers before it of whom no observer was told.
    """

    request_id: str
    tenant: str | None
    method: str
    wall_s: float
    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    has_run: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    code: str = "ok"
    message: str | None = None
    trace_parent: str | None = dataclasses.field(default_factory=TRACE_PARENT.get)
    peer: str | None = None
    num_untold: int = 0

    def take(self, reader: "Reader") -> None:
        """Notes what the engine knows of the request, as far as it has come."""
        state = reader.state
        request, last = state.request, state.completions[-1].request
        self.has_run = True
        self.num_cached_tokens = request.num_cached
        self.admitted_s = request.admitted_s
        self.first_token_s = request.first_token_s
        self.finished_s = last.finished_s
        self.num_output_tokens = state.num_tokens
        reasons = [one.request.finish_reason for one in state.completions]
        self.finish_reason = next((r for r in reasons if r is not None), None)


class Observer(Protocol):
    """Is told of every call once, when it is over."""

    def on_call(self, record: CallRecord) -> None:
        """Must not raise, and must not wait."""


@contextlib.contextmanager
def as_service_errors() -> Iterator[None]:
    """What the engine raises, with whose fault it is."""
    try:
        yield
    except QueueFullError as error:
        raise ServiceError(
            "resource_exhausted", str(error), retry_after_s=1.0
        ) from None
    except ValueError as error:
        raise ServiceError("invalid_argument", str(error)) from None
    except NotImplementedError as error:
        raise ServiceError("unimplemented", str(error)) from None
    except RuntimeError:
        # What the engine failed of is in the log, and not the caller's business.
        raise ServiceError("unavailable", "the engine takes no requests") from None
