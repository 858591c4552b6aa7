"""The converter as a program: what it writes, and how it refuses."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.orbax_store import save_store
from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.configs.quantization import parse_scheme


def run(*args):
    command = [sys.executable, "-m", "headrace.scripts.convert_checkpoint", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_store_is_written_and_refused_the_second_time(tiny_checkpoint, tmp_path):
    save_store(tmp_path / "a", tiny_checkpoint)
    flags = [f"--model={tmp_path / 'a'}", f"--out={tmp_path / 'b'}"]
    first = run(*flags, "--dtype=bfloat16")
    assert first.returncode == 0, first.stderr
    found = load_checkpoint(tmp_path / "b", dtype="bfloat16")
    assert found.config == tiny_checkpoint.config
    for ours, theirs in zip(
        jax.tree.leaves(found.params),
        jax.tree.leaves(tiny_checkpoint.params),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs.astype("bfloat16"))
    second = run(*flags)
    assert second.returncode == 1
    (line,) = second.stderr.splitlines()
    assert line.startswith("error: ") and "exists already" in line


def test_weights_are_rounded_and_stay_so(tiny_checkpoint, tmp_path):
    save_store(tmp_path / "a", tiny_checkpoint)
    flags = [f"--model={tmp_path / 'a'}", f"--out={tmp_path / 'b'}"]
    done = run(*flags, "--quantization=int4-g32-z")
    assert done.returncode == 0, done.stderr
    assert "as int4-g32-z and float32" in done.stdout
    rounding = Rounding(scheme=parse_scheme("int4-g32-z"), skip=("embedding", "head"))
    wanted = round_checkpoint(tiny_checkpoint, rounding)
    found = load_checkpoint(tmp_path / "b")
    assert found.quantization == "int4-g32-z"
    assert jax.tree.structure(found.params) == jax.tree.structure(wanted.params)
    pairs = zip(*(jax.tree.leaves(c.params) for c in (found, wanted)), strict=True)
    assert all(a.dtype == b.dtype and (a == b).all() for a, b in pairs)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model=nope", "--out=x", "--quantization=int3"], "quantization must be"),
        (["--model=nope", "--out=x"], "error: no model 'nope'"),
        (["--model=nope"], "--out"),
        (["--model=nope", "--out=x", "--dtype=int3"], "--dtype"),
    ],
)
def test_refusal_exits_non_zero_with_its_reason(flags, message):
    done = run(*flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
