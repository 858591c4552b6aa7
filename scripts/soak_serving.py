"""Many clients do to a server what clients do, good and bad, for minutes.

    python -m headrace.scripts.soak_serving --soak_minutes=10

Starts a server in a process of its own (trial_server.py) and keeps --clients streams
open over gRPC and HTTP: three in ten hang up, others have deadlines, cancel, or send
what is oversized, malformed or wrong. Prints a line a minute, at the end a table of
statuses. Exits with 1 when a call hung or ended with a status that it should not, an
answer depended on its company, memory grew by more than --max_growth_percent after the
first quarter, pages, slots or connections were held at the end, or the server did not
end well on SIGTERM.
"""

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Awaitable

from absl import app, flags

from headrace.configs import load_config, parse_config
from headrace.scripts import soak_grpc, soak_http
from headrace.scripts.soak_client import GrpcClient
from headrace.scripts.soak_tally import Tally, growth_percent
from headrace.scripts.trial_process import TrialProcess, started

FLAGS = flags.FLAGS

flags.DEFINE_float("soak_minutes", 10.0, "How long calls are made.", lower_bound=0.05)
flags.DEFINE_integer("clients", 200, "Calls at a time.", lower_bound=1)
flags.DEFINE_integer("soak_slots", 32, "Slots of the server.", lower_bound=1)
flags.DEFINE_float("max_growth_percent", 2.0, "Growth of memory that fails the run.")
flags.DEFINE_integer("soak_seed", 1, "Of the clients' choices.")

TENANTS = {
    "a": {},
    "b": {},
    "c": {},
    "canary": {},
    "limited": {"requests_per_minute": 60, "max_concurrent": 4},
}
# A call that takes longer hangs: no queue here is as long.
_HUNG_S = 120.0
_MODEL = "tiny"


class Soak:
    """Clients of one server.

    Args:
      server: that they call.
      seed: of their choices.

    Attributes:
      tally: what came of the calls.
      rss_bytes: the server's memory, at even distances.
    """

    def __init__(self, server: TrialProcess, seed: int) -> None:
        self._server, self._seed = server, seed
        self.tally = Tally()
        self.rss_bytes: list[float] = []
        self._vocab_size = parse_config(load_config(_MODEL))[0].vocab_size
        self._is_over = False

    def grpc_client(self, tenant: str) -> GrpcClient:
        """A new connection of a tenant."""
        server = self._server
        return GrpcClient(
            server.grpc_address, server.keys, tenant, self.tally, self._vocab_size
        )

    async def run(self, clients: int, seconds: float) -> None:
        """Makes calls for so long, and awaits the last ones."""
        async with contextlib.AsyncExitStack() as stack:
            shared = [self.grpc_client(tenant) for tenant in ("a", "b", "c") * 3]
            lone = self.grpc_client("canary")
            for one in (*shared, lone):
                stack.push_async_callback(one.channel.close)
            # What it answers on an idle server is what it must answer under load.
            await self._count("canary", soak_grpc.canary(lone, random.Random(0)))
            places = zip(range(clients), itertools.cycle(shared), strict=False)
            tasks = [self._client(number, one) for number, one in places]
            tasks += [self._canaries(lone), self._watch(seconds)]
            await asyncio.gather(*tasks)

    async def _client(self, number: int, grpc: GrpcClient) -> None:
        rng = random.Random(self._seed * 10_000 + number)
        http = soak_http.HttpClient(
            address=self._server.http_address,
            key=self._server.keys[grpc.tenant],
            model=_MODEL,
            vocab_size=self._vocab_size,
        )
        kinds = {**soak_grpc.KINDS, **soak_http.KINDS}
        weights = [share for share, _ in kinds.values()]
        while not self._is_over:
            (name,) = rng.choices(list(kinds), weights)
            if name in soak_grpc.KINDS:
                call = soak_grpc.KINDS[name][1](grpc, rng)
            else:
                call = soak_http.KINDS[name][1](http, rng)
            await self._count(name, call)

    async def _canaries(self, client: GrpcClient) -> None:
        rng = random.Random(self._seed)
        while not self._is_over:
            await self._count("canary", soak_grpc.canary(client, rng))
            await asyncio.sleep(0.2)

    async def _count(self, kind: str, call: Awaitable[str]) -> None:
        try:
            status = await asyncio.wait_for(call, _HUNG_S)
        except TimeoutError:
            status = "HUNG"
        except OSError as error:
            status = f"connection: {type(error).__name__}"
            if not self._server.is_alive:
                self._is_over = True
        self.tally.count(kind, status)

    async def _watch(self, seconds: float) -> None:
        begin_s = time.monotonic()
        every_s, told = min(2.0, seconds / 40), 0
        while (spent_s := time.monotonic() - begin_s) < seconds and not self._is_over:
            self.rss_bytes.append(self._server.rss_bytes)
            if spent_s // 60 > told:
                told += 1
                await self._tell(told)
            await asyncio.sleep(every_s)
        self._is_over = True

    async def _tell(self, minute: int) -> None:
        gauges = await self._server.gauges()
        print(
            f"{minute} min: {self.tally.num_calls} calls, "
            f"{gauges['num_requests_running']:.0f} running, "
            f"{gauges['num_requests_waiting']:.0f} waiting, "
            f"{self.rss_bytes[-1] / 1e6:.0f} MB, "
            f"{len(self.tally.unexpected()) + len(self.tally.wrong)} wrong",
            flush=True,
        )

    async def held(self, slots: int, num_files: int) -> list[str]:
        """What an idle server still holds, in words.

        Args:
          slots: that it has.
          num_files: that it held open before the first client came.
        """
        gauges = await self._settled(0, num_files)
        found = [
            f"{name} is {gauges[name]:g} with no call open"
            for name in _IDLE
            if gauges[name]
        ]
        if (now := self._server.num_files) > num_files:
            found.append(f"{now} files are open, {num_files} were before")
        return found + await self._lost_slots(slots)

    async def _lost_slots(self, slots: int) -> list[str]:
        """As many requests as there are slots must all run, and end as we hang up."""
        client, before = self.grpc_client("a"), await self._server.gauges()
        calls = [soak_grpc.long_call(client) for _ in range(slots)]
        reading = [asyncio.ensure_future(client.read("long", one)) for one in calls]
        running = (await self._settled(slots))["num_requests_running"]
        for one in calls:
            one.cancel()
        await asyncio.gather(*reading)
        after = await self._settled(0)
        await client.channel.close()
        found = [] if running == slots else [f"{running:g} of {slots} slots work"]
        name = "generation_tokens_total"
        if after[name] - before[name] >= running * soak_grpc.LONG_CALL:
            found.append("calls that we hung up ran to their ends all the same")
        return found

    async def _settled(
        self, running: int, num_files: int | None = None
    ) -> dict[str, float]:
        """The gauges once so many requests run, or after ten seconds."""
        for _ in range(100):
            gauges = await self._server.gauges()
            is_there = gauges["num_requests_running"] == running
            if is_there and (num_files is None or self._server.num_files <= num_files):
                break
            await asyncio.sleep(0.1)
        return gauges

    async def shut_down(self) -> list[str]:
        """SIGTERM while calls run; what went wrong, in words."""
        client = self.grpc_client("a")
        calls = [soak_grpc.long_call(client) for _ in range(8)]
        await self._settled(8)
        self._server.terminate()
        reading = [client.read("long", one) for one in calls]
        counted = (self._count("grpc at shutdown", one) for one in reading)
        await asyncio.gather(*counted)
        await client.channel.close()
        code = await asyncio.to_thread(self._server.wait, 30.0)
        found = [] if code == 0 else [f"the server ended with {code} after SIGTERM"]
        text = "".join(self._server.errors)
        if "Traceback" in text or " failed" in text:
            found.append(f"the server's log has a failure:\n{text[-4000:]}")
        return found


_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


async def soak(server: TrialProcess) -> list[str]:
    """Runs it all; what went wrong, in words."""
    soak = Soak(server, FLAGS.soak_seed)
    await server.gauges()  # opens what the first call opens
    num_files = server.num_files
    await soak.run(FLAGS.clients, 60 * FLAGS.soak_minutes)
    tally = soak.tally
    growth = growth_percent(soak.rss_bytes)
    if not server.is_alive:
        return [f"the server died: {''.join(server.errors)[-4000:]}"]
    found = await soak.held(FLAGS.soak_slots, num_files)
    preemptions = (await server.gauges())["num_preemptions_total"]
    found += await soak.shut_down()
    if growth > FLAGS.max_growth_percent:
        found.append(f"memory has grown by {growth:.2f} % after the first quarter")
    print(tally.table())
    print(
        f"{tally.num_calls} calls, {preemptions:.0f} preemptions, "
        f"{soak.rss_bytes[-1] / 1e6:.0f} MB at the end, {growth:+.2f} % after the "
        "first quarter"
    )
    return tally.unexpected() + tally.wrong[:10] + found


def run() -> int:
    """Returns the exit code."""
    with started(
        TENANTS,
        f"--config={_MODEL}",
        f"--num_slots={FLAGS.soak_slots}",
        "--policy=fair",
        "--noscoring",
        f"--max_queued_requests={4 * FLAGS.clients}",
        f"--max_message_bytes={2**16}",
    ) as server:
        found = asyncio.run(soak(server))
    for what in found:
        print(f"error: {what}", file=sys.stderr)
    return int(bool(found))


def main(_: list[str]) -> int:
    """Returns the exit code."""
    try:
        return run()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    app.run(main)
