"""What serving costs on top of the engine, measured over steps of a fixed time.

    python -m headrace.scripts.bench_wrapper

A clock stands in for the device (fixed_step.py), so the difference is the wrapper's
own: service, event loop, gRPC or HTTP. The same load goes directly to the engine, then
from a process of its own over gRPC and over HTTP, in turns. Targets: under 5 % of
tokens per second at 32 streams; under 2 ms added to the time to the first token of one
request at a time, without what an empty call of the same protocol takes, which is told
beside it. Exits with 1 where one is missed (--nocheck: never).
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import statistics
import sys
from collections.abc import AsyncGenerator
from typing import Any

import psutil
from absl import app, flags

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.server import make_service, running
from headrace.engine.serving.server_options import ServerOptions
from headrace.scripts import engine_flags
from headrace.scripts.fixed_step import fixed_step_llm
from headrace.scripts.machine_load import Monitor
from headrace.scripts.wrapper_client import (
    MODEL_NAME,
    PROMPT,
    Load,
    Measured,
    measure,
    sampling,
)

FLAGS = flags.FLAGS

flags.DEFINE_float("step_ms", 20.0, "Milliseconds of a step.", lower_bound=0.1)
flags.DEFINE_integer("streams", 32, "Streams at a time.", lower_bound=1)
flags.DEFINE_integer("stream_tokens", 200, "Tokens of each.", lower_bound=2)
flags.DEFINE_integer("probes", 40, "Requests one at a time.", lower_bound=1)
flags.DEFINE_integer("turns", 3, "Times that all is measured.", lower_bound=1)
flags.DEFINE_bool("check", True, "Exit with 1 where a target is missed.")

WAYS = ("engine", "grpc", "http")
MAX_LOSS_PERCENT, MAX_ADDED_MS = 5.0, 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One measurement of one way.

    Attributes:
      measured: by the client.
      cpu_s: that this process, engine and server, took meanwhile.
    """

    measured: Measured
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together."""
        return self.measured.tokens / self.measured.seconds

    @property
    def ttft_ms(self) -> float:
        """Median of the probes."""
        return statistics.median(self.measured.ttft_s) * 1e3

    @property
    def empty_ms(self) -> float:
        """Median of the empty calls."""
        return statistics.median(self.measured.empty_s) * 1e3


def row(way: str, turns: list[Turn], engine: list[Turn]) -> dict[str, Any]:
    """What is told of a way: medians over its turns, and against the engine's own."""

    def median(name: str, of: list[Turn]) -> float:
        return statistics.median(getattr(turn, name) for turn in of)

    rate, added_ms = median("tokens_per_s", turns), median("ttft_ms", turns)
    added_ms -= median("ttft_ms", engine)
    empty_ms = median("empty_ms", turns) - median("empty_ms", engine)
    loss = 1 - rate / median("tokens_per_s", engine)
    tokens = sum(turn.measured.tokens for turn in turns)
    return {
        "way": way,
        "tokens_per_s": round(rate, 1),
        "loss_percent": round(100 * loss, 2),
        "ttft_ms": round(median("ttft_ms", turns), 2),
        "added_ttft_ms": round(added_ms, 2),
        "empty_call_ms": round(empty_ms, 2),
        "own_ttft_ms": round(added_ms - empty_ms, 2) + 0.0,
        "cpu_us_per_token": round(1e6 * sum(t.cpu_s for t in turns) / tokens, 1),
        "tokens_per_piece": round(tokens / sum(t.measured.pieces for t in turns), 3),
    }


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """Which targets are missed, in words."""
    found = []
    for one in rows:
        if one["loss_percent"] >= MAX_LOSS_PERCENT:
            found.append(f"{one['way']}: {one['loss_percent']} % off the engine")
        if one["own_ttft_ms"] >= MAX_ADDED_MS:
            found.append(f"{one['way']}: {one['own_ttft_ms']} ms added to TTFT")
    return found


async def _directly(engine: AsyncLLM, load: Load) -> Measured:
    async def pieces(tokens: int) -> AsyncGenerator[int]:
        params = SamplingParams(**sampling(tokens), output_kind="delta")
        async for output in engine.stream(PROMPT, params):
            yield sum(len(one.token_ids) for one in output.outputs)

    async def empty() -> None:
        pass

    return await measure(load, pieces, empty)


async def _in_a_process(load: Load) -> Measured:
    """Raises RuntimeError: the client failed."""
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace.scripts.wrapper_client",
        json.dumps(dataclasses.asdict(load)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await client.communicate()
    if client.returncode:
        raise RuntimeError(f"the client over {load.protocol} failed, see above")
    return Measured(**json.loads(out))


async def _measure_all() -> dict[str, list[Turn]]:
    """Turns by way."""
    llm = fixed_step_llm(
        FLAGS.step_ms / 1e3,
        num_slots=FLAGS.streams,
        decode_batch_sizes=(FLAGS.streams,),
        prefill_shapes=((8, 32),),
        num_pages=FLAGS.streams * (FLAGS.stream_tokens // 16 + 4) + 1,
    )
    engine, own, turns = AsyncLLM(llm), psutil.Process(), collections.defaultdict(list)
    options = ServerOptions(port=0, http_port=0, model_name=MODEL_NAME)
    service = make_service(engine, options)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        servers = await stack.enter_async_context(running(service, options))
        addresses = dict(zip(WAYS[1:], (s.address for s in servers if s), strict=True))
        for _ in range(FLAGS.turns):
            for way in WAYS:
                load = Load(
                    protocol=way,
                    address=addresses.get(way, ""),
                    streams=FLAGS.streams,
                    tokens=FLAGS.stream_tokens,
                    probes=FLAGS.probes,
                )
                before = own.cpu_times()
                is_direct = way == "engine"
                measured = await (
                    _directly(engine, load) if is_direct else _in_a_process(load)
                )
                after = own.cpu_times()
                cpu_s = after.user + after.system - before.user - before.system
                turns[way].append(Turn(measured=measured, cpu_s=cpu_s))
    return turns


def run() -> int:
    """Returns the exit code."""
    logging.getLogger().setLevel(logging.WARNING)
    monitor = Monitor()
    monitor.start()
    turns = asyncio.run(_measure_all())
    monitor.stop()
    rows = [row(way, turns[way], turns["engine"]) for way in WAYS]
    names = list(rows[0])
    print("  ".join(f"{name:>14}" for name in names))
    for one in rows:
        print("  ".join(f"{one[name]!s:>{max(14, len(name))}}" for name in names))
    missed = misses(rows)
    line = {
        "step_ms": FLAGS.step_ms,
        "streams": FLAGS.streams,
        "stream_tokens": FLAGS.stream_tokens,
        "turns": FLAGS.turns,
        "other_cores": round(monitor.other_cores, 2),
        "ways": rows,
        "missed": missed,
    }
    print(json.dumps(line))
    for what in missed:
        print(f"missed: {what}", file=sys.stderr)
    return int(FLAGS.check and bool(missed))


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
