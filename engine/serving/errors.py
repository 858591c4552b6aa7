"""What a call can be told instead of an answer. Fronts give each code its own form."""

from typing import Literal

ErrorCode = Literal[
    "invalid_argument",
    "unauthenticated",
    "permission_denied",
    "not_found",
    "resource_exhausted",
    "unavailable",
    "unimplemented",
    "internal",
]


class ServiceError(Exception):
    """A call that is refused, before any device work where the caller is wrong.

    Attributes:
      code: says whose fault it is and whether to try again.
      message: for the caller; names field, value and range, and quotes no prompt.
      retry_after_s: after which the same call may be taken; None where no wait helps.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after_s = code, message, retry_after_s
