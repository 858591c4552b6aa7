"""The server that trials run against: serve.py over an engine made for trouble.

    python -m headrace.scripts.trial_server --config=tiny --port=0 --http_port=0

Takes serve.py's flags. Its pool is too small for all requests, so some are preempted to
host memory. With --fixed_step_ms a clock stands in for the device (fixed_step.py).
"""

import asyncio

from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.scripts import engine_flags, serve
from headrace.scripts.verify_exactness import tight

FLAGS = flags.FLAGS

flags.DEFINE_float("fixed_step_ms", None, "A clock for a device: time of a step.")
flags.DEFINE_integer("tight_requests", 48, "The pool holds a third of so many.")


def run() -> int:
    """Serves until a signal; returns the exit code.

    Raises:
      ValueError, OSError: see `serve.check_options`.
    """
    options = serve.server_options()
    serve.check_options(options)
    from headrace.engine.serving.server import serve as run_server

    return asyncio.run(run_server(_llm(), options, announce=_announce))


def _llm() -> object:
    if FLAGS.fixed_step_ms is None:
        return engine_flags.build_llm(_small)
    from headrace.scripts.fixed_step import fixed_step_llm

    # Pages for every slot: who waits, waits for a slot.
    slots = FLAGS.num_slots or 32
    return fixed_step_llm(
        FLAGS.fixed_step_ms / 1e3,
        num_slots=slots,
        decode_batch_sizes=(slots,),
        num_pages=slots * 32 + 1,
        policy=FLAGS.policy or "fcfs",
        max_queued_requests=FLAGS.max_queued_requests,
        share_queue=serve.shares_queue(),
    )


def _small(engine: EngineConfig) -> EngineConfig:
    return serve.for_serving(tight(engine, FLAGS.tight_requests))


def _announce(line: str) -> None:
    print(line, flush=True)


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
