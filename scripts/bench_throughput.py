"""Throughput and latency of workload files, one JSON line per workload.

    python -m headrace.scripts.bench_throughput --workload=latency --workload=offline
    python -m headrace.scripts.bench_throughput --workload=offline --policy=static

`latency` sends one request at a time, all other workloads send all requests at once.
Every request is greedy and runs to its max_tokens. Times to first token count from
the start of the run, in `latency` from the request's own start. A table for people
comes first; the field names of the JSON lines are shared with the runners of other
engines.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

import headrace
from headrace.engine.num_threads import num_threads
from headrace.engine.outputs import RequestOutput
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import engine_flags
from headrace.scripts.machine_load import Monitor

FLAGS = flags.FLAGS

WORKLOADS = pathlib.Path(__file__).parent / "workloads"

flags.DEFINE_multi_string(
    "workload",
    ["latency", "offline"],
    "A .jsonl file, or a name in scripts/workloads/. May be repeated.",
)
flags.DEFINE_integer("limit", None, "Only this many requests.", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one file.

    Attributes:
      name: the file's stem.
      prompts: token ids of each request.
      max_tokens: output tokens of each request.
    """

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def is_one_by_one(self) -> bool:
        """Whether a request starts only when the one before it has ended."""
        return self.name == "latency"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A workload's outputs and when each request started, in `perf_counter` seconds."""

    outputs: list[RequestOutput]
    starts_s: list[float]
    monitor: Monitor


def workload_path(name: str, drawn: Sequence[str] = ()) -> pathlib.Path:
    """Finds a workload's file.

    Args:
      name: a path ending in .jsonl, or a name in scripts/workloads/.
      drawn: what other workloads there are, for the complaint.

    Raises:
      ValueError: no such workload.
    """
    if name.endswith(".jsonl"):
        return pathlib.Path(name)
    known = sorted(file.stem for file in WORKLOADS.glob("*.jsonl"))
    if name not in known:
        raise ValueError(
            f"--workload must be a .jsonl file or one of {[*drawn, *known]}, "
            f"got {name!r}"
        )
    return WORKLOADS / f"{name}.jsonl"


def load_workload(name: str, limit: int | None = None) -> Workload:
    """Reads a workload file.

    Args:
      name: a path ending in .jsonl, or a name in scripts/workloads/.
      limit: only the first requests.

    Raises:
      ValueError: no such workload, or one with arrival times.
    """
    path = workload_path(name)
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()][:limit]
    if not rows:
        raise ValueError(f"{path} holds no request")
    if any(row.get("arrival_s") for row in rows):
        raise ValueError(
            f"workload {path.stem!r} has arrival times; bench_serving keeps to them"
        )
    return Workload(
        name=path.stem,
        prompts=[row["prompt_token_ids"] for row in rows],
        max_tokens=[row["max_tokens"] for row in rows],
    )


def fold_ids(workload: Workload, vocab_size: int) -> Workload:
    """Maps ids into a smaller vocabulary, for models with random weights."""
    prompts = [[i % vocab_size for i in ids] for ids in workload.prompts]
    return dataclasses.replace(workload, prompts=prompts)


def check_fits(workload: Workload, max_context_len: int) -> None:
    """Refuses a workload before any of it runs.

    Raises:
      ValueError: a request is longer than the engine's context.
    """
    lengths = map(len, workload.prompts)
    longest = max(a + b for a, b in zip(lengths, workload.max_tokens, strict=True))
    if longest > max_context_len:
        raise ValueError(
            f"workload {workload.name!r} has a request of {longest} tokens; "
            f"max_context_len is {max_context_len}"
        )


def warm_up(llm: Any) -> None:
    """One request of 64 + 4 tokens that shares no prefix with a workload."""
    ids = [(1000 + 37 * i) % llm.model_config.vocab_size for i in range(64)]
    llm.generate([ids], _params(4), use_tqdm=False)


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


def run_workload(llm: Any, workload: Workload) -> Run:
    """Runs all requests and checks that each gave all its tokens.

    Raises:
      ValueError: a request failed or ended early.
    """
    params = [_params(count) for count in workload.max_tokens]
    monitor = Monitor()
    monitor.start()
    begin_s = time.perf_counter()
    if workload.is_one_by_one:
        outputs, starts_s = [], []
        for ids, one in zip(workload.prompts, params, strict=True):
            starts_s.append(time.perf_counter())
            outputs += llm.generate([ids], one, use_tqdm=False)
    else:
        outputs = llm.generate(workload.prompts, params, use_tqdm=False)
        starts_s = [begin_s] * len(outputs)
    monitor.stop()
    for place, output in enumerate(outputs):
        count, wanted = len(output.outputs[0].token_ids), workload.max_tokens[place]
        if count != wanted:
            raise ValueError(
                f"request {place} of {workload.name!r} gave {count} tokens instead of "
                f"{wanted}: {output.error or output.outputs[0].finish_reason}"
            )
    return Run(outputs=outputs, starts_s=starts_s, monitor=monitor)


def report(run: Run, workload: Workload, facts: dict[str, Any]) -> dict[str, Any]:
    """The JSON line of one run.

    Args:
      run: outputs with their times.
      workload: what was run.
      facts: engine, version, model, dtype, load_s and further fields.
    """
    monitor, wall_s = run.monitor, run.monitor.wall_s
    ttft_ms, tpot_ms = [], []
    for start_s, output in zip(run.starts_s, run.outputs, strict=True):
        metrics = output.metrics
        ttft_ms.append((metrics.first_token_s - start_s) * 1e3)
        if metrics.num_output_tokens > 1:
            decode_s = metrics.finished_s - metrics.first_token_s
            tpot_ms.append(decode_s / (metrics.num_output_tokens - 1) * 1e3)
    num_in = sum(map(len, workload.prompts))
    num_out = sum(workload.max_tokens)
    facts = dict(facts)
    head = {name: facts.pop(name) for name in ("engine", "version", "model", "dtype")}
    return (
        head
        | {
            "workload": workload.name,
            "n_requests": len(workload.prompts),
            "prompt_tokens": num_in,
            "output_tokens": num_out,
            "wall_s": round(wall_s, 3),
            "output_tok_per_s": round(num_out / wall_s, 2),
            "total_tok_per_s": round((num_in + num_out) / wall_s, 2),
            "ttft_ms_p50": _percentile(ttft_ms, 50),
            "ttft_ms_p99": _percentile(ttft_ms, 99),
            "tpot_ms_p50": _percentile(tpot_ms, 50),
            "tpot_ms_p99": _percentile(tpot_ms, 99),
            "peak_rss_mb": round(monitor.peak_rss_bytes / 1e6),
            "load_s": round(facts.pop("load_s"), 2),
            "loadavg_before": round(monitor.load_before, 2),
            "own_cores_busy": round(monitor.own_cores, 2),
            "other_cores_busy": round(monitor.other_cores, 2),
        }
        | facts
    )


def _percentile(values: list[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 2) if values else None


def table(lines: list[dict[str, Any]]) -> str:
    """The main fields of the JSON lines, for people."""
    columns = {
        "workload": 15, "n_requests": 10, "output_tokens": 13, "wall_s": 9,
        "output_tok_per_s": 16, "ttft_ms_p50": 11, "tpot_ms_p50": 11,
        "tpot_ms_p99": 11, "peak_rss_mb": 11,
    }  # fmt: skip
    rows = [{name: name for name in columns}, *lines]
    return "\n".join(
        "  ".join(f"{row[name]!s:>{width}}" for name, width in columns.items())
        for row in rows
    )


def engine_facts(llm: Any, load_s: float) -> dict[str, Any]:
    """Fields of the JSON line that do not depend on the workload."""
    config = llm.engine_config
    weights = f"{FLAGS.config}-random-weights" if FLAGS.config else None
    model = FLAGS.model or weights or engine_flags.DEFAULT_MODEL
    return {
        "engine": "headrace",
        "version": f"{headrace.__version__}+jax{importlib.metadata.version('jax')}",
        "model": os.path.basename(os.path.normpath(model)),
        "dtype": config.param_dtype,
        "load_s": load_s,
        "threads": num_threads(),
        "slots": config.num_slots,
        "policy": config.policy,
        "numerics": config.numerics,
    }


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused or failed."""
    return engine_flags.exit_code(lambda: run(argv[1:]))


def run(words: list[str]) -> int:
    """Runs the workloads that the flags name.

    Raises:
      ValueError: an unknown, unfit or failed workload.
    """
    if words:
        raise ValueError(f"unknown arguments {words}; use --workload=NAME")
    workloads = [load_workload(name, FLAGS.limit) for name in FLAGS.workload]
    begin_s = time.perf_counter()
    llm = engine_flags.build_llm()
    for place, workload in enumerate(workloads):
        if llm.tokenizer is None:
            workload = fold_ids(workload, llm.model_config.vocab_size)
        check_fits(workload, llm.engine_config.max_context_len)
        workloads[place] = workload
    warm_up(llm)
    facts = engine_facts(llm, time.perf_counter() - begin_s)
    if FLAGS.verbosity >= 1:
        print(llm.ledger.table(), file=sys.stderr)
    lines = [report(run_workload(llm, w), w, facts) for w in workloads]
    print(table(lines))
    for line in lines:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    app.run(main)
