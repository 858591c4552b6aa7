"""An engine whose steps take a fixed time and give fixed tokens; nothing compiles.

All of the host is real: scheduler, pages, detokenizer, loop. In place of the device a
clock runs: a step is ready so many seconds after it was dispatched or after the step
before it, whichever is later. What is measured on top is therefore the host's own.
"""

import collections
import dataclasses
import time
import types
from typing import Any

import numpy as np

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.configs import load_config, parse_config
from headrace.configs.schema import EngineConfig
from headrace.engine.batch import StepPlan
from headrace.engine.ledger import Ledger
from headrace.engine.llm import LLM
from headrace.engine.loop import EngineLoop
from headrace.engine.packed_layout import layout_of
from headrace.engine.request import Request
from headrace.engine.schedule import FINISH_LENGTH, FINISH_RUNNING, Schedule, StepResult
from headrace.engine.sizing import DeviceFacts, resolve

_LETTERS = np.arange(ord("a"), ord("z") + 1, dtype=np.int32)


class FixedStepRunner:
    """Stands in for `ModelRunner`: token k of every request is the k-th letter.

    Args:
      config: resolved.
      step_s: seconds of every step.

    Attributes:
      schedule: of the step that is planned; whoever schedules sets it.
    """

    num_mask_words = 0

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        self.layout = layout_of(config)
        self.ledger = Ledger()
        # Preempted pages have a place, as many as the pool has, and no content.
        self.host_pages = types.SimpleNamespace(num_pages=config.num_pages)
        self.schedule: Schedule | None = None
        self._step_s, self._ready_s = step_s, 0.0
        self._pending: collections.deque[tuple[float, StepResult]] = collections.deque()

    def dispatch_forward(self, plan: StepPlan) -> None:
        """The device begins with it once it is done with the step before."""
        self._ready_s = max(self._ready_s, time.perf_counter()) + self._step_s

    def dispatch_sample(self, plan: StepPlan, mask_BW: np.ndarray | None) -> None:
        """Ends a step; a later `read_step` gives its result."""
        assert self.schedule is not None and mask_BW is None
        self._pending.append((self._ready_s, self._result(self.schedule)))

    def read_step(self) -> StepResult:
        """Waits for the oldest step not read yet."""
        ready_s, result = self._pending.popleft()
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        return result

    def close(self) -> None:
        """Nothing is held."""

    def _result(self, schedule: Schedule) -> StepResult:
        tokens = np.zeros(self.layout.num_slots, np.int32)
        codes = np.full(self.layout.num_slots, FINISH_RUNNING, np.int32)

        def sample(request: Request, slot: int) -> None:
            count = request.num_dispatched  # this token included
            tokens[slot] = _LETTERS[count % _LETTERS.size]
            if count == request.max_tokens:
                codes[slot] = FINISH_LENGTH

        for row in schedule.fresh:
            sample(row.request, row.slot)
        for request, slot in zip(schedule.decode, schedule.decode_slots, strict=True):
            sample(request, int(slot))
        return StepResult(token_ids=tokens, finish_codes=codes)


def fixed_step_llm(step_s: float, **changes: Any) -> LLM:
    """An LLM over a clock; text in, text out, a byte a token.

    Whatever a request asks for, it gets letters up to its `max_tokens`; grammars and
    log-probabilities there are none.

    Args:
      step_s: seconds of every step, above 0.
      **changes: of the engine config of configs/tiny.py.

    Raises:
      ValueError: a value out of its range.
    """
    if not step_s > 0:
        raise ValueError(f"step_s must be above 0, got {step_s}")
    model, engine = parse_config(load_config("tiny"))
    facts = DeviceFacts(platform="cpu", free_bytes=2**40)
    config = resolve(model, dataclasses.replace(engine, **changes), facts)
    runner: Any = FixedStepRunner(config, step_s)
    llm = LLM.__new__(LLM)
    nothing = Checkpoint(
        config=model, params={}, tokenizer=byte_tokenizer(), identity="fixed step"
    )
    llm._serve(nothing, runner, config)
    _note_schedules(llm._loop, runner)
    return llm


def _note_schedules(loop: EngineLoop, runner: FixedStepRunner) -> None:
    """A plan holds packed numbers; who runs stands in the schedule only."""
    scheduler = loop._scheduler
    make = scheduler.schedule

    def schedule() -> Schedule | None:
        runner.schedule = make()
        return runner.schedule

    scheduler.schedule = schedule  # type: ignore[method-assign]


def byte_tokenizer() -> TokenizerSpec:
    """Id i is the byte i; 256 ends a text."""
    import tokenizers

    # Bytes' stand-ins are in no useful order; printable ASCII stands for itself.
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stand_ins = [
        level.pre_tokenize_str(chr(byte))[0][0] if byte < 128 else None
        for byte in range(256)
    ]
    rest = iter(sorted(set(alphabet) - set(stand_ins)))
    names = [one if one is not None else next(rest) for one in stand_ins]
    vocab = {name: i for i, name in enumerate(names)} | {"</s>": 256}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    fast.pre_tokenizer = level
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens(["</s>"])
    return TokenizerSpec(tokenizer_json=fast.to_str(), eos_token="</s>")
