"""Compiles an engine's steps for a GPU that is not there; fails on what is amiss.

    python -m headrace.scripts.check_gpu_compile --config=llama3_1_8b \\
        --gpu_target=h200_sxm --expect_kernel=paged_decode

What it needs is in gpu_compile.py, what it fails on in gpu_rules.py. Prints a table,
then one JSON line. No GPU runs anything: microseconds are a model, bytes over
bandwidth.
"""

import collections
import dataclasses
import json
from typing import Any

from absl import app, flags

from headrace.scripts import engine_flags, gpu_compile, gpu_rules, hlo_traffic
from headrace.scripts.gpu_compile import Compiled, PtxasKernel, Target
from headrace.scripts.gpu_kernels import kernel_programs
from headrace.scripts.gpu_programs import GENERATING, StepSizes, step_programs
from headrace.scripts.gpu_rules import Fault
from headrace.scripts.gpu_table import table
from headrace.scripts.hlo_flow import kernels
from headrace.scripts.hlo_text import Instruction, Module, parse_module

FLAGS = flags.FLAGS

flags.DEFINE_enum(
    "gpu_target",
    "h200_sxm",
    gpu_compile.target_names(),
    "Name of a file in configs/gpu_targets/. One process compiles for one target.",
)
flags.DEFINE_integer("num_layers", 4, "Of the model that is compiled.", lower_bound=1)
flags.DEFINE_integer("rows", 64, "Requests that decode together.", lower_bound=1)
flags.DEFINE_integer("context", 1024, "Tokens that each of them holds.", lower_bound=2)
flags.DEFINE_integer("chunk", 512, "Prompt tokens of a prefill call.", lower_bound=8)
flags.DEFINE_multi_string(
    "expect_kernel", [], "Fails if no program calls it in each layer. May be repeated."
)
flags.DEFINE_float(
    "max_traffic",
    gpu_rules.MAX_TRAFFIC,
    "Bytes moved over the floor in decode; activations weigh more in a small model.",
    lower_bound=1.0,
)
flags.DEFINE_integer(
    "max_kernels",
    gpu_rules.MAX_KERNELS_PER_LAYER,
    "In a layer of decode; a batch of one row has more.",
    lower_bound=1,
)
flags.DEFINE_list(
    "programs",
    ["decode", "verify", "prefill", "sample"],
    "Kinds of programs to compile.",
)
flags.DEFINE_bool(
    "kernels", False, "Instead of steps every kernel at every tuned shape, alone."
)


class Gate:
    """What has been compiled so far, and what is wrong with it.

    Args:
      target: the GPU.
      sizes: of the step.
    """

    def __init__(self, target: Target, sizes: StepSizes) -> None:
        self.target, self.sizes = target, sizes
        self.programs: dict[str, dict[str, Any]] = {}
        self.ptxas: list[PtxasKernel] = []
        self.faults: list[tuple[str, Fault]] = []
        self._calls: dict[str, list[Instruction]] = collections.defaultdict(list)

    def add(self, name: str, kind: str, program: Any) -> None:
        """Compiles a program and notes its facts and faults."""
        try:
            compiled = gpu_compile.compile_for_gpu(
                program.function,
                program.args,
                target=self.target,
                donated=program.donated,
            )
        except gpu_compile.CompileError as error:
            reason = " ".join(str(error).split())[:300]
            self.faults.append((name, Fault("compiler's error", reason, "none")))
            return
        module = parse_module(compiled.text)
        seen = gpu_compile.ptxas_kernels(compiled.log)
        calls = gpu_rules.mosaic_kernels(module)
        self.ptxas += seen
        for kernel, instructions in calls.items():
            self._calls[kernel] += instructions
        faults = [*gpu_rules.spills(seen), *gpu_rules.serialized(compiled.log)]
        if kind == "kernel":
            said = ", ".join(f"{k.name} {k.registers} registers" for k in seen)
            print(f"{name}: {said or 'seen before'}")
            self.faults += [(name, fault) for fault in faults]
            return
        facts = self._facts(compiled, module, kind)
        self.programs[name] = facts
        faults += [
            *gpu_rules.host_returns(compiled.thunks),
            *gpu_rules.wide_sorts(module),
            *gpu_rules.large_temporary(
                compiled.temp_bytes, self.sizes.temporary_limits(kind)
            ),
        ]
        if kind != "sample":
            faults += self._of_forward(compiled, module, kind, program.args)
        if kind in GENERATING:
            faults += self._of_decode(module, facts)
        self.faults += [(name, fault) for fault in faults]

    def _of_forward(
        self, compiled: Compiled, module: Module, kind: str, args: tuple[Any, ...]
    ) -> list[Fault]:
        import jax

        def num_bytes(arrays: Any) -> int:
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))

        sizes = self.sizes
        weights, pools = map(jax.tree.leaves, args[:2])
        numbers = {"params": len(weights), "kv_cache": len(pools)}
        return [
            *gpu_rules.small_alias(compiled.alias_bytes, num_bytes(args[1:3])),
            *gpu_rules.odd_arguments(
                compiled.argument_bytes, num_bytes(args[1:]), sizes.weights_bytes
            ),
            *gpu_rules.wide_weights(module),
            *gpu_rules.lost_arguments(module, numbers),
            *gpu_rules.weight_copies(module),
            *gpu_rules.kv_copies(module, sizes.live_elements(kind)),
        ]

    def _of_decode(self, module: Module, facts: dict[str, Any]) -> list[Fault]:
        faults = gpu_rules.repeated_weights(module, self.target.resident)
        # Plain XLA has more kernels, and a loop whose turns the program does not tell.
        if facts["moved_bytes"] is not None:
            faults += gpu_rules.many_kernels(
                facts["kernels_per_layer"], FLAGS.max_kernels
            )
            floor_bytes = facts["floor_bytes"] + facts["kv_bytes"]
            faults += gpu_rules.heavy_traffic(
                facts["moved_bytes"], floor_bytes, FLAGS.max_traffic
            )
            faults += gpu_rules.heavy_reads(facts["all_read_bytes"], floor_bytes)
        return faults

    def _facts(self, compiled: Compiled, module: Module, kind: str) -> dict[str, Any]:
        sizes, kv_bytes = self.sizes, self.sizes.kv_bytes(kind)
        floor_bytes, read, moved, per_layer = sizes.floor_bytes(kind), None, 0, None
        mosaic = gpu_rules.mosaic_kernels(module)
        if kind != "sample":
            per_layer = gpu_rules.kernels_per_layer(module, sizes.model.num_layers)
            pools = gpu_rules.program_arguments(module, "kv_cache")
            traffic = hlo_traffic.traffic(
                module,
                elsewhere={pool.leaves[0] for pool in pools},
                resident=self.target.resident,
            )
            read = sizes.loaded_kv_bytes(kind) + traffic.read
            moved = read + traffic.written
        has_kernels = any("paged" in name for name in mosaic)
        microseconds = 1e6 / self.target.bytes_per_s
        others = collections.Counter(
            i.target
            for i in module.instructions
            if i.target and not i.target.startswith("mosaic_gpu")
        )
        return {
            "seconds": round(compiled.seconds, 2),
            "argument_bytes": compiled.argument_bytes,
            "temp_bytes": compiled.temp_bytes,
            "alias_bytes": compiled.alias_bytes,
            "kernels": sum(times for _, times in kernels(module)),
            "kernels_per_layer": per_layer,
            "attention": "Mosaic kernels" if has_kernels else "plain XLA",
            "custom_calls": dict(others),
            "mosaic": {name: len(calls) for name, calls in mosaic.items()},
            "weight_passes": hlo_traffic.most_passes(module, self.target.resident),
            "read_bytes": gpu_rules.bytes_read(
                module, "logits_BQV" if kind == "sample" else "params"
            ),
            "floor_bytes": floor_bytes,
            "kv_bytes": kv_bytes,
            "all_read_bytes": read if has_kernels else None,
            "moved_bytes": moved if has_kernels else None,
            "model_us": round(moved * microseconds, 1) if has_kernels else None,
            "model_floor_us": round((floor_bytes + kv_bytes) * microseconds, 1),
        }

    def finish(self, expected: list[str]) -> None:
        """Notes the faults that only all programs together show."""
        counts = [facts["mosaic"] for facts in self.programs.values()]
        num_layers = self.sizes.model.num_layers
        faults = [
            *gpu_rules.without_registers(self._calls, self.ptxas),
            *gpu_rules.missing_kernels(counts, expected, num_layers),
        ]
        self.faults += [("all programs", fault) for fault in faults]


def run() -> int:
    """Returns the exit code."""
    model, engine = engine_flags.engine_settings()
    if model is None or FLAGS.model is not None or FLAGS.num_slots is not None:
        raise ValueError("the gate takes --config, --rows; not --model, --num_slots")
    model = dataclasses.replace(model, num_layers=FLAGS.num_layers)
    sizes = StepSizes(
        model=model, rows=FLAGS.rows, context=FLAGS.context, chunk=FLAGS.chunk,
        engine=engine,
    )  # fmt: skip
    gpu_compile.set_environment()
    import jax

    from headrace.engine.programs import program_name

    target = gpu_compile.read_target(FLAGS.gpu_target)
    gate = Gate(target, sizes)
    print(
        f"{target.name}, jax {jax.__version__}, {FLAGS.config} with {model.num_layers} "
        f"layers, {engine.quantization or 'not quantized'}, {sizes.rows} rows of "
        f"{sizes.context} tokens, chunk of {sizes.chunk}\n"
        "MB. read: of weights (sample: logits), counted in the program; KV: computed, "
        "live tokens; moved: all that kernels read and write, with the KV that they "
        f"load; us: a model, bytes over {target.bytes_per_s / 1e12:.2f} TB/s\n"
    )
    if FLAGS.kernels:
        for name, program in kernel_programs().items():
            gate.add(name, "kernel", program)
    else:
        for key, program in step_programs(sizes, engine).items():
            if key[0] in FLAGS.programs:
                gate.add(program_name(key), key[0], program)
    gate.finish(FLAGS.expect_kernel)
    print(table(gate.programs, gate.ptxas))
    print("".join(f"{fault.line(name)}\n" for name, fault in gate.faults), end="")
    facts = {
        "target": target.name,
        "jax": jax.__version__,
        "config": FLAGS.config,
        **{name: getattr(sizes, name) for name in ("rows", "context", "chunk")},
        "quantization": engine.quantization,
        "num_layers": model.num_layers,
        "programs": gate.programs,
        "ptxas": [dataclasses.asdict(kernel) for kernel in gate.ptxas],
        "faults": [[name, *fault] for name, fault in gate.faults],
    }
    print(json.dumps(facts))
    return 1 if gate.faults else 0


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
