"""A model that costs nothing: ends each request at a length known to it alone."""

import statistics
import time

import numpy as np

from headrace.configs.schema import EngineConfig
from headrace.engine.batch import plan_step
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.schedule import FINISH_LENGTH, FINISH_STOP, Schedule, StepResult
from headrace.engine.scheduler import Scheduler


class FakeModel:
    """The device's side of a step, in arrays.

    Args:
      num_slots: B.
      outputs: length of each request's output, by id.

    Attributes:
      num_decoded: decode rows that gave a token.
    """

    def __init__(self, num_slots: int, outputs: dict[str, int]) -> None:
        self._outputs = outputs
        self._left = np.zeros(num_slots, np.int64)
        self.num_decoded = 0

    def step(self, schedule: Schedule) -> StepResult:
        """Runs one step; a row's token is the number of tokens that it has left."""
        left = self._left
        if schedule.slot_sources is not None:
            left[:] = left[list(schedule.slot_sources)]
        left[list(schedule.released)] = 0
        for back in schedule.resumed:
            self._put(back.request, back.slot, back.request.num_dispatched - 1)
        if schedule.decode:
            slots = schedule.decode_slots[left[schedule.decode_slots] > 0]
            left[slots] -= 1
            self.num_decoded += slots.size
        for chunk in schedule.prefill:
            if chunk.is_last:
                self._put(chunk.request, chunk.slot, chunk.request.num_dispatched)
        for fork in schedule.forks:
            self._put(fork.request, fork.slot, fork.request.num_dispatched)
        codes = np.where(left > 0, 0, FINISH_STOP).astype(np.int32)
        for request, slot in zip(schedule.decode, schedule.decode_slots, strict=True):
            if request.num_dispatched == request.max_tokens and left[slot] == 0:
                codes[slot] = FINISH_LENGTH
        return StepResult(token_ids=left.astype(np.int32), finish_codes=codes)

    def _put(self, request: Request, slot: int, done: int) -> None:
        self._left[slot] = self._outputs[request.request_id] - done


def host_costs(num_running: int, steps: int = 300) -> tuple[float, float]:
    """Median microseconds of the host's work in a decode step, and of detokenizing.

    Schedule, pack, update; no program runs, see `dispatch_us`. The text of as many
    tokens is made apart, since it is made while the device works.
    """
    layout = PackedLayout(
        num_slots=num_running,
        page_size=16,
        max_rows=8,
        max_stop_ids=8,
        pages_per_request=128,
        max_context_len=2048,
        max_tokens=4096,
    )
    config = EngineConfig(
        max_context_len=2048,
        page_size=16,
        num_pages=num_running * 128 + 1,
        num_slots=num_running,
        decode_batch_sizes=(num_running,),
        prefill_shapes=((8, 512),),
        prefill_calls_per_decode=1,
    )
    assert config.num_pages
    scheduler = Scheduler(config, KVCacheManager(config.num_pages, 16))
    model = FakeModel(num_running, dict.fromkeys(map(str, range(num_running)), 10**6))
    for i in range(num_running):
        scheduler.add(
            Request(
                request_id=str(i),
                prompt_token_ids=tuple(range(64)),
                params=SamplingParams(max_tokens=1900),
                max_tokens=1900,
                seed=0,
                uses_cache=False,
            )
        )
    spent = []
    while len(spent) < steps:
        start = time.perf_counter()
        schedule = scheduler.schedule()
        assert schedule is not None
        plan_step(schedule, config, layout)
        middle = time.perf_counter()
        result = model.step(schedule)
        resumed = time.perf_counter()
        scheduler.update(schedule, result)
        if len(schedule.decode) == num_running:
            spent.append(time.perf_counter() - resumed + middle - start)
    return round(statistics.median(spent) * 1e6, 1), round(_detokenize_us(), 2)


def dispatch_us(num_arrays: int = 182, calls: int = 300) -> float:
    """Median microseconds to dispatch a program with SmolLM2's number of arrays, and a
    packed array of the host."""
    import jax
    import jax.numpy as jnp

    arrays = [jnp.zeros((8, 8)) for _ in range(num_arrays)]
    # The arrays are arguments that the program does not need: only the call counts.
    program = jax.jit(lambda arrays, packed: packed[:8] + 1, keep_unused=True)
    compiled = program.lower(arrays, np.zeros(6000, np.int32)).compile()
    spent = []
    for _ in range(calls):
        packed = np.zeros(6000, np.int32)
        start = time.perf_counter()
        compiled(arrays, packed)
        spent.append(time.perf_counter() - start)
    return round(statistics.median(spent) * 1e6, 1)


class _Words:
    """A tokenizer of words: stands in for the user's."""

    byte_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """One word per id."""
        del skip_special_tokens
        return "".join(f" w{i}" for i in ids)


def _detokenize_us(count: int = 2000) -> float:
    """Microseconds per token of the incremental detokenizer itself."""
    detokenizer = Detokenizer(_Words(), skip_special_tokens=True)  # type: ignore[arg-type]
    start = time.perf_counter()
    for i in range(count):
        detokenizer.push([i])
    return (time.perf_counter() - start) / count * 1e6
