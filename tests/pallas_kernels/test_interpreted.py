"""Mosaic kernels in the interpreter, each file in a process with threads enough.

A warpgroup that waits holds a thread of XLA's pool while it is interpreted. With as
many threads as cores, two on a small machine, a kernel of three warpgroups may wait for
ever. By hand: `NPROC=6 python -m pytest tests/pallas_kernels/interpreted_decode.py`.
"""

import os
import pathlib
import subprocess
import sys

import pytest

_THREADS = 6


@pytest.mark.parametrize(
    "name",
    ["interpreted_decode", "interpreted_prefill", "interpreted_quantized_matmul"],
)
def test_kernels_pass_in_the_interpreter(name):
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    threads = max(_THREADS, os.cpu_count() or 1)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(path)],
        env=os.environ | {"NPROC": str(threads)},
        cwd=path.parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout
