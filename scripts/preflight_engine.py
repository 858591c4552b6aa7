"""An engine on a device that may not be there: its settings, plan and programs.

All numbers come from what the engine itself does at start (engine/sizing.py,
engine/memory_plan.py). Knows nothing of flags and prints no table; preflight.py does.
jax is imported on first use.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine import memory_plan, memory_sizes, sizing
from headrace.engine.sizing import DeviceFacts
from headrace.scripts import gpu_compile
from headrace.scripts.preflight_model import DENSE_FLOPS, Floors

_SETTINGS = (
    "max_context_len", "num_slots", "num_pages", "page_size", "decode_batch_sizes",
    "prefill_shapes", "numerics", "param_dtype", "kv_dtype", "quantization",
    "memory_fraction", "host_kv_bytes",
)  # fmt: skip
_DERIVED = "budget_bytes", "pool_bytes", "used_bytes", "left_bytes", "fitting_pages"


@dataclasses.dataclass
class Program:
    """A program of the engine.

    Attributes:
      temp_bytes: compiled, or estimated.
      alias_bytes, seconds: None where it is not compiled.
    """

    key: tuple
    temp_bytes: int
    alias_bytes: int | None = None
    seconds: float | None = None


class Preflight:
    """One engine on one device, as its start would settle it.

    Args:
      model: its shapes.
      config: with sizes left open.
      device: its memory.
      target: the GPU; None for this machine's CPU.
      context: tokens that each decoding row holds in the ITL model.

    Raises:
      ValueError: it does not fit; the message says what does.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        device: DeviceFacts,
        target: gpu_compile.Target | None,
        *,
        context: int,
    ) -> None:
        self.model, self.device, self.target = model, device, target
        self.config = sizing.resolve(model, config, device)
        assert self.config.max_context_len
        self.context = min(context, self.config.max_context_len)
        self.plan = sizing.plan_of(model, self.config, device)
        self.floors = Floors(
            model=model,
            config=self.config,
            bytes_per_s=target.bytes_per_s if target else None,
            flops_per_s=DENSE_FLOPS[target.name] if target else None,
        )
        self.programs: dict[str, Program] = {}
        self.no_compiler: str | None = None

    def estimate(self) -> None:
        """Takes the estimates that the start takes, for every program."""
        from headrace.engine.programs import program_keys, program_name

        attention = self.device.attention
        can_move = memory_sizes.num_host_pages(self.model, self.config) > 0
        for key in program_keys(self.config, can_move=can_move):
            self.programs[program_name(key)] = Program(
                key,
                memory_sizes.program_temp_bytes(
                    key, self.model, self.config, attention
                ),
            )

    def compile(self) -> None:
        """Compiles every program, and holds them against the memory that is there.

        Raises:
          ValueError: they do not fit beside the pool, or one does not compile.
        """
        self.estimate()
        try:
            compiled = list(self._compiled())
        except NotImplementedError as error:
            if "no compiler for GPUs" not in str(error):
                raise
            self.no_compiler = str(error).splitlines()[0]
            return
        self.programs = dict(compiled)
        memory = {
            name: [program.temp_bytes, program.alias_bytes or 0]
            for name, program in compiled
        }
        self.plan = memory_plan.with_compiled(self.plan, memory)
        memory_plan.check_compiled(self.plan)

    def _compiled(self) -> Iterator[tuple[str, Program]]:
        from headrace.engine.programs import program_name
        from headrace.scripts.gpu_programs import engine_programs

        programs = engine_programs(self.model, self.config)
        for number, (key, program) in enumerate(programs.items(), 1):
            name = program_name(key)
            try:
                temp_bytes, alias_bytes, seconds = _compile(program, self.target)
            except gpu_compile.CompileError as error:
                raise ValueError(f"{name} does not compile: {error}") from error
            place = f"{number} of {len(programs)}"
            print(f"compiled {place}: {name}, {seconds:.1f} s", file=sys.stderr)
            yield name, Program(key, temp_bytes, alias_bytes, seconds)

    def facts(self, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Everything, JSON-ready.

        Args:
          lengths: of requests, prompt and output in tokens.
        """
        plan, floors = self.plan, self.floors
        return {
            "target": self.target.name if self.target else "cpu",
            **{name: getattr(self.config, name) for name in _SETTINGS},
            "memory": dataclasses.asdict(plan)
            | {name: getattr(plan, name) for name in _DERIVED},
            "bytes_per_s": floors.bytes_per_s,
            "flops_per_s": floors.flops_per_s,
            "decode_context": self.context,
            "compile_s": round(sum(p.seconds or 0 for p in self.programs.values()), 2),
            "programs": {n: self._program(p) for n, p in self.programs.items()},
            "lengths": [self._length(*pair) for pair in lengths],
        }

    def _program(self, program: Program) -> dict[str, Any]:
        """Of decode the bucket is full, or as full as the pool lets it be."""
        kind, floors = program.key[0], self.floors
        facts: dict[str, Any] = {
            "compile_s": program.seconds and round(program.seconds, 2),
            "temp_bytes": program.temp_bytes,
        }
        if kind == "decode":
            held = self.plan.concurrent(self.context, self.config.page_size)
            rows = min(program.key[1], held)
            return facts | {
                "rows": rows,
                "weight_bytes": floors.weight_bytes(rows),
                "kv_bytes": rows * self.context * floors.token_bytes,
                "model_itl_ms": floors.decode_ms(rows, self.context),
            }
        if kind == "prefill":
            rows, tokens = program.key[1]
            return facts | {
                "rows": rows,
                "weight_bytes": floors.weight_bytes(rows * tokens),
                "kv_bytes": rows * tokens * floors.token_bytes,
                "model_ttft_ms": floors.prefill_ms(rows, tokens),
            }
        return facts

    def _length(self, prompt: int, output: int) -> dict[str, Any]:
        size, slots = self.config.page_size, self.config.num_slots
        assert slots
        return {
            "prompt": prompt,
            "output": output,
            "pages": -(-(prompt + output) // size),
            "requests": min(slots, self.plan.concurrent(prompt + output, size)),
            "model_ttft_ms": self.floors.prompt_ms(prompt),
        }


def _compile(program: Any, target: gpu_compile.Target | None) -> tuple[int, int, float]:
    """Temporary and aliased bytes, and seconds."""
    import jax

    from headrace.engine.program_store import compile_fresh

    if target is not None:
        compiled = gpu_compile.compile_for_gpu(
            program.function, program.args, target=target, donated=program.donated
        )
        return compiled.temp_bytes, compiled.alias_bytes, compiled.seconds
    start = time.perf_counter()
    jitted = jax.jit(program.function, donate_argnums=program.donated)
    sizes = compile_fresh(jitted.lower(*program.args)).memory_analysis()
    assert sizes is not None
    seconds = time.perf_counter() - start
    return sizes.temp_size_in_bytes, sizes.alias_size_in_bytes, seconds
