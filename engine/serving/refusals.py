"""Calls without a known key: counted, and told to the observers at a bounded rate.

Nothing that a stranger sends is kept, the key least of all: only what kind of call it
was and where it came from. No jax.
"""

import time
from collections.abc import Callable, Sequence

from headrace.engine.serving.calls import CallRecord, Observer, new_request_id
from headrace.engine.serving.rate_limits import TokenBucket

# Whoever tries keys should not fill the disk with lines; so many may come at once.
TOLD_PER_MINUTE = 120


class Refusals:
    """Notes each refused call; one thread uses it, the event loop's.

    Args:
      observers: told of up to TOLD_PER_MINUTE a minute; a record says how many before
        it were told to nobody.
      clock: seconds, only forward.

    Attributes:
      num_calls: refused since the start, told or not.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_calls = 0
        self._observers, self._clock = observers, clock
        self._bucket = TokenBucket(TOLD_PER_MINUTE, clock())
        self._num_untold = 0

    def note(self, method: str, peer: str) -> None:
        """Counts a refused call.

        Args:
          method: our name of what was asked, not the caller's text.
          peer: its address.
        """
        self.num_calls += 1
        now_s = self._clock()
        if self._bucket.wait_s(1, now_s):
            self._num_untold += 1
            return
        self._bucket.take(1, now_s)
        arrival_s = time.perf_counter()
        record = CallRecord(
            request_id=new_request_id(),
            tenant=None,
            method=method,
            wall_s=time.time(),
            arrival_s=arrival_s,
            finished_s=arrival_s,
            code="unauthenticated",
            peer=peer,
            num_untold=self._num_untold,
        )
        self._num_untold = 0
        for observer in self._observers:
            observer.on_call(record)
