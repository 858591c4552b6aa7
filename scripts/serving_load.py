"""Sends a benchmark's requests at their times and notes how each one went.

One task sends in order; where a bound on the requests under way is reached it waits, so
a request may be sent later than its time, which its record tells.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace.scripts.serving_metrics import OK, Record
from headrace.scripts.serving_targets import RequestFailed, Target
from headrace.scripts.serving_workloads import Item

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]


class Load:
    """Runs requests against a target.

    Args:
      target: takes them.
      ignore_eos: an output that is shorter than asked is a failure.
      timeout_s: of one request, after which it has failed.
      clock, sleep: of the loop; tests have their own.

    Attributes:
      messages: the first message of each reason to fail.
    """

    def __init__(
        self,
        target: Target,
        *,
        ignore_eos: bool = True,
        timeout_s: float = 3600.0,
        clock: Clock = time.perf_counter,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._target, self._ignore_eos = target, ignore_eos
        self._timeout_s, self._clock, self._sleep = timeout_s, clock, sleep
        self.messages: dict[str, str] = {}

    async def run(
        self,
        items: Sequence[Item],
        arrivals_s: Sequence[float],
        max_concurrency: int | None = None,
    ) -> list[Record]:
        """Sends all requests; returns their records in the same order.

        Args:
          arrivals_s: since the start, ascending, one per request.
          max_concurrency: most requests under way; None: no bound.
        """
        room = asyncio.Semaphore(max_concurrency or max(1, len(items)))
        begin_s, tasks = self._clock(), []
        for item, arrival_s in zip(items, arrivals_s, strict=True):
            due_s = begin_s + arrival_s
            if (wait_s := due_s - self._clock()) > 0:
                await self._sleep(wait_s)
            await room.acquire()
            tasks.append(asyncio.create_task(self._one(item, due_s, room)))
        return await asyncio.gather(*tasks)

    async def _one(self, item: Item, due_s: float, room: asyncio.Semaphore) -> Record:
        events: list[tuple[float, int]] = []
        prompt_tokens, total, status = item.prompt_len or 0, None, OK
        sent_s = self._clock()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(self._target.stream(item)) as pieces,
            ):
                async for piece in pieces:
                    if piece.tokens:
                        events.append((self._clock(), piece.tokens))
                    prompt_tokens = piece.prompt_tokens or prompt_tokens
                    total = piece.total_tokens or total
            events = respread(events, total)
            self._check_length(item, sum(tokens for _, tokens in events))
        except RequestFailed as error:
            status = self._noted(error.reason, str(error))
        except TimeoutError:
            status = self._noted("timeout", f"no end within {self._timeout_s:g} s")
        except Exception as error:  # counted: a failure must not be lost
            status = self._noted(type(error).__name__, str(error))
        finally:
            room.release()
        return Record(
            sent_s=sent_s,
            ended_s=self._clock(),
            events=tuple(events),
            prompt_tokens=prompt_tokens,
            status=status,
            late_s=sent_s - due_s,
        )

    def _check_length(self, item: Item, tokens: int) -> None:
        least = item.max_tokens if self._ignore_eos else 1
        if not least <= tokens <= item.max_tokens:
            raise RequestFailed(
                "wrong length", f"{tokens} tokens came, {item.max_tokens} were asked"
            )

    def _noted(self, reason: str, message: str) -> str:
        self.messages.setdefault(reason, " ".join(message.split()))
        return reason


def respread(
    events: list[tuple[float, int]], total: int | None
) -> list[tuple[float, int]]:
    """Spreads a known sum over pieces whose tokens were guessed.

    The first piece keeps one token, since a prefill gives one; the others share the
    rest as evenly as whole numbers allow, the later ones having more. With fewer tokens
    than pieces the first pieces have one each and the others are left out.

    Args:
      total: tokens of the output; None: they were counted, not guessed.
    """
    if total is None or not events:
        return events
    times_s = [time_s for time_s, _ in events][:total]
    if len(times_s) < 2:
        return [(time_s, total) for time_s in times_s]
    rest = len(times_s) - 1
    tokens = [1] + [(total - 1 + place) // rest for place in range(rest)]
    return list(zip(times_s, tokens, strict=True))


async def watch(
    target: Target, every_s: float, found: list[Mapping[str, float]]
) -> None:
    """Appends a target's states to `found` every so often, until it is cancelled."""
    while (state := await target.counters()) is not None:
        found.append(state)
        await asyncio.sleep(every_s)
