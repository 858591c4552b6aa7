"""Says before a start what an engine will do on a device: memory, buckets, floors.

    python -m headrace.scripts.preflight --config=llama3_1_8b --target=h200

Runs on any machine. The numbers are those of the engine's own start, held against the
compiled programs where their compiler is installed (gpu_compile.py lists what it needs;
`--nocompile` does without). Times are a model, see preflight_model.py. Prints tables,
then one JSON line; refuses, with exit code 1, what cannot fit, and names the nearest
thing that does.
"""

import json
import os
from typing import Any

from absl import app, flags

from headrace.engine.sizing import DeviceFacts
from headrace.scripts import engine_flags, gpu_compile
from headrace.scripts.preflight_engine import Preflight
from headrace.scripts.preflight_model import full_target_name, gpu_facts

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "target",
    None,
    "'cpu' for this machine, or a file of configs/gpu_targets/, such as h200_sxm; its "
    "beginning will do: h200.",
)
flags.DEFINE_integer("num_gpus", 1, "More than one comes with sharding.", lower_bound=1)
flags.DEFINE_alias("quant", "quantization")
flags.DEFINE_list(
    "lengths",
    None,
    "prompt:output in tokens: how many such requests run at a time, and their TTFT by "
    "the model. Default: a few that fit the context.",
)
flags.DEFINE_integer(
    "decode_context", 1024, "Tokens a row holds in the ITL model.", lower_bound=1
)
flags.DEFINE_boolean("compile", True, "Compile every program; otherwise estimate.")

_LENGTHS = (128, 128), (1024, 256), (8192, 512), (32768, 1024)
_INSTALL = (
    "pip install --no-deps jax-cuda12-plugin==V jax-cuda12-pjrt==V "
    "nvidia-cuda-nvcc-cu12, with V jax's version"
)


def request_lengths(texts: list[str] | None, longest: int) -> list[tuple[int, int]]:
    """What `--lengths` says: prompt and output tokens of requests.

    Args:
      texts: such as "1024:256"; None stands for a few that fit.
      longest: max_context_len.

    Raises:
      ValueError: not two numbers from 1 on, or longer than the context together.
    """
    if texts is None:
        fitting = [pair for pair in _LENGTHS if sum(pair) <= longest]
        return fitting or [(longest - longest // 2, longest // 2)]
    pairs = []
    for text in texts:
        prompt, _, output = text.partition(":")
        if not (prompt.isdecimal() and output.isdecimal()) or 0 in (
            pair := (int(prompt), int(output))
        ):
            raise ValueError(f"lengths wants prompt:output in tokens, got {text!r}")
        if sum(pair) > longest:
            raise ValueError(
                f"lengths {text}: {sum(pair)} tokens are more than max_context_len "
                f"{longest}"
            )
        pairs.append(pair)
    return pairs


def memory_table(facts: dict[str, Any]) -> str:
    """The plan, a line per part, for people."""
    memory = facts["memory"]
    how = "compiled" if memory["are_temps_compiled"] else "estimated"
    pages = f"KV pool, {facts['num_pages']} pages of {facts['page_size']} tokens"
    parts = [
        ("weights", "weights_bytes"),
        ("logits, slots, counts and biases", "state_bytes"),
        ("arguments and results of steps", "step_bytes"),
        (f"temporaries ({how})", "temp_bytes"),
        (pages, "pool_bytes"),
        ("left", "left_bytes"),
        (f"budget, {memory['memory_fraction']} of what is free", "budget_bytes"),
    ]
    lines = [f"{'memory of the device':<44}{'MB':>12}"]
    lines += [f"{name:<44}{memory[key] / 1e6:>12,.1f}" for name, key in parts]
    lines.append(
        f"at most {memory['fitting_pages']} pages fit; the pool takes a round number "
        "of them, and no more than is asked for or all slots need"
    )
    return "\n".join(lines)


def program_table(facts: dict[str, Any]) -> str:
    """A line per program, for people."""
    lines = [
        f"{'program':<22}{'s':>7}{'temp MB':>10}{'rows':>6}{'weights MB':>12}"
        f"{'KV MB':>10}{'model ITL ms':>14}{'model TTFT ms':>15}"
    ]
    for name, program in facts["programs"].items():
        cells = [
            (program["compile_s"], 7, 1, 1),
            (program["temp_bytes"], 10, 1e6, 1),
            (program.get("rows"), 6, 1, 0),
            (program.get("weight_bytes"), 12, 1e6, 1),
            (program.get("kv_bytes"), 10, 1e6, 1),
            (program.get("model_itl_ms"), 14, 1, 2),
            (program.get("model_ttft_ms"), 15, 1, 2),
        ]
        lines.append(f"{name:<22}" + "".join(_cell(*cell) for cell in cells))
    return "\n".join(lines)


def length_table(facts: dict[str, Any]) -> str:
    """A line per length of `--lengths`, for people."""
    lines = [
        f"{'prompt':>8}{'output':>8}{'pages each':>12}{'at the same time':>18}"
        f"{'model TTFT ms':>15}"
    ]
    for length in facts["lengths"]:
        lines.append(
            f"{length['prompt']:>8}{length['output']:>8}{length['pages']:>12}"
            f"{length['requests']:>18}{_cell(length['model_ttft_ms'], 15, 1, 2)}"
        )
    return "\n".join(lines)


def _cell(value: float | None, width: int, unit: float, digits: int) -> str:
    if value is None:
        return f"{'-':>{width}}"
    return f"{value / unit:>{width},.{digits}f}"


def _device() -> tuple[DeviceFacts, gpu_compile.Target | None]:
    """The flags' device; comes before the process uses jax."""
    if FLAGS.target == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        from headrace.engine.device_facts import device_facts

        return device_facts(), None
    target = gpu_compile.read_target(full_target_name(FLAGS.target or ""))
    if FLAGS.compile:
        gpu_compile.set_environment()
    return gpu_facts(target), target


def _refuse_flags() -> None:
    if FLAGS.num_gpus > 1:
        raise NotImplementedError(
            f"--num_gpus={FLAGS.num_gpus}: one GPU so far; more come with sharding"
        )
    if FLAGS.config is None or FLAGS.model is not None:
        raise ValueError("preflight takes --config, and no --model")


def run() -> int:
    """Returns the exit code."""
    _refuse_flags()
    model, engine = engine_flags.engine_settings()
    assert model is not None
    device, target = _device()
    name = target.name if target else "this machine's CPU"
    print(f"{FLAGS.config} on {name}, {device.free_bytes:,} bytes free")
    flight = Preflight(model, engine, device, target, context=FLAGS.decode_context)
    assert flight.config.max_context_len
    lengths = request_lengths(FLAGS.lengths, flight.config.max_context_len)
    if FLAGS.compile:
        flight.compile()
    else:
        flight.estimate()
    facts = {"config": FLAGS.config, "num_gpus": FLAGS.num_gpus}
    facts |= flight.facts(lengths)
    _print(facts, flight.no_compiler)
    return 0


def _print(facts: dict[str, Any], no_compiler: str | None) -> None:
    memory = facts["memory"]
    weights = facts["quantization"] or facts["param_dtype"]
    print(
        f"max_context_len {facts['max_context_len']}, num_slots {facts['num_slots']}, "
        f"{weights} weights, {facts['kv_dtype']} pages\n"
        f"decode buckets {facts['decode_batch_sizes']}, prefill shapes "
        f"{facts['prefill_shapes']}\n"
    )
    print(memory_table(facts), end="\n\n")
    if no_compiler is not None:
        print(
            "temporaries are estimated: no compiler for GPUs here; "
            f"{_INSTALL}\n({no_compiler})\n"
        )
    elif not memory["are_temps_compiled"]:
        print("temporaries are estimated: --nocompile\n")
    print(program_table(facts))
    if memory["are_temps_compiled"]:
        print(f"compiled in {facts['compile_s']:.0f} s on this machine, one at a time")
    print()
    print(length_table(facts), end="\n\n")
    if facts["bytes_per_s"] is None:
        print("no model of time: this machine's bandwidth is not known")
    else:
        print(
            "model: floors, bytes over "
            f"{facts['bytes_per_s'] / 1e12:.2f} TB/s or products over "
            f"{facts['flops_per_s'] / 1e12:.0f} TFLOP/s (vendor's figures); no GPU "
            f"ran. ITL: rows of {facts['decode_context']} tokens"
        )
    print(json.dumps(facts))


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
