r"""Measures a server as its users see it: TTFT, TPOT, ITL, throughput, goodput.

    python -m headrace.scripts.bench_serving --target=127.0.0.1:50051 \
        --workload=chat-short --num_requests=100 --max_concurrency=8
    python -m headrace.scripts.bench_serving --http=http://127.0.0.1:8000 \
        --workload=online --goodput=ttft:500,tpot:50 --plots=pictures

--target is a server of ours (gRPC), --http any with OpenAI's /v1/completions; with
neither an engine is built in this process, by the flags of the other scripts.

Requests come all at once, or as --request_rate, --trace or the times in the workload
say; --max_concurrency bounds those under way (alone: a closed loop). They are greedy
and run to their full length. Prints vllm bench serve's table with what the server tells
of itself below it, then one JSON line. A failed request makes the exit code 1.
"""

import asyncio
import dataclasses
import json
import os
import sys
from typing import Any

from absl import flags

from headrace.client import Tls
from headrace.scripts import engine_flags, serving_workloads
from headrace.scripts.serving_http import HttpTarget
from headrace.scripts.serving_metrics import parse_goodput
from headrace.scripts.serving_plots import Plots
from headrace.scripts.serving_report import remarks, table
from headrace.scripts.serving_run import Plan, measure
from headrace.scripts.serving_targets import EngineTarget, GrpcTarget, Target
from headrace.scripts.serving_workloads import Shape

# Own flags: absl's global ones are shared by all scripts that a process imports.
FLAGS = flags.FlagValues()


def _define(kind: Any, name: str, default: Any, told: str, **options: Any) -> None:
    kind(name, default, told, flag_values=FLAGS, **options)


_STRING, _INT = flags.DEFINE_string, flags.DEFINE_integer
_FLOAT, _BOOL = flags.DEFINE_float, flags.DEFINE_boolean
_define(_STRING, "target", None, "host:port of a gRPC server of ours.")
_define(_STRING, "http", None, "URL of an OpenAI-compatible server; needs httpx.")
_define(_STRING, "http_model", None, "Model to ask for. Default: the first listed.")
_define(_STRING, "key", None, "Bearer key. Default: the environment's HEADRACE_KEY.")
_define(_BOOL, "tls", False, "gRPC over TLS; any of the --tls_ flags says so, too.")
_define(_STRING, "tls_ca", None, "PEM file that signed the server's certificate.")
_define(_STRING, "tls_cert", None, "PEM file: the client's certificate (gRPC).")
_define(_STRING, "tls_key", None, "PEM file: its private key (gRPC).")
_define(_STRING, "tls_server_name", None, "Name on the certificate (gRPC).")
_define(_STRING, "metrics_url", None, "Default: URL of --http + /metrics.")
_define(
    _STRING, "workload", "chat-short",
    f"One of {', '.join(serving_workloads.SYNTHETIC)}; prompt:output in tokens; a "
    ".jsonl file, or a name in scripts/workloads/.",
)  # fmt: skip
_define(_STRING, "trace", None, "JSONL file: requests with their times, replayed.")
_define(_INT, "num_requests", None, "Default: all of a file, else 100.", lower_bound=1)
_define(_INT, "workload_seed", 0, "Of prompts, lengths and times.", lower_bound=0)
_define(_INT, "input_len", None, "Prompt tokens of random, shared-prefix.")
_define(_INT, "output_len", None, "Output tokens of random, shared-prefix.")
_define(_FLOAT, "range_ratio", 0.0, "random: lengths from (1 - r) to (1 + r) times.")
_define(_INT, "num_prefixes", 8, "shared-prefix: how many.")
_define(_INT, "prefix_len", 256, "shared-prefix: tokens of each.")
_define(_INT, "vocab_size", None, "Of the model, where the server does not tell it.")
_define(_INT, "max_concurrency", None, "Most requests under way.", lower_bound=1)
_define(_FLOAT, "request_rate", None, "Requests per second; inf: all at once.")
_define(_FLOAT, "burstiness", 1.0, "Shape of Gamma gaps: 1 is Poisson, less is bursty.")
_define(_BOOL, "ignore_eos", True, "Outputs have their full length.")
_define(_INT, "num_warmups", 1, "Requests before the run, not counted.", lower_bound=0)
_define(_FLOAT, "request_timeout_s", 3600.0, "Of one request.", lower_bound=0.001)
_define(
    _FLOAT, "watch_s", 1.0, "Seconds between looks at the KV cache.", lower_bound=0.01
)
_define(_STRING, "goodput", None, "Such as ttft:500,tpot:50,e2el:5000, in ms.")
_define(_STRING, "plots", None, "Folder for PNG pictures; needs matplotlib.")
_define(_STRING, "out", None, "File that the JSON line is appended to.")
# The engine's flags, the very objects, so that reading them here sets them there.
for _flag in flags.FLAGS.flags_by_module_dict()[engine_flags.__name__]:
    FLAGS[_flag.name] = _flag
    FLAGS.register_flag_by_module(engine_flags.__name__, _flag)  # for --help
FLAGS["verbosity"] = flags.FLAGS["verbosity"]


def make_target() -> Target:
    """What the flags say the requests are sent to.

    Raises:
      ValueError: flags that do not go together, or a package that is missing.
    """
    key = FLAGS.key or os.environ.get("HEADRACE_KEY")
    if FLAGS.target and FLAGS.http:
        raise ValueError("target and http must not both be given")
    if FLAGS.http:
        return HttpTarget(
            FLAGS.http, model=FLAGS.http_model, key=key, ca=FLAGS.tls_ca,
            ignore_eos=FLAGS.ignore_eos, metrics_url=FLAGS.metrics_url,
        )  # fmt: skip
    if FLAGS.target:
        names = ("ca", "cert", "key", "server_name")
        given = {name: FLAGS[f"tls_{name}"].value for name in names}
        tls = Tls(**given) if FLAGS.tls or any(given.values()) else None
        return GrpcTarget(
            FLAGS.target, key=key, tls=tls, ignore_eos=FLAGS.ignore_eos,
            metrics_url=FLAGS.metrics_url,
        )  # fmt: skip
    model = FLAGS.model or FLAGS.config or engine_flags.DEFAULT_MODEL
    return EngineTarget(
        engine_flags.build_llm(), model=model, ignore_eos=FLAGS.ignore_eos
    )


def make_plan() -> Plan:
    """The flags as a plan.

    Raises:
      ValueError: a value out of its range, or flags that do not go together.
    """
    shape = {field.name: FLAGS[field.name].value for field in dataclasses.fields(Shape)}
    names = {field.name for field in dataclasses.fields(Plan)} - {"shape", "limits_ms"}
    return Plan(
        shape=Shape(**shape),
        limits_ms=parse_goodput(FLAGS.goodput),
        **{name: FLAGS[name].value for name in names},
    )


async def run_async() -> int:
    """Measures, prints and writes; returns the exit code.

    Raises:
      ValueError, OSError: what cannot be run, before anything is sent.
    """
    plan = make_plan()
    plots = None if FLAGS.plots is None else Plots(FLAGS.plots)
    target = make_target()
    try:
        records, line, messages = await measure(target, plan)
    finally:
        await target.close()
    print(table(line))
    for remark in remarks(line, messages):
        print(remark)
    for path in [] if plots is None else plots.write(records):
        print(f"wrote {path}")
    text = json.dumps(line)
    if FLAGS.out is not None:
        with open(FLAGS.out, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text, flush=True)
    return 1 if line["failed"] else 0


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused or failed."""
    if {"--help", "-h", "--helpshort"} & set(argv[1:]):
        print(__doc__, FLAGS.get_help(), sep="\n")
        return 0
    try:
        words = FLAGS(argv)[1:]
        if words:
            raise flags.Error(f"only flags are taken, got {words}")
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    flags.FLAGS.mark_as_parsed()
    return engine_flags.exit_code(lambda: asyncio.run(run_async()))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
