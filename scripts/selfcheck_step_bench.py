"""Times the programs of one runner, and the engine's loop around them.

The floor of a decode step reads each weight and each live key and value once, at the
bandwidth that the card's copy reached.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.configs.schema import ModelConfig
from headrace.engine.loop import EngineLoop
from headrace.engine.model_runner import ModelRunner
from headrace.engine.programs import ProgramKey
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.slots import empty_slots
from headrace.scripts.gpu_programs import StepSizes
from headrace.scripts.selfcheck_device import (
    Setup,
    compile_program,
    error_text,
    require_device,
    time_chain,
    vendor,
)
from headrace.scripts.selfcheck_report import Part, Timing, share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is timed.

    Attributes:
      context: tokens that a row holds in decode.
      turns: of the engine's loop that are timed.
      calls, repeats: see `time_chain`.
    """

    context: int
    turns: int
    calls: int
    repeats: int


def sizes_of(setup: Setup) -> Sizes:
    """Sizes for a card, or tiny ones."""
    if setup.is_smoke:
        return Sizes(context=20, turns=2, calls=1, repeats=1)
    return Sizes(context=1024, turns=64, calls=20, repeats=5)


def floor_bytes(model: ModelConfig, rows: int, context: int) -> int:
    """What a decode step must read: each weight once, each live key and value once."""
    sizes = StepSizes(model=model, rows=rows, context=context, chunk=8)
    return sizes.floor_bytes("decode") + sizes.kv_bytes("decode")


def prefill_flops(model: ModelConfig, tokens: int) -> int:
    """Products with weights, keys and values, two each; logits of the last token."""
    D, N, H = model.model_dim, model.num_heads, model.head_dim
    of_token = D * (2 * N + 2 * model.num_kv_heads) * H + 3 * D * model.ffw_dim
    pairs = tokens * (tokens + 1) // 2
    layers = model.num_layers * (2 * tokens * of_token + 4 * pairs * N * H)
    return layers + 2 * model.vocab_size * D


class StepBench:
    """Times programs of one runner.

    Args:
      part: where results go.
      setup: of the run.
      runner: compiled.
    """

    def __init__(self, part: Part, setup: Setup, runner: ModelRunner) -> None:
        self._part, self._setup, self._runner = part, setup, runner
        self._sizes, self._model = sizes_of(setup), runner.model_config
        self._packed = jnp.asarray(runner.layout.unchanged(does_decode=True))
        self._variants = tuple(
            key[1]
            for key in runner.program_keys()
            if key[0] == "sample" and key[2] == runner.config.num_slots
        )

    def decode(self, rows: int) -> None:
        """Forward and sample of so many rows."""
        context, roofs = self._sizes.context, self._setup.roofs
        self._fill_slots(rows, context)
        timing = self._time(lambda: self._forward(("decode", rows)))
        num_bytes = floor_bytes(self._model, rows, context)
        floor_s = share(num_bytes, roofs.copy_bytes_per_s)
        vendor_s = share(num_bytes, vendor("bytes_per_s"))
        self._part.measure(
            f"decode of {rows}, forward",
            timing.best_s,
            "s",
            share=share(floor_s, timing.best_s),
            median=timing.median_s,
            times_floor=share(timing.best_s, floor_s),
            times_vendor_floor=share(timing.best_s, vendor_s),
            floor_bytes=num_bytes,
        )
        is_most = rows == self._runner.config.num_slots
        for variant in self._variants if is_most else ("greedy",):
            self._fill_slots(rows, context)
            sampled = self._time(lambda v=variant: self._sample(rows, v))
            self._part.measure(
                f"decode of {rows}, sample {variant}",
                sampled.best_s,
                "s",
                median=sampled.median_s,
                of_forward=share(sampled.best_s, timing.best_s),
            )

    def prefill(self, shape: tuple[int, int]) -> None:
        """A prompt in one call."""
        runner, tokens = self._runner, shape[1]
        packed = runner.layout.unchanged(does_decode=False)
        rows = runner.layout.rows(packed)
        rows[0, :4] = (0, 0, tokens, 1)
        table_M = runner.layout.page_table(rows)[0]
        table_M[:] = 1 + np.arange(len(table_M))
        on_device = jnp.asarray(packed)
        timing = self._time(lambda: self._forward(("prefill", shape), on_device))
        flops_per_s = prefill_flops(self._model, tokens) / timing.best_s
        self._part.measure(
            f"prefill of {tokens}",
            timing.best_s,
            "s",
            share=share(flops_per_s, self._setup.roofs.matmul_flops_per_s),
            median=timing.median_s,
            flops_per_s=flops_per_s,
        )

    def host_gap(self, rows: int) -> None:
        """A turn of the engine's loop less the device's own time of the same step."""
        sizes, runner = self._sizes, self._runner
        loop = EngineLoop(
            runner, runner.config, self._model, tokenizer=None, identity="synthetic"
        )
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=2 * rows + sizes.turns + 8,
            detokenize=False,
        )  # fmt: skip
        rng = np.random.default_rng(self._setup.seed)
        prompts = rng.integers(0, self._model.vocab_size, (rows, sizes.context))
        states = [
            loop.submit(ids.tolist(), params, uses_cache=False) for ids in prompts
        ]
        while any(not s.completions[0].request.output_token_ids for s in states):
            loop.turn()
        loop.turn()
        turns_s = []
        for _ in range(sizes.turns):
            begin_s = time.perf_counter()
            loop.turn()
            turns_s.append(time.perf_counter() - begin_s)
        assert not any(state.is_finished for state in states), "the batch was not full"
        lengths = [len(s.completions[0].request.output_token_ids) for s in states]
        loop.drop(*states)
        # The device's steps go over as many tokens before the middle as after it.
        middle = sizes.context + int(statistics.mean(lengths)) - sizes.turns // 2
        self._fill_slots(rows, max(1, middle - sizes.calls * sizes.repeats // 2))

        def both() -> jax.Array:
            self._forward(("decode", rows))
            return self._sample(rows, "greedy")

        device = self._time(both)
        turn_s = sum(turns_s) / len(turns_s)
        self._part.measure(
            f"decode of {rows}, a turn of the loop",
            turn_s,
            "s",
            median=statistics.median(turns_s),
            device=device.median_s,
            host_gap=turn_s - device.median_s,
            tokens_per_s=rows / turn_s,
        )

    def options(self, rows: int, name: str, options: dict[str, Any]) -> None:
        """Forward of a decode step with these options of the compiler."""
        runner = self._runner
        function, args, donated, _ = runner.describe(("decode", rows))
        begin_s = time.perf_counter()
        try:
            program = compile_program(function, args, donated=donated, options=options)
        except Exception as error:  # noqa: BLE001 - this version may not know one
            self._part.say(f"options {name!r}: not compiled: {error_text(error)}")
            self._part.facts(**{f"options {name}": error_text(error)})
            require_device()
            return
        compile_s = time.perf_counter() - begin_s
        self._fill_slots(rows, self._sizes.context)

        def forward() -> jax.Array:
            runner.kv_cache, runner.logits_BQV, _ = program(
                runner.params,
                runner.kv_cache,
                runner.logits_BQV,
                runner.slots,
                self._packed,
            )
            return runner.logits_BQV

        timing = self._time(forward)
        self._part.measure(
            f"decode of {rows}, options {name!r}",
            timing.best_s,
            "s",
            median=timing.median_s,
            compile_s=compile_s,
        )

    def _time(self, call: Callable[[], jax.Array]) -> Timing:
        sizes = self._sizes
        timing, _ = time_chain(
            lambda _: call(), None, calls=sizes.calls, repeats=sizes.repeats
        )
        return timing

    def _forward(self, key: ProgramKey, packed: Any = None) -> jax.Array:
        self._runner.forward(key, self._packed if packed is None else packed)
        return self._runner.logits_BQV

    def _sample(self, rows: int, variant: str) -> jax.Array:
        return self._runner.sample(("sample", variant, rows), self._packed).token_B

    def _fill_slots(self, rows: int, context: int) -> None:
        """So many requests that hold `context` tokens with the next.

        Sampling has something to do for all but "greedy".
        """
        layout = self._runner.layout
        B, M = layout.num_slots, layout.pages_per_request
        is_active_B = np.arange(B) < rows
        table_BM = 1 + np.arange(B * M, dtype=np.int32).reshape(B, M)
        self._runner.slots = dataclasses.replace(
            empty_slots(layout),
            active_B=jnp.array(is_active_B),
            last_token_B=jnp.arange(B, dtype=jnp.int32) % self._model.vocab_size,
            position_B=jnp.array(np.where(is_active_B, context - 1, 0), jnp.int32),
            remaining_B=jnp.full(B, 10**6, jnp.int32),
            temperature_B=jnp.full(B, 0.8, jnp.float32),
            top_k_B=jnp.full(B, 40, jnp.int32),
            top_p_B=jnp.full(B, 0.95, jnp.float32),
            page_table_BM=jnp.array(table_BM),
        )
