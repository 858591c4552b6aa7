"""Compiles the sample programs for a GPU that is not there, and says what they hold.

    python -m headrace.scripts.compile_for_gpu --gpu_target=h100_sxm

Needs, besides jax, `pip install --no-deps jax-cuda12-plugin==V jax-cuda12-pjrt==V
nvidia-cuda-nvcc-cu12` with V the version of jax: 600 MB. Prints the temporary memory of
each program, then one JSON line. Exits with 1 where a program sorts the vocabulary, or
has a loop whose length only the data tell: there a GPU waits for the host.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from absl import app, flags

from headrace.configs.schema import EngineConfig

FLAGS = flags.FLAGS

_TARGETS = pathlib.Path(__file__).parents[1] / "configs" / "gpu_targets"

flags.DEFINE_enum(
    "gpu_target",
    "h100_sxm",
    sorted(path.stem for path in _TARGETS.glob("*.textproto")),
    "Name of a file in configs/gpu_targets/. One process compiles for one target.",
)
flags.DEFINE_integer("vocab_size", 128256, "Ids per row.", lower_bound=2)
flags.DEFINE_integer("sample_rows", 32, "Rows of the programs.", lower_bound=1)

# A sort as wide as this is one of the vocabulary.
_WIDE = 1024
_SORT = re.compile(r"=\s*(\S.*?)\s+sort\(")
_SORTING_CALL = re.compile(r'custom_call_target="[^"]*(?:[Ss]ort|[Tt]op_?[Kk])[^"]*"')


def compile_for_gpu(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    target: str,
    donated: tuple[int, ...] = (),
) -> Any:
    """A compiled program of one GPU, with its `as_text()` and `memory_analysis()`.

    Args:
      function: to be compiled.
      args: arrays, or their shapes.
      target: name of a file in configs/gpu_targets/.
      donated: places of `args` whose memory the results may take.

    Raises:
      NotImplementedError: the compiler for GPUs is not installed.
    """
    # No device is there to time candidates on, nor to run anything.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=(_TARGETS / f"{target}.textproto").read_text("utf-8"),
            topology="1x1x1",
        )
    except Exception as error:  # what jax raises differs by version
        raise NotImplementedError(f"no compiler for GPUs here: {error}") from error
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("one",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    jitted = jax.jit(function, donate_argnums=donated)
    return jitted.lower(*jax.tree.map(placed, args)).compile()


def wide_sorts(hlo: str) -> list[str]:
    """The lines of an optimized program that sort something as wide as a vocabulary."""
    found = []
    for line in hlo.splitlines():
        sort = _SORT.search(line)
        if sort:
            sizes = re.findall(r"\w+\[([\d,]+)\]", sort[1])
            numbers = [int(n) for size in sizes for n in size.split(",")]
            if max(numbers, default=0) < _WIDE:
                continue
        if sort or _SORTING_CALL.search(line):
            found.append(line.strip())
    return found


def open_loops(hlo: str) -> list[str]:
    """The `while` lines of an optimized program that have no known number of turns."""
    loops = [line.strip() for line in hlo.splitlines() if re.search(r"\bwhile\(", line)]
    return [line for line in loops if "known_trip_count" not in line]


def sample_programs(vocab_size: int, num_rows: int) -> dict[str, Any]:
    """The sample programs of an engine of that size, by name; no array is made."""
    import jax
    import jax.numpy as jnp

    from headrace.engine.processors import empty_extras
    from headrace.engine.programs import (
        VARIANTS,
        Operands,
        describe,
        layout_of,
        program_name,
    )
    from headrace.engine.sampling_params import num_top
    from headrace.engine.slots import empty_slots

    config = EngineConfig(
        num_slots=num_rows,
        decode_batch_sizes=(num_rows,),
        prefill_shapes=((1, 64),),
        max_context_len=4096,
    )
    layout = layout_of(config)
    operands = Operands(
        params={},
        kv_cache=(),
        logits_BQV=jax.ShapeDtypeStruct((num_rows, 1, vocab_size), jnp.float32),
        slots=jax.eval_shape(lambda: empty_slots(layout)),
        extras=jax.eval_shape(
            lambda: empty_extras(num_rows, vocab_size, config.max_bad_words)
        ),
    )
    keys = [("sample", variant, num_rows) for variant in VARIANTS]
    options = {"model": None, "layout": layout, "num_top": num_top(config.max_logprobs)}
    return {program_name(key): describe(key, operands, **options) for key in keys}


def run() -> int:
    """Returns the exit code."""
    programs = sample_programs(FLAGS.vocab_size, FLAGS.sample_rows)
    import jax

    facts: dict[str, Any] = {
        "target": FLAGS.gpu_target,
        "jax": jax.__version__,
        "vocab_size": FLAGS.vocab_size,
        "programs": {},
    }
    is_sound = True
    for name, program in programs.items():
        compiled = compile_for_gpu(
            program.function,
            program.args,
            target=FLAGS.gpu_target,
            donated=program.donated,
        )
        text, memory = compiled.as_text(), compiled.memory_analysis()
        bad_lines = [*wide_sorts(text), *open_loops(text)]
        is_sound = is_sound and not bad_lines
        facts["programs"][name] = {
            "temp_bytes": memory.temp_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "wide_sorts": len(wide_sorts(text)),
            "open_loops": len(open_loops(text)),
            "fusions": len(re.findall(r"\bfusion\(", text)),
        }
        print(f"{name:24}{memory.temp_size_in_bytes / 1e6:10.1f} MB temporary")
        print("".join(f"  {line[:160]}\n" for line in bad_lines), end="")
    print(json.dumps(facts))
    return 0 if is_sound else 1


def main(_: list[str]) -> int:
    """Returns the exit code."""
    from headrace.scripts import engine_flags

    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
