"""Who used the engine for how much: tokens and device seconds per tenant. No jax.

The meter tells it what happened; `LLM.stats()["tenants"]` shows it, and bills are made
of it. A step's seconds are split over the tokens that it computed, a prompt token and a
decode row each being one. That is a rule, not a measurement: a row that decodes costs
more than a prompt token. But it leaves nothing out: the tenants' seconds add up to the
time that the device was busy.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.engine.request import Request
from headrace.engine.schedule import Schedule

ANONYMOUS, OTHER = "anonymous", "other"
MAX_TENANTS = 200
MAX_NAME_LEN = 64


@dataclasses.dataclass(slots=True)
class TenantUsage:
    """What one tenant used since the engine's start.

    Attributes:
      requests: that ended, for whatever reason.
      prompt_tokens: of requests that began.
      cached_prompt_tokens: those of them that the prefix cache had.
      generation_tokens: of requests that ended; `UsageLedger.snapshot` adds the rest.
      device_seconds: its share of the time that the device was busy.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    device_seconds: float = 0.0


class UsageLedger:
    """Books usage under at most `max_tenants` names, later ones under "other".

    Nothing is lost over that: sums over the names are exact. Not thread-safe.

    Args:
      max_tenants: names besides "other".
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._tenants: dict[str, TenantUsage] = {}
        self._rows: tuple[Request, ...] = ()
        self._rows_of: Mapping[str, int] = {}
        self._carried_s = 0.0

    def on_step(self, seconds: float, schedule: Schedule) -> None:
        """The device was busy with a step; the ledger must be told of every one.

        Rows whose request has ended meanwhile count, since they were computed.

        Args:
          seconds: of two steps that overlap, each second counts once.
          schedule: what was computed. The time of one without tokens, which moves
            pages, is booked with the next.
        """
        tokens = collections.Counter(self._decode_rows(schedule.decode))
        for chunk in schedule.prefill:
            tokens[self._name(chunk.request.tenant)] += chunk.length
        seconds += self._carried_s
        self._carried_s = 0.0 if tokens else seconds
        total = tokens.total()
        for name, count in tokens.items():
            self._tenants[name].device_seconds += seconds * count / total

    def on_admit(self, request: Request) -> None:
        """A request has begun for the first time."""
        usage = self._tenants[self._name(request.tenant)]
        usage.prompt_tokens += request.prompt_len
        usage.cached_prompt_tokens += request.num_cached

    def on_finish(self, request: Request) -> None:
        """A request has ended."""
        usage = self._tenants[self._name(request.tenant)]
        usage.requests += 1
        usage.generation_tokens += len(request.output_token_ids)

    def snapshot(self, live: Iterable[Request] = ()) -> dict[str, dict[str, Any]]:
        """{tenant: the fields of `TenantUsage`}, ready for JSON.

        Args:
          live: requests that have not ended, for their output so far.
        """
        shown = {k: dataclasses.asdict(usage) for k, usage in self._tenants.items()}
        for request in live:
            usage = shown[self._name(request.tenant)]
            usage["generation_tokens"] += len(request.output_token_ids)
        return shown

    def _decode_rows(self, decode: tuple[Request, ...]) -> Mapping[str, int]:
        """Rows per name. They are mostly those of the step before, the very tuple."""
        if decode is not self._rows:
            counts = collections.Counter(request.tenant for request in decode)
            rows_of: collections.Counter[str] = collections.Counter()
            for tenant, count in counts.items():
                rows_of[self._name(tenant)] += count
            self._rows, self._rows_of = decode, rows_of
        return self._rows_of

    def _name(self, tenant: str | None) -> str:
        """What stands for a tenant: short, printable, and one of not too many."""
        kept = (tenant or ANONYMOUS)[:MAX_NAME_LEN]
        name = "".join(c if c.isprintable() else "?" for c in kept)
        if name not in self._tenants:
            name = name if len(self._tenants) < self._max_tenants else OTHER
            self._tenants.setdefault(name, TenantUsage())
        return name
