"""Fakes shared by the engine's host-side tests."""

import dataclasses
import zlib

import numpy as np
import pytest

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.request import RequestStatus, make_request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.schedule import StepResult, pick_decode_bucket
from headrace.engine.scheduler import Scheduler

PAGE_SIZE = 16
VOCAB_SIZE = 11

SIZES = ("num_layers", "model_dim", "ffw_dim", "num_heads", "num_kv_heads", "head_dim")
MODEL = ModelConfig(
    **dict.fromkeys(SIZES, 8), vocab_size=VOCAB_SIZE, context_len=128, stop_ids=(3,)
)
CONFIG = {
    "max_context_len": 128,
    "page_size": PAGE_SIZE,
    "num_pages": 33,
    "num_slots": 4,
    "decode_batch_sizes": (1, 2, 4),
    "prefill_shapes": ((1, 32), (2, 16)),
    "prefill_calls_per_decode": 1,
}


def next_token(history):
    """The fake model: any token depends on all before it."""
    return zlib.crc32(bytes(history)) % VOCAB_SIZE


@dataclasses.dataclass
class Row:
    """A slot's row, as the device keeps it."""

    pages: list[int]
    position: int  # of the last token
    remaining: int
    stop_ids: tuple[int, ...]
    last_token: int | None = None  # not yet in the pages
    is_active: bool = True


class FakeDevice:
    """Applies Schedules like the compiled steps do, with real pages and rows.

    Tokens follow from what the pages hold, so a wrong page, row or order shows.
    """

    def __init__(self, num_slots, num_pages):
        self.rows = [None] * num_slots
        self.pages = [[None] * PAGE_SIZE for _ in range(num_pages)]

    def step(self, schedule):
        """Runs one step; returns (token ids, finish codes) with junk elsewhere."""
        if schedule.slot_sources is not None:
            assert sorted(schedule.slot_sources) == list(range(len(self.rows)))
            self.rows = [self.rows[source] for source in schedule.slot_sources]
        for slot in schedule.released:
            if self.rows[slot] is not None:
                self.rows[slot].is_active = False
        tokens = np.full(len(self.rows), -7, np.int32)
        finish = np.full(len(self.rows), 0, np.int32)
        if schedule.decode:
            for slot, row in enumerate(self.rows):
                if row is not None and row.is_active:
                    assert slot < schedule.num_rows
                    self._write(row.pages, row.position, row.last_token)
                    tokens[slot], finish[slot] = self._sample(row)
        for chunk in schedule.prefill:
            if (row := self._prefill(chunk)) is not None:
                tokens[chunk.slot], finish[chunk.slot] = self._sample(row)
        return tokens, finish

    def _prefill(self, chunk):
        request, end = chunk.request, chunk.start + chunk.length
        for position in range(chunk.start, end):
            token = request.prompt_token_ids[position]
            self._write(request.pages, position, token)
        if not chunk.is_last:
            return None
        if (old := self.rows[chunk.slot]) is not None:
            assert not old.is_active, "the slot has another request"
        row = Row(
            pages=list(request.pages),
            position=end - 1,
            remaining=request.max_tokens,
            stop_ids=request.stop_ids,
        )
        self.rows[chunk.slot] = row
        return row

    def _write(self, pages, position, token):
        self.pages[pages[position // PAGE_SIZE]][position % PAGE_SIZE] = token

    def _sample(self, row):
        history = [
            self.pages[row.pages[p // PAGE_SIZE]][p % PAGE_SIZE]
            for p in range(row.position + 1)
        ]
        row.last_token = next_token(history)
        row.position += 1
        row.remaining -= 1
        code = 1 if row.last_token in row.stop_ids else 2 * (row.remaining == 0)
        row.is_active = code == 0
        return row.last_token, code


def tokens_alone(request):
    """What the fake model gives the request in an engine of its own."""
    history = list(request.prompt_token_ids)
    output = []
    while len(output) < request.max_tokens:
        output.append(next_token([*history, *output]))
        if output[-1] in request.stop_ids:
            break
    return output


class Engine:
    """The loop: schedule, run on the fake device, update; checks as it goes.

    With `lag` it schedules step N + 1 before it updates with step N.
    """

    def __init__(self, lag=False, **changes):
        config = EngineConfig(**{**CONFIG, **changes})
        self.config, self.lag = config, lag
        self.manager = KVCacheManager(config.num_pages, config.page_size)
        self.clock_s = 0.0
        self.scheduler = Scheduler(config, self.manager, lambda: self.clock_s)
        self.device = FakeDevice(config.num_slots, config.num_pages)
        self.requests = []  # in order of arrival
        self.chunks = {}
        self.pending = None
        self.num_paused, self.batch_rows, self.static_batch = 0, 0, set()

    def request(self, name, prompt_len, max_tokens=4, **params):
        """A request for `add`; it ignores the model's stop id 3 unless told."""
        params = {"ignore_eos": True, "max_tokens": max_tokens, **params}
        return make_request(
            str(name),
            [
                (7 * i + len(str(name)) + prompt_len) % VOCAB_SIZE
                for i in range(prompt_len)
            ],
            SamplingParams(**params),
            model_config=MODEL,
            engine_config=self.config,
            arrival_s=0.0,
        )

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)

    def step(self):
        """One turn; returns the schedule, None where nothing was to do."""
        self.clock_s += 1.0
        could_decode = [
            r
            for r in self.requests
            if r.status is RequestStatus.DECODING and r.num_dispatched < r.max_tokens
        ]
        busy = {r.request_id for r in self.requests if self.is_running(r)}
        schedule = self.scheduler.schedule()
        result = None
        if schedule is not None:
            self.check(schedule, could_decode, busy)
            tokens, finish = self.device.step(schedule)
            result = StepResult(token_ids=tokens, finish_codes=finish)
        else:
            assert self.pending or not self.scheduler.has_work
        if self.lag:
            result_now, self.pending = self.pending, (schedule, result)
        else:
            result_now = (schedule, result)
        if result_now is not None and result_now[0] is not None:
            self.scheduler.update(*result_now)
        if schedule is None and self.pending == (None, None):
            self.pending = None
        return schedule

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.pending:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    @staticmethod
    def is_running(request):
        return request.status in (RequestStatus.PREFILLING, RequestStatus.DECODING)

    def check(self, schedule, could_decode, busy):
        running = [r for r in self.requests if self.is_running(r)]
        slots = [r.slot for r in running]
        assert len(slots) == len(set(slots)), "two requests in one slot"
        pages = [page for r in running for page in r.pages]
        assert len(pages) == len(set(pages)) and 0 not in pages
        assert self.manager.num_free + len(pages) == self.config.num_pages - 1
        live = [r.status for r in self.requests if not r.is_finished]
        waits = [status is RequestStatus.WAITING for status in live]
        assert waits == sorted(waits), "somebody overtook in the queue"
        self.check_prefill(schedule)
        if schedule.decode:
            assert set(schedule.decode) == set(could_decode), "all decode, or none"
            assert len(schedule.decode) == len(could_decode)
            assert schedule.decode_slots == tuple(r.slot for r in schedule.decode)
        if self.config.policy == "static":
            self.check_static(schedule, running, busy)
            return
        sizes = self.config.decode_batch_sizes
        assert pick_decode_bucket(sizes, schedule.num_rows) == pick_decode_bucket(
            sizes, len(running)
        ), "a smaller decode bucket would do"
        is_paused = bool(could_decode) and not schedule.decode
        assert not is_paused or schedule.prefill
        self.num_paused = self.num_paused + 1 if is_paused else 0
        assert self.num_paused < self.config.prefill_calls_per_decode

    def check_prefill(self, schedule):
        rows = schedule.prefill
        longest, shapes = (
            max([0, *(c.length for c in rows)]),
            self.config.prefill_shapes,
        )
        assert any(r >= len(rows) and t >= longest for r, t in shapes)
        order = [self.requests.index(c.request) for c in rows]
        assert order == sorted(set(order))
        for chunk in rows:
            assert chunk.slot == chunk.request.slot
            done = self.chunks.setdefault(chunk.request.request_id, [])
            assert chunk.start == sum(done)
            done.append(chunk.length)
            assert chunk.is_last == (sum(done) == chunk.request.prompt_len)

    def check_static(self, schedule, running, busy):
        names = {r.request_id for r in running}
        if names - busy:
            assert not busy, "admitted into a batch that still runs"
            self.batch_rows = schedule.num_rows
        assert schedule.num_rows == self.batch_rows, "the static bucket shrank"
        assert schedule.slot_sources is None
        if schedule.decode:
            assert not schedule.prefill
            assert all(r.status is RequestStatus.DECODING for r in running)

    def check_end(self):
        longest_chunk = max(tokens for _, tokens in self.config.prefill_shapes)
        assert self.manager.num_free == self.config.num_pages - 1
        assert self.scheduler.num_free_slots == self.config.num_slots
        for request in self.requests:
            expected = tokens_alone(request)
            got = request.output_token_ids
            if request.finish_reason == "abort":
                assert got == expected[: len(got)]
                continue
            assert got == expected
            is_stop = bool(got) and got[-1] in request.stop_ids
            assert request.finish_reason == ("stop" if is_stop else "length")
            full, rest = divmod(request.prompt_len - 1, longest_chunk)
            lengths = [longest_chunk] * full + [rest + 1]
            assert self.chunks[request.request_id] == lengths


@pytest.fixture(scope="session")
def engine_of():
    """The Engine class: a scheduler, its pages and a fake device."""
    return Engine


@pytest.fixture(scope="session")
def alone():
    """What a request gets in an engine of its own."""
    return tokens_alone


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The real tokenizer, without its weights."""
    from headrace.checkpoints import cache_dir, gguf_reader, gguf_tokenizer, registry
    from headrace.engine.tokenizer import HFTokenizer

    folder = cache_dir.cache_dir(None)
    reader = gguf_reader.open_gguf(registry.fetch("smollm2-135m-instruct", folder))
    return HFTokenizer(gguf_tokenizer.tokenizer_spec(reader))
