"""Fakes shared by the engine's host-side tests."""

import functools

import pytest

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.new_request import make_request, make_siblings
from headrace.engine.prefix_hash import chain_seed, name_pages
from headrace.engine.request import RequestStatus
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
    "prefix_cache": False,
}


class Engine:
    """The loop: schedule, run on the fake device, update; checks as it goes.

    With `lag` it schedules step N + 1 before it updates with step N.
    """

    def __init__(
        self, fake_device, lag=False, num_host_pages=0, caches_output=False, **changes
    ):
        config = EngineConfig(**{**CONFIG, **changes})
        self.config, self.lag = config, lag
        self.manager = KVCacheManager(config.num_pages, config.page_size)
        self.clock_s = 0.0
        self.scheduler = Scheduler(
            config, self.manager, lambda: self.clock_s,
            num_host_pages=num_host_pages, caches_output=caches_output,
        )  # fmt: skip
        self.device = fake_device(config.num_slots, config.num_pages, num_host_pages)
        self.requests = []  # in order of arrival
        self.chunks, self.starts = {}, {}
        self.num_resumed = self.num_forks = 0
        self.pending = None
        self.num_paused, self.batch_rows, self.static_batch = 0, 0, set()

    def request(self, name, prompt_len, max_tokens=4, *, fields=None, **params):
        """A request for `add`; it ignores the model's stop id 3 unless told.

        `fields` are those of the Request; the key "prompt" replaces its token ids.
        """
        fields = dict(fields or {})
        params = {"ignore_eos": True, "max_tokens": max_tokens, **params}
        ids = fields.pop("prompt", None) or [
            (7 * i + len(str(name)) + prompt_len) % VOCAB_SIZE
            for i in range(prompt_len)
        ]
        request = make_request(
            str(name),
            ids,
            SamplingParams(**params),
            model_config=MODEL,
            engine_config=self.config,
            arrival_s=fields.pop("arrival_s", 0.0),
        )
        for field, value in fields.items():
            setattr(request, field, value)
        request.uses_cache = self.config.prefix_cache and request.uses_cache
        if self.config.prefix_cache:
            seed = chain_seed(model="", bit_class="", tenant=request.tenant or "")
            names = name_pages(seed, request.prompt_token_ids, PAGE_SIZE)
            request.name_seed, request.page_names = seed, names
        return request

    def add(self, *requests):
        for request in requests:
            siblings = make_siblings(request)
            self.scheduler.add(*siblings)
            self.requests += siblings

    def step(self):
        """One turn; returns the schedule, None where nothing was to do."""
        self.clock_s += 1.0
        busy = {r.request_id for r in self.requests if self.is_running(r)}
        schedule = self.scheduler.schedule()
        busy -= {r.request_id for r in self.requests if r.is_finished}
        result = None
        if schedule is not None:
            self.check(schedule, busy)
            self.num_resumed += len(schedule.resumed)
            self.num_forks += len(schedule.forks)
            tokens, finish = self.device.step(schedule)
            result = StepResult(token_ids=tokens, finish_codes=finish)
        else:
            may_idle = self.pending or self.config.max_queue_delay_s
            assert may_idle or not self.scheduler.has_work
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

    def run_until_decode(self):
        """Steps until something decodes."""
        while not (schedule := self.step()) or not schedule.decode:
            pass

    @staticmethod
    def is_running(request):
        return request.status in (RequestStatus.PREFILLING, RequestStatus.DECODING)

    def check(self, schedule, busy):
        running = [r for r in self.requests if self.is_running(r)]
        slots = [r.slot for r in running]
        assert len(slots) == len(set(slots)), "two requests in one slot"
        self.check_pages(running)
        fresh = {c.request for c in schedule.prefill if c.is_last}
        fresh |= {fork.request for fork in schedule.forks}
        others = [
            r
            for r in running
            if r.status is RequestStatus.DECODING
            and r not in fresh
            and r not in schedule.decode
        ]
        could_decode = [r for r in others if r.num_dispatched < r.max_tokens]
        if self.config.policy in ("fcfs", "static") and not self.config.prefix_cache:
            live = [r for r in self.requests if not r.is_finished]
            waits = [not self.is_running(r) for r in live]
            is_kept = self.scheduler.num_preemptions == 0
            assert waits == sorted(waits) or not is_kept, "somebody overtook"
        self.check_prefill(schedule)
        if schedule.decode:
            assert not could_decode, "all decode, or none"
            assert len(schedule.decode) == len(set(schedule.decode))
            slots = [r.slot for r in schedule.decode]
            assert schedule.decode_slots.tolist() == slots
        if self.config.policy == "static":
            self.check_static(schedule, running, busy)
            return
        sizes = self.config.decode_batch_sizes
        assert pick_decode_bucket(sizes, schedule.num_rows) == pick_decode_bucket(
            sizes, len(running)
        ), "a smaller decode bucket would do"
        is_paused = bool(could_decode) and not schedule.decode
        assert not is_paused or schedule.prefill or schedule.saves
        self.num_paused = self.num_paused + 1 if is_paused else 0
        assert self.num_paused < self.config.prefill_calls_per_decode

    def check_pages(self, running):
        """No page has two owners unless it is shared, and none is lost."""
        assert all(0 not in r.pages for r in running)
        held = {page for r in running for page in r.pages}
        assert self.manager.num_free + len(held) == self.config.num_pages - 1
        if not self.config.prefix_cache and all(r.params.n == 1 for r in running):
            assert len(held) == sum(len(r.pages) for r in running)
        if self.config.policy == "static":
            return
        for r in running:
            assert len(r.pages) <= self.manager.pages_for(r.max_len)
            if r.status is RequestStatus.DECODING:
                spare = len(r.pages) * PAGE_SIZE - r.num_computed
                assert spare <= PAGE_SIZE, "a page was taken too early"

    def check_prefill(self, schedule):
        rows = schedule.prefill
        longest, shapes = (
            max([0, *(c.length for c in rows)]),
            self.config.prefill_shapes,
        )
        assert any(r >= len(rows) and t >= longest for r, t in shapes)
        order = [self.requests.index(c.request) for c in rows]
        assert len(order) == len(set(order))
        # With a cache a request may wait for pages that another is filling.
        if self.config.policy in ("fcfs", "static") and not self.config.prefix_cache:
            assert order == sorted(order) or self.scheduler.num_preemptions
        for chunk in rows:
            assert chunk.slot == chunk.request.slot
            request = chunk.request
            if request.request_id not in self.chunks or self.restarts(chunk):
                # The heir of a leader that was aborted goes on where that one was.
                is_heir = request.index > 0
                assert chunk.start == 0 or self.config.prefix_cache or is_heir
                self.chunks[request.request_id] = []
                self.starts[request.request_id] = chunk.start
            done = self.chunks[request.request_id]
            assert chunk.start == self.starts[request.request_id] + sum(done)
            done.append(chunk.length)
            end = chunk.start + chunk.length
            assert chunk.is_last == (end == request.fill_len)

    def restarts(self, chunk):
        """Whether the chunk is the first after a preemption."""
        name = chunk.request.request_id
        end = self.starts[name] + sum(self.chunks[name])
        return chunk.start != end and self.scheduler.num_preemptions > 0

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
        assert self.scheduler._running.num_free == self.config.num_slots
        for request in self.requests:
            expected = self.device.tokens_alone(request)
            got = request.output_token_ids
            if request.finish_reason in ("cancelled", "deadline", "rejected"):
                assert got == expected[: len(got)]
                continue
            assert got == expected
            is_stop = bool(got) and got[-1] in request.stop_ids
            assert request.finish_reason == ("stop" if is_stop else "length")
            if self.scheduler.num_preemptions or request.num_cached:
                continue
            if request.index:  # its prompt may be its leader's work
                continue
            full, rest = divmod(request.prompt_len - 1, longest_chunk)
            lengths = [longest_chunk] * full + [rest + 1]
            assert self.chunks[request.request_id] == lengths


@pytest.fixture(scope="session")
def engine_of(fake_device):
    """Makes an Engine: a scheduler, its pages and a fake device."""
    return functools.partial(Engine, fake_device)


@pytest.fixture(scope="session")
def alone(fake_device):
    """What a request gets in an engine of its own."""
    return fake_device.tokens_alone


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The real tokenizer, without its weights."""
    from headrace.checkpoints import cache_dir, gguf_reader, gguf_tokenizer, registry
    from headrace.engine.tokenizer import HFTokenizer

    folder = cache_dir.cache_dir(None)
    reader = gguf_reader.open_gguf(registry.fetch("smollm2-135m-instruct", folder))
    return HFTokenizer(gguf_tokenizer.tokenizer_spec(reader))
