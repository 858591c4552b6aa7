"""The steps of Llama 3.1 8B, all 32 layers: device time against the floor, host gap.

The programs are those of a ModelRunner, compiled as an engine compiles them; weights
are drawn on the device.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from headrace.configs import load_config, parse_config
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.compile_options import compiler_options
from headrace.engine.model_runner import ModelRunner
from headrace.scripts.selfcheck_device import Setup, error_text, require_device
from headrace.scripts.selfcheck_engine import filled, random_params
from headrace.scripts.selfcheck_report import Part
from headrace.scripts.selfcheck_step_bench import StepBench


def step_engine(setup: Setup) -> tuple[ModelConfig, EngineConfig]:
    """The model, and an engine with the buckets that are timed."""
    name = "tiny" if setup.is_smoke else "llama3_1_8b"
    model, _ = parse_config(load_config(name))
    sizes: dict[str, Any] = {
        "max_context_len": 2112,
        "num_slots": 64,
        "decode_batch_sizes": (1, 8, 32, 64),
        "prefill_shapes": ((1, 512), (1, 2048)),
    }
    if setup.is_smoke:
        sizes = {
            "max_context_len": 64,
            "page_size": 16,
            "num_slots": 2,
            "decode_batch_sizes": (2,),
            "prefill_shapes": ((1, 32),),
        }
    config = EngineConfig(numerics="fast", prefix_cache=False, **sizes)
    return model, filled(config, setup)


def step(part: Part, setup: Setup) -> None:
    """Times the programs, then the loop, then other compiler options.

    Raises:
      DeviceLost: the device answers no more.
    """
    model, config = step_engine(setup)
    assert config.param_dtype and config.decode_batch_sizes
    begin_s = time.perf_counter()
    params = jax.block_until_ready(random_params(model, config.param_dtype, setup.seed))
    part.say(f"weights drawn in {time.perf_counter() - begin_s:.1f} s")
    runner = _runner(model, config, params, setup)
    begin_s = time.perf_counter()
    runner.compile_all()
    compile_s = time.perf_counter() - begin_s
    part.say(f"{len(runner.program_keys())} programs compiled in {compile_s:.1f} s")
    entries = runner.ledger.entries.values()
    part.facts(
        compile_s={"all": compile_s} | {e.name: round(e.seconds, 2) for e in entries}
    )
    bench = StepBench(part, setup, runner)
    most = config.decode_batch_sizes[-1]
    tasks: list[tuple[str, Callable[[], None]]] = [
        *(
            (f"decode of {rows}", functools.partial(bench.decode, rows))
            for rows in reversed(config.decode_batch_sizes)
        ),
        ("host gap", functools.partial(bench.host_gap, most)),
        *(
            (f"prefill of {shape[1]}", functools.partial(bench.prefill, shape))
            for shape in config.prefill_shapes or ()
        ),
    ]
    if setup.compares_options:
        tasks += [
            (f"options {name!r}", functools.partial(bench.options, most, name, options))
            for name, options in option_sets(jax.default_backend()).items()
        ]
    for name, task in tasks:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - the others still run
            part.check(name, False, error=error_text(error))
            require_device()
    part.check("the step was timed", part.num_failed == 0)
    runner.close()


def option_sets(platform: str) -> dict[str, dict[str, Any]]:
    """Compiler options that a decode step is timed with, by name."""
    if platform != "gpu":
        return {"engine": {}}
    return {
        "engine": compiler_options("gpu"),
        "cublas": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0},
        "autotuned": {"xla_gpu_autotune_level": 4},
    }


def _runner(
    model: ModelConfig, config: EngineConfig, params: dict[str, Any], setup: Setup
) -> ModelRunner:
    """A runner that compiles only the programs which are timed."""
    runner = ModelRunner(model, config, params)
    most = None if setup.is_smoke else config.num_slots
    keys = [
        key
        for key in runner.program_keys()
        if key[0] != "sample" or key[1] == "greedy" or key[2] == most
    ]
    runner.program_keys = lambda: keys  # type: ignore[method-assign]
    return runner
