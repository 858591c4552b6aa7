"""Counts what continuous batching saves: exact steps, no weights, no device.

    python -m headrace.scripts.bench_scheduling
    python -m headrace.scripts.bench_scheduling --distribution=fixed --requests=500

The scheduler of the engine drives a fake model that ends each request at a length
drawn before, which the scheduler cannot see: it knows `max_tokens` alone. Results are
read one step late, as in the engine, so a row that has ended is wasted once. A table
comes first, then one JSON line per distribution and page size.

Lengths: chat-short is like ShareGPT, chat-long and code are fits to the Azure 2023
traces (lengths only, CC-BY); the fixed lengths are the control, where nothing is won.
"""

import dataclasses
import json
import sys
from collections.abc import Callable

import numpy as np
from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.prefix_hash import chain_seed, name_pages
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.schedule import Schedule
from headrace.engine.scheduler import Scheduler
from headrace.scripts.fake_model import FakeModel, dispatch_us, host_costs

FLAGS = flags.FLAGS

MAX_TOKENS, MAX_PROMPT = 1024, 8192
# Memory of the comparison at equal memory: 64 requests of 2048 tokens, reserved.
EQUAL_SLOTS, EQUAL_LEN = 64, 2048
CHATS, TURNS, SYSTEM_PROMPTS, SYSTEM_LEN = 300, 4, 16, 256

# (mean, sigma) of the logarithm of prompt and output lengths, and their largest.
DISTRIBUTIONS = {
    "chat-short": ((4.85, 1.20, 1024), (4.65, 1.15, 1024)),
    "chat-long": ((6.63, 0.99, 4142), (5.02, 0.86, 1000)),
    "code": ((7.0, 1.36, 7437), (2.79, 0.85, 1000)),
    "fixed": ((5.0, 0.0, 1024), (5.0, 0.0, 1024)),
}

flags.DEFINE_multi_enum(
    "distribution", list(DISTRIBUTIONS), list(DISTRIBUTIONS), "May be repeated."
)
flags.DEFINE_integer("requests", 3000, "Requests of each run.", lower_bound=1)
flags.DEFINE_integer("slots", 32, "Rows of the decode batch.", lower_bound=1)
flags.DEFINE_multi_integer("page_size", [16, 32], "Tokens per page. May be repeated.")
flags.DEFINE_integer("equal_slots", 384, "Slots of the comparison at equal memory.")


@dataclasses.dataclass
class Counts:
    """What one run did.

    Attributes:
      steps: decode steps.
      rows: decode rows that gave a token.
      row_steps: slots times decode steps.
      used, held: tokens in pages, and room in the pages held, summed over steps.
      stall: most steps in a row in which a decoding request got no token.
      preemptions: times that a request gave way.
      hit_tokens: prompt tokens found in the cache.
    """

    steps: int = 0
    rows: int = 0
    row_steps: int = 0
    used: int = 0
    held: int = 0
    stall: int = 0
    preemptions: int = 0
    hit_tokens: int = 0


def draw_lengths(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output lengths of a distribution, [count] each, from a fixed seed."""
    rng = np.random.default_rng(20240501)

    def lengths(mean: float, sigma: float, most: int) -> np.ndarray:
        drawn = np.exp(rng.normal(mean, sigma, count))
        return np.clip(drawn, 4, most).round().astype(int)

    prompts, outputs = DISTRIBUTIONS[name]
    return lengths(*prompts), lengths(*outputs)


def engine_config(policy: str, slots: int, page_size: int, pages: int) -> EngineConfig:
    """A resolved config for chats: decode never waits for more than one chunk."""
    return EngineConfig(
        policy=policy,  # type: ignore[arg-type]
        max_context_len=MAX_PROMPT + MAX_TOKENS,
        page_size=page_size,
        num_pages=pages + 1,
        num_slots=slots,
        decode_batch_sizes=(slots,),
        prefill_shapes=((1, 2048), (8, 512), (32, 256)),
        prefill_calls_per_decode=1,
        param_dtype="bfloat16",
        kv_dtype="bfloat16",
        memory_fraction=0.9,
    )


def make(
    name: int, ids: tuple[int, ...], *, page_size: int, uses_cache: bool = False
) -> Request:
    """A request as the engine makes it."""
    names = name_pages(_SEED, ids, page_size) if uses_cache else ()
    return Request(
        request_id=str(name),
        prompt_token_ids=ids,
        params=_PARAMS,
        max_tokens=MAX_TOKENS,
        seed=0,
        uses_cache=uses_cache,
        name_seed=_SEED,
        page_names=names,
    )


_SEED = chain_seed(model="fake", bit_class="")
_PARAMS = SamplingParams(max_tokens=MAX_TOKENS)


def run(
    config: EngineConfig,
    requests: list[Request],
    outputs: dict[str, int],
    *,
    on_end: Callable[[Request], Request | None] = lambda request: None,
    caches_output: bool = False,
) -> Counts:
    """Drives the scheduler to the end, one step ahead of the results.

    Args:
      config: resolved.
      requests: all at once, in this order.
      outputs: length of each request's output, by id.
      on_end: gives a request that follows on the one that has ended, or None.
      caches_output: filling and generating are one bit class, as on a CPU.
    """
    assert config.num_pages and config.num_slots
    manager = KVCacheManager(config.num_pages, config.page_size)
    host = 2 * config.num_pages
    scheduler = Scheduler(
        config, manager, num_host_pages=host, caches_output=caches_output
    )
    model = FakeModel(config.num_slots, outputs)
    for request in requests:
        scheduler.add(request)
    counts, before = Counts(), None
    waited = np.zeros(config.num_slots, int)
    while scheduler.has_work or before is not None:
        schedule = scheduler.schedule()
        after = None if schedule is None else (schedule, model.step(schedule))
        if schedule is not None:
            _count(counts, schedule, manager, config, waited)
        if before is not None:
            for request in scheduler.update(*before):
                if request.is_finished and (following := on_end(request)):
                    scheduler.add(following)
        before = after
    counts.rows = model.num_decoded
    counts.preemptions = scheduler.num_preemptions
    counts.hit_tokens = manager.stats.hit_tokens
    return counts


def _count(
    counts: Counts,
    schedule: Schedule,
    manager: KVCacheManager,
    config: EngineConfig,
    waited: np.ndarray,
) -> None:
    assert config.num_slots
    if schedule.decode:
        counts.steps += 1
        counts.row_steps += config.num_slots
        waited[schedule.decode_slots] = 0
        counts.used += sum(request.num_computed for request in schedule.decode)
        counts.held += sum(len(r.pages) for r in schedule.decode) * manager.page_size
    elif schedule.prefill and config.policy != "static":
        waited += 1
        counts.stall = max(counts.stall, int(waited.max()))


def compare(name: str, slots: int, page_size: int, count: int) -> dict[str, object]:
    """Runs one distribution; returns the JSON line."""
    prompt_lens, output_lens = draw_lengths(name, count)
    outputs = {str(i): int(n) for i, n in enumerate(output_lens)}

    def once(policy: str, slots: int, tokens: int) -> Counts:
        config = engine_config(policy, slots, page_size, tokens // page_size)
        ids = [tuple(range(n)) for n in prompt_lens]
        requests = [make(i, t, page_size=page_size) for i, t in enumerate(ids)]
        return run(config, requests, outputs)

    ample = slots * (MAX_PROMPT + MAX_TOKENS)
    static, continuous = once("static", slots, ample), once("fcfs", slots, ample)
    reserved = once("static", EQUAL_SLOTS, EQUAL_SLOTS * (MAX_PROMPT + MAX_TOKENS))
    paged = once("fcfs", FLAGS.equal_slots, EQUAL_SLOTS * EQUAL_LEN)
    host_us, detokenize_us = host_costs(64)
    return {
        "distribution": name,
        "slots": slots,
        "page_size": page_size,
        "steps_static": static.steps,
        "steps_continuous": continuous.steps,
        "gain": round(static.steps / continuous.steps, 2),
        "slot_efficiency": round(continuous.rows / continuous.row_steps, 4),
        "kv_waste": round(1 - continuous.used / continuous.held, 4),
        "reserved_utilization": round(
            float((prompt_lens + output_lens / 2).mean()) / EQUAL_LEN, 4
        ),
        "equal_memory_gain": round(reserved.steps / paged.steps, 2),
        "preemptions": paged.preemptions,
        "prefix_hit_over_oracle": round(chat_hits(slots, page_size), 4),
        "max_stall_steps": continuous.stall,
        "host_us_per_step": host_us,
        "detokenize_us": detokenize_us,
    }


def chat_hits(slots: int, page_size: int) -> float:
    """Cache hits of chats of four turns, over those of an endless cache.

    A turn's prompt is the one before, its answer, and a new question; it comes when
    the answer has ended. Pages that decoding filled count, here and there.
    """
    rng = np.random.default_rng(7)
    asked, answers = draw_lengths("chat-short", CHATS * TURNS)
    outputs = {str(i): int(n) for i, n in enumerate(answers)}
    seen: set[bytes] = set()
    oracle = 0

    def turn(index: int, history: tuple[int, ...]) -> Request:
        nonlocal oracle
        question = tuple(rng.integers(0, 50_000, min(int(asked[index]), 256)).tolist())
        request = make(index, history + question, page_size=page_size, uses_cache=True)
        for name in request.page_names[: (request.prompt_len - 1) // page_size]:
            if name not in seen:
                break
            oracle += page_size
        seen.update(request.page_names)
        return request

    def following(request: Request) -> Request | None:
        index = int(request.request_id) + CHATS
        answer = tuple(request.output_token_ids)
        # The last token of an answer is never computed.
        known = request.prompt_token_ids + answer[:-1]
        seen.update(name_pages(_SEED, known, page_size))
        if index >= CHATS * TURNS:
            return None
        return turn(index, request.prompt_token_ids + answer)

    heads = rng.integers(0, 50_000, (SYSTEM_PROMPTS, SYSTEM_LEN)).tolist()
    first = [turn(i, tuple(heads[i % SYSTEM_PROMPTS])) for i in range(CHATS)]
    config = engine_config("fcfs", slots, page_size, 2_000_000 // page_size)
    counts = run(config, first, outputs, on_end=following, caches_output=True)
    return counts.hit_tokens / oracle


def main(_: list[str]) -> None:
    """Prints the table, then the JSON lines."""
    rows = [
        compare(name, FLAGS.slots, page_size, FLAGS.requests)
        for name in FLAGS.distribution
        for page_size in FLAGS.page_size
    ]
    for key in rows[0]:
        print(f"{key:>24}", *(f"{row[key]!s:>12}" for row in rows), file=sys.stderr)
    for running in (64, 256):
        print(
            f"host us per step, {running} running: {host_costs(running)[0]}",
            file=sys.stderr,
        )
    print(f"dispatch of 182 arrays, us: {dispatch_us()}", file=sys.stderr)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    app.run(main)
