"""Times sampling against the decode step that it follows.

    python -m headrace.scripts.bench_sampler
    python -m headrace.scripts.bench_sampler --config=tiny --num_timings=3

One decode program with every slot in use, at --context_tokens each, and the sample
programs under several parameters, in turns, so that a busy machine slows all alike.
Logits are random, of standard deviation 3. Prints medians and the share of the forward
call that each takes, then one JSON line.
"""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.scripts import engine_flags

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_timings", 25, "Timed calls of each program.", lower_bound=1)
flags.DEFINE_integer("context_tokens", 256, "Length of every request.", lower_bound=1)

_NUM_SLOTS = 32
_LOGITS_DEVIATION = 3.0
_FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
# Per case: the program's variant, and what every row asks for.
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "greedy": ("greedy", {}),
    "temperature": ("sampled", {"temperature": 0.8}),
    "top_k": ("sampled", {"temperature": 0.8, "top_k": 50}),
    "top_p": ("sampled", {"temperature": 0.8, "top_p": 0.9}),
    "all filters": ("sampled", _FILTERS),
    "logprobs, greedy": ("full", {}),
    "everything": (
        "full",
        _FILTERS
        | {"has_extras": 1, "presence": 0.5, "frequency": 0.3, "repetition": 1.2}
        | {"min_position": 2**30},
    ),
}


def few_programs(engine: EngineConfig) -> EngineConfig:
    """One decode bucket and one prefill shape, and a context that just suffices."""
    num_slots = FLAGS.num_slots or _NUM_SLOTS
    return dataclasses.replace(
        engine,
        num_slots=num_slots,
        decode_batch_sizes=(num_slots,),
        prefill_shapes=((1, 64),),
        max_context_len=FLAGS.max_context_len or FLAGS.context_tokens + 64,
        num_pages=None,
    )


class Bench:
    """The programs of one engine, with every slot in use.

    Args:
      runner: the engine's, not used by anything else.
      context_tokens: length of every request.
    """

    def __init__(self, runner: Any, context_tokens: int) -> None:
        import jax.numpy as jnp
        import numpy as np

        self._runner, self._context_tokens = runner, context_tokens
        self._bucket = runner.config.decode_batch_sizes[-1]
        self._packed = jnp.asarray(runner.layout.unchanged(does_decode=True))
        B, _, V = runner.logits_BQV.shape
        rng = np.random.default_rng(7)
        z_BQV = rng.standard_normal((B, 1, V), np.float32) * _LOGITS_DEVIATION
        runner.logits_BQV = jnp.asarray(z_BQV)
        runner.extras = dataclasses.replace(
            runner.extras,
            count_BV=jnp.asarray(rng.integers(0, 2, (B, V), np.int32)),
            bias_BV=jnp.asarray(rng.standard_normal((B, V), np.float32)),
        )

    def forward_s(self) -> float:
        """Seconds of one decode call; it leaves its logits, which are put back."""
        import jax
        import jax.numpy as jnp

        runner = self._runner
        before_BQV = jnp.copy(runner.logits_BQV)
        self._fill_slots({})
        key = ("decode", self._bucket)
        elapsed_s = self._time(
            lambda: runner.forward(key, self._packed) or runner.logits_BQV
        )
        runner.logits_BQV = jax.block_until_ready(before_BQV)
        return elapsed_s

    def sample_s(self, case: str) -> float:
        """Seconds of one sample call."""
        variant, asked = CASES[case]
        self._fill_slots(asked)
        key = ("sample", variant, self._bucket)
        return self._time(lambda: self._runner.sample(key, self._packed))

    @staticmethod
    def _time(call: Callable[[], Any]) -> float:
        import jax

        begin_s = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begin_s

    def _fill_slots(self, asked: dict[str, float]) -> None:
        """Every slot active in the middle of a request, with pages of its own."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from headrace.engine.slots import empty_slots

        runner = self._runner
        B, M = runner.layout.num_slots, runner.layout.pages_per_request
        slots = empty_slots(runner.layout)
        page_BM = 1 + np.arange(B * M).reshape(B, M) % (runner.config.num_pages - 1)
        row_B = np.arange(B)
        changes = {
            f"{name}_B": np.full(B, value, getattr(slots, f"{name}_B").dtype)
            for name, value in asked.items()
        }
        changes |= {
            "last_token_B": row_B.astype(np.int32),
            "position_B": np.full(B, self._context_tokens - 1, np.int32),
            "active_B": np.ones(B, bool),
            "remaining_B": np.full(B, 1000, np.int32),
            "seed_B2": np.stack([row_B, row_B + 1], axis=1).astype(np.uint32),
            "page_table_BM": page_BM.astype(np.int32),
        }
        arrays = {name: jnp.asarray(value) for name, value in changes.items()}
        slots = dataclasses.replace(slots, **arrays)
        runner.slots = jax.block_until_ready(slots)


def measure(bench: Bench, num_timings: int) -> dict[str, list[float]]:
    """Seconds of each call by case, "forward" first; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", *CASES)}
    for _ in range(num_timings + 1):
        for name, found in seconds.items():
            is_forward = name == "forward"
            found.append(bench.forward_s() if is_forward else bench.sample_s(name))
    return {name: found[1:] for name, found in seconds.items()}


def table(seconds: dict[str, list[float]]) -> str:
    """Medians and minima in milliseconds, and medians over that of the forward call."""
    forward_s = statistics.median(seconds["forward"])
    lines = [f"{'':18}{'median ms':>10}{'least ms':>10}{'of forward':>12}"]
    for name, found in seconds.items():
        median_s = statistics.median(found)
        share = 100 * median_s / forward_s
        lines.append(
            f"{name:18}{1e3 * median_s:10.2f}{1e3 * min(found):10.2f}{share:10.1f} %"
        )
    return "\n".join(lines)


def run() -> int:
    """Returns the exit code."""
    import jax

    llm = engine_flags.build_llm(few_programs)
    runner = llm._loop._runner
    seconds = measure(Bench(runner, FLAGS.context_tokens), FLAGS.num_timings)
    print(table(seconds))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    forward_s = medians["forward"]
    line = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "load_average": round(os.getloadavg()[0], 2),
        "num_slots": runner.layout.num_slots,
        "vocab_size": runner.model_config.vocab_size,
        "context_tokens": FLAGS.context_tokens,
        "median_ms": {name: round(1e3 * s, 3) for name, s in medians.items()},
        "share": {name: round(s / forward_s, 4) for name, s in medians.items()},
    }
    print(json.dumps(line))
    return 0


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
