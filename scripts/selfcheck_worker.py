"""The process in which the parts of the self-check run; gpu_selfcheck.py starts it.

Takes one argument, the JSON of what `work` takes; writes lines and records.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from headrace.scripts import selfcheck_report, selfcheck_standins
from headrace.scripts.selfcheck_report import Part, Record, Roofs

# A worker leaves with it when the device is gone.
LOST = 3


def work(
    *,
    names: list[str],
    deadline_s: float,
    roofs: dict[str, float | None],
    seed: int,
    compares_options: bool,
) -> int:
    """Runs parts and writes records; the exit code.

    Args:
      names: of the parts.
      deadline_s: no part begins after it, in `time.time()` seconds.
      roofs: fields of `Roofs`, as far as they are known.
      seed: of everything random.
      compares_options: time a decode step with other compiler options, too.
    """
    set_environment()
    standins = selfcheck_standins.install()
    from headrace.scripts.selfcheck_device import Setup, describe_card

    device = describe_card() | {"standins": standins}
    Part("start", selfcheck_report.write_record).facts(**device)
    setup = Setup(
        seed=seed,
        is_smoke=device["platform"] != "gpu",
        compares_options=compares_options,
        roofs=Roofs(**roofs),
    )
    return run_parts(
        setup, names, deadline_s=deadline_s, write=selfcheck_report.write_record
    )


def set_environment() -> None:
    """Must come before the first `import jax`.

    An interpreted kernel holds a thread of XLA's pool for each warpgroup that waits.
    """
    os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))


def functions() -> dict[str, Callable[[Part, Any], Any]]:
    """What each part runs; imports jax."""
    from headrace.scripts import (
        selfcheck_bandwidth,
        selfcheck_bits,
        selfcheck_device,
        selfcheck_engine,
        selfcheck_kernels,
        selfcheck_quantized,
        selfcheck_step,
    )

    return {
        "card": selfcheck_device.card,
        "prefill_256": selfcheck_kernels.prefill_256,
        "decode": selfcheck_kernels.decode,
        "prefill": selfcheck_kernels.prefill,
        "bits": selfcheck_bits.bits,
        "bandwidth": selfcheck_bandwidth.bandwidth,
        "quantized": selfcheck_quantized.quantized,
        "engine": selfcheck_engine.engine,
        "step": selfcheck_step.step,
    }


def run_parts(
    setup: Any,
    names: list[str],
    *,
    deadline_s: float,
    write: Callable[[Record], None],
) -> int:
    """Runs parts in this process; `LOST` where the device was lost on the way.

    Args:
      setup: a `selfcheck_device.Setup`.
      names: of the parts.
      deadline_s: see `work`.
      write: takes each record.
    """
    known = functions()
    for name in names:
        part = Part(name, write, is_smoke=setup.is_smoke)
        if time.time() > deadline_s:
            part.say(selfcheck_report.OUT_OF_TIME)
            part.end(selfcheck_report.OUT_OF_TIME, 0.0)
            continue
        write({"part": name, "kind": "begin"})
        begin_s, error, is_lost = time.perf_counter(), None, False
        try:
            found = known[name](part, setup)
            if isinstance(found, Roofs):
                setup = dataclasses.replace(setup, roofs=found)
                part.facts(roofs=dataclasses.asdict(found))
        except Exception as caught:  # noqa: BLE001 - the other parts still run
            part.say(f"ERROR {caught!r}"[:400])
            error = "".join(traceback.format_exception(caught))[-2000:]
            is_lost = _is_lost(caught)
        status = selfcheck_report.FAILED if part.num_failed else selfcheck_report.OK
        status = selfcheck_report.ERROR if error else status
        part.end(status, round(time.perf_counter() - begin_s, 1), error)
        if is_lost:
            return LOST
    return 0


def _is_lost(caught: Exception) -> bool:
    """Whether the device computes no more after this."""
    from headrace.scripts.selfcheck_device import DeviceLost, require_device

    try:
        require_device()
    except DeviceLost:
        return True
    return isinstance(caught, DeviceLost)


if __name__ == "__main__":
    sys.exit(work(**json.loads(sys.argv[1])))
