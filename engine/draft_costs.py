"""Measures at start what decode steps cost with and without drafts."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from headrace.engine.draft_control import PassCosts
from headrace.engine.model_runner import ModelRunner
from headrace.engine.slots import empty_slots

_REPEATS = 5
# Tokens before each row, if the context has room for them.
_CONTEXT = 256


def measure_costs(runner: ModelRunner) -> dict[int, PassCosts]:
    """Costs by decode bucket, all rows taken; one page serves for all of them.

    Sampling is that of a first token: a row with right drafts samples more often.

    Args:
      runner: with every program compiled and no request in it.
    """
    sizes = runner.config.decode_batch_sizes or ()
    costs = {bucket: _costs_of(runner, bucket) for bucket in sizes}
    runner.slots = empty_slots(runner.layout)
    return costs


def _costs_of(runner: ModelRunner, bucket: int) -> PassCosts:
    layout, none, every = runner.layout, -1, 0
    packed = layout.unchanged(does_decode=True, does_draft=True)
    plain_packed = layout.unchanged(does_decode=True)

    def drafts_are(token_id: int) -> None:
        assert runner.drafting is not None
        drafts_BK = jnp.full_like(runner.drafting.drafts_BK, token_id)
        runner.drafting = dataclasses.replace(runner.drafting, drafts_BK=drafts_BK)

    def propose() -> None:
        runner.propose(bucket, packed)
        assert runner.drafting is not None
        runner.read(runner.drafting.num_new_B)

    def step(kind: str, packed: np.ndarray) -> None:
        runner.forward((kind, bucket), packed)
        runner.read(runner.sample(("sample", "greedy", bucket), packed).token_B)

    def seconds(call: Callable[[], None], prepare: Callable[[], None]) -> float:
        times = []
        for _ in range(1 + _REPEATS):
            _take_rows(runner, bucket)
            prepare()
            runner.read((runner.slots.position_B, runner.logits_BQV[0, 0, 0]))
            begun_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun_s)
        # The first call may touch memory that nobody has touched before.
        return statistics.median(times[1:])

    drafting_s = seconds(propose, lambda: None)
    bare_s = seconds(lambda: step("verify", packed), lambda: drafts_are(none))
    full_s = seconds(lambda: step("verify", packed), lambda: drafts_are(every))
    plain_s = bare_s
    if runner.config.adapts_drafts:
        plain_s = seconds(lambda: step("decode", plain_packed), lambda: None)
    drafts_are(none)
    return PassCosts(
        plain=plain_s,
        bare=drafting_s + bare_s,
        full=drafting_s + max(bare_s, full_s),
        drafting=drafting_s,
    )


def _take_rows(runner: ModelRunner, bucket: int) -> None:
    """Rows that decode with drafts, in the middle of nothing."""
    layout = runner.layout
    B = layout.num_slots
    runner.slots = dataclasses.replace(
        empty_slots(layout),
        active_B=jnp.arange(B) < bucket,
        position_B=jnp.full(B, min(_CONTEXT, layout.max_context_len // 2), jnp.int32),
        remaining_B=jnp.full(B, 1000, jnp.int32),
        max_drafts_B=jnp.full(B, layout.num_drafts, jnp.int32),
    )
    assert runner.drafting is not None
    is_ready_B = jnp.ones_like(runner.drafting.is_ready_B)
    num_new_B = jnp.ones_like(runner.drafting.num_new_B)
    runner.drafting = dataclasses.replace(
        runner.drafting, is_ready_B=is_ready_B, num_new_B=num_new_B
    )
