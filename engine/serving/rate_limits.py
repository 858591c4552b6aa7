"""Keeps each tenant within its limits: requests, tokens, and how many at a time."""

import dataclasses
import time
from collections.abc import Callable

from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.tenants import Tenant

# Tenants without a running request are forgotten beyond so many, longest idle first.
_MAX_IDLE = 10_000


class TokenBucket:
    """Fills at a steady rate up to a minute's worth; may not be overdrawn.

    Args:
      per_minute: rate and size.
      now_s: seconds of any clock that only goes forward.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level, self._at_s = per_minute, now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken; 0 is now, infinity never."""
        if amount > self.per_minute:
            return float("inf")
        missing = amount - self._level_at(now_s)
        return max(0.0, missing * 60 / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Takes what `wait_s` allowed; a negative amount gives back."""
        self._level = min(self._level_at(now_s) - amount, self.per_minute)
        self._at_s = now_s

    def _level_at(self, now_s: float) -> float:
        gained = max(0.0, now_s - self._at_s) * self.per_minute / 60
        return min(self.per_minute, self._level + gained)


@dataclasses.dataclass
class _Account:
    tenant: Tenant
    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_running: int = 0


class Gate:
    """Lets requests in, one by one. One thread uses it: the event loop's.

    Args:
      clock: seconds, only forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, tenant: Tenant, most_tokens: int) -> "Ticket":
        """Books a request and the most tokens that it can take.

        Raises:
          ServiceError: resource_exhausted, with the wait that would help;
            invalid_argument where none would.
        """
        account, now_s = self._account(tenant), self._clock()
        limit = tenant.max_concurrent
        if limit is not None and account.num_running >= limit:
            raise ServiceError(
                "resource_exhausted",
                f"max_concurrent of this tenant is {limit}, and so many run",
                retry_after_s=1.0,
            )
        for name, bucket, amount in (
            ("requests_per_minute", account.requests, 1),
            ("tokens_per_minute", account.tokens, most_tokens),
        ):
            if bucket is None or not (wait_s := bucket.wait_s(amount, now_s)):
                continue
            if wait_s == float("inf"):
                raise ServiceError(
                    "invalid_argument",
                    f"prompt and max_tokens together are {amount} tokens, and "
                    f"{name} of this tenant is {bucket.per_minute:g}",
                )
            raise ServiceError(
                "resource_exhausted",
                f"{name} of this tenant is {bucket.per_minute:g}, and is used up",
                retry_after_s=wait_s,
            )
        if account.requests is not None:
            account.requests.take(1, now_s)
        if account.tokens is not None:
            account.tokens.take(most_tokens, now_s)
        account.num_running += 1
        return Ticket(self, account, most_tokens)

    def num_running(self, tenant: str) -> int:
        """Requests of a tenant that have entered and not left."""
        account = self._accounts.get(tenant)
        return account.num_running if account else 0

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.pop(tenant.name, None)
        if account is None or account.tenant != tenant:
            now_s = self._clock()
            rates = (tenant.requests_per_minute, tenant.tokens_per_minute)
            requests, tokens = (r and TokenBucket(r, now_s) for r in rates)
            running = account.num_running if account else 0
            account = _Account(
                tenant, requests or None, tokens or None, num_running=running
            )
        self._accounts[tenant.name] = account  # last: it was used last
        if len(self._accounts) > _MAX_IDLE:
            idle = (n for n, a in self._accounts.items() if not a.num_running)
            self._accounts.pop(next(idle, ""), None)
        return account

    def _leave(self, account: _Account, unused: int) -> None:
        # Limits may have been changed meanwhile: then there is another account.
        current = self._accounts.get(account.tenant.name, account)
        current.num_running -= 1
        if current.tokens is not None and current is account:
            current.tokens.take(-unused, self._clock())


class Ticket:
    """A request that was let in; `leave` it once."""

    def __init__(self, gate: Gate, account: _Account, most_tokens: int) -> None:
        self._gate, self._account, self._most = gate, account, most_tokens
        self._has_left = False

    def leave(self, used_tokens: int) -> None:
        """Gives back the place, and the tokens that were not used."""
        if not self._has_left:
            self._has_left = True
            self._gate._leave(self._account, max(0, self._most - used_tokens))
