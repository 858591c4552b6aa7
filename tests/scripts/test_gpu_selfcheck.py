"""The self-check as a smoke test, on a machine that lacks all but jax and flax."""

import json
import os
import subprocess
import sys

import pytest

from headrace.scripts import (
    gpu_selfcheck,
    selfcheck_kernels,
    selfcheck_quantized,
    selfcheck_report,
)
from headrace.scripts.selfcheck_device import Setup
from headrace.scripts.selfcheck_report import Part, Timing
from headrace.scripts.selfcheck_supervisor import PARTS, Supervisor

# What the machine may lack; the hook runs in every process that starts.
MISSING = (
    "jaxtyping", "ml_collections", "tokenizers", "llguidance", "gguf", "safetensors",
    "sentencepiece", "jinja2", "tqdm", "psutil", "pytest", "hypothesis", "jsonschema",
    "grpc", "prometheus_client", "starlette", "orbax.checkpoint",
)  # fmt: skip
HOOK = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        for missing in {MISSING!r}:
            if name == missing or name.startswith(missing + "."):
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def _run(folder, *flags):
    (folder / "sitecustomize.py").write_text(HOOK)
    root = os.environ.get("PYTHONPATH", "")
    return subprocess.run(
        [sys.executable, "-m", "headrace.scripts.gpu_selfcheck", *flags],
        env=os.environ | {"PYTHONPATH": f"{folder}:{root}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selfcheck")
    return _run(folder, f"--out={folder / 'out.json'}"), folder / "out.json"


def test_the_smoke_test_holds_without_most_requirements(smoke):
    done, out = smoke
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts == json.loads(out.read_text())
    assert facts["is_smoke"] and facts["exit_code"] == 0
    assert list(facts["parts"]) == list(PARTS)
    for part in facts["parts"].values():
        assert part["status"] == "ok"
        assert all(check["ok"] for check in part["checks"])
    assert "CPU, smoke test: times say nothing" in done.stdout


def test_a_cpu_claims_no_figure(smoke):
    facts = json.loads(smoke[0].stdout.splitlines()[-1])
    rows = [row for part in facts["parts"].values() for row in part["measures"]]
    assert len(rows) >= 5
    assert {(row["value"], row["share"]) for row in rows} == {(None, None)}


def test_kernels_are_held_against_the_truth_and_plain_xla(smoke):
    facts = json.loads(smoke[0].stdout.splitlines()[-1])
    for name in ("prefill_256", "decode", "prefill"):
        checks = facts["parts"][name]["checks"]
        assert checks and all(0 < check["error"] < 1e-2 for check in checks)
        assert all(check["error"] < 2 * check["plain_xla"] for check in checks)


def test_quantized_products_are_held_against_the_truth_and_by_their_bits(smoke):
    facts = json.loads(smoke[0].stdout.splitlines()[-1])
    part = facts["parts"]["quantized"]
    errors = [check["error"] for check in part["checks"] if "error" in check]
    assert len(errors) == 10 and all(0 < error < 1e-2 for error in errors)
    bits = [check["name"] for check in part["checks"] if "error" not in check]
    assert len(bits) == 3 and all("bits of a row" in name for name in bits)
    assert {row["name"].split(" by ")[0] for row in part["measures"]} == {
        "int4-g128", "int8", "fp8"
    }  # fmt: skip


@pytest.mark.parametrize(("times", "num_failed"), [(1.0, 0), (1.05, 4)])
def test_a_quantized_product_that_is_wrong_by_5_percent_fails(
    times, num_failed, monkeypatch
):
    real = selfcheck_quantized.product

    def planted(implementation, most_rows, is_smoke):
        multiply = real("xla", most_rows, is_smoke)
        factor = times if implementation == "mosaic_gpu" else 1.0
        return lambda *args: (multiply(*args) * factor).astype(args[2].dtype)

    monkeypatch.setattr(selfcheck_quantized, "product", planted)
    monkeypatch.delitem(selfcheck_quantized.SCHEMES, "fp8")
    part = Part("quantized", lambda record: None)
    selfcheck_quantized.quantized(part, Setup(is_smoke=True, seed=3))
    assert part.num_failed == num_failed


def test_a_quantized_product_whose_bits_follow_the_rows_fails(monkeypatch, capsys):
    real = selfcheck_quantized.product

    def planted(implementation, most_rows, is_smoke):
        multiply = real("xla", most_rows, is_smoke)

        def product(*args):
            out_RO = multiply(*args)
            least = abs(out_RO[0]).argmin()  # too little for the truth to notice
            factor = 1.02 if implementation == "mosaic_gpu" and len(out_RO) == 3 else 1
            return out_RO.at[0, least].multiply(factor)

        return product

    monkeypatch.setattr(selfcheck_quantized, "product", planted)
    monkeypatch.delitem(selfcheck_quantized.SCHEMES, "fp8")
    part = Part("quantized", lambda record: None)
    selfcheck_quantized.quantized(part, Setup(is_smoke=True, seed=3))
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert part.num_failed == len(failed) > 0
    assert all("bits of a row" in line for line in failed)


def test_goals_of_quantized_products_fall_with_the_rows():
    rows = (1, 8, 16, 64, 128, 256)
    goals = [selfcheck_quantized.goal("int4-g128", n) for n in rows]
    assert goals == [2.5, 2.5, 2.5, 2.0, None, 1.0]
    goals = [selfcheck_quantized.goal("fp8", n) for n in rows]
    assert goals == [1.8, 1.8, 1.8, 1.8, None, None]
    tried = [n for role in selfcheck_quantized.roles(False).values() for n in role]
    assert tuple(tried) == rows


def test_unknown_parts_are_refused():
    done = subprocess.run(
        [sys.executable, "-m", "headrace.scripts.gpu_selfcheck", "--parts=card,other"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "other" in done.stderr


def _worker(source):
    """A command like a worker's: `source` sees the names of the parts it is to run."""
    return lambda names, deadline_s, records: [
        sys.executable,
        "-u",
        "-c",
        f"names = {names!r}\nfrom headrace.scripts.selfcheck_report import *\n{source}",
    ]


def _supervised(source, names, *, deadline_s=2e10, limits_s=None):
    limits_s = limits_s or dict.fromkeys(names, 60.0)
    supervisor = Supervisor(_worker(source), deadline_s, limits_s)
    supervisor.run(names)
    return selfcheck_report.collect(supervisor.records)


WORKER = """
for name in names:
    part = Part(name, write_record)
    write_record({"part": name, "kind": "begin"})
    DEED
    part.check("it holds", True, error=0.1)
    part.end("ok", 1.0)
"""


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("if name == 'b': import os; os._exit(9)", "its process ended with 9"),
        ("if name == 'b': import time; time.sleep(99)", "hung"),
    ],
)
def test_a_part_that_crashes_or_hangs_costs_itself_alone(deed, why):
    limits_s = {"a": 60.0, "b": 6.0, "c": 60.0}
    source = WORKER.replace("DEED", deed)
    parts = _supervised(source, ["a", "b", "c"], limits_s=limits_s)
    assert {name: part["status"] for name, part in parts.items()} == {
        "a": "ok", "b": "error", "c": "ok"
    }  # fmt: skip
    assert why in parts["b"]["error"]
    assert selfcheck_report.exit_code(parts) == 1


def test_what_the_budget_leaves_out_is_named():
    parts = _supervised(WORKER.replace("DEED", ""), ["a", "b"], deadline_s=0.0)
    assert {part["status"] for part in parts.values()} == {"not run: out of time"}
    assert selfcheck_report.exit_code(parts) == 1
    assert "not run: out of time" in selfcheck_report.table(parts, title="t")


def test_a_check_that_fails_is_told_and_ends_with_1(capsys):
    records = []
    part = Part("bits", records.append)
    part.check("two runs", True)
    part.check("rows in other places", False, error=0.05)
    part.end("failed" if part.num_failed else "ok", 1.0)
    assert "FAIL rows in other places: error 0.05" in capsys.readouterr().out
    parts = selfcheck_report.collect(records)
    assert selfcheck_report.exit_code(parts) == 1
    assert "FAIL rows in other places" in selfcheck_report.table(parts, title="t")


def test_statistics_by_hand():
    timing = Timing.of([0.4, 0.2, 0.9], calls=2)
    assert (timing.best_s, timing.median_s) == (0.1, 0.2)
    assert selfcheck_report.share(3.0, 4.0) == 0.75
    assert selfcheck_report.share(None, 4.0) is selfcheck_report.share(1.0, 0) is None
    units = [(1.2e-5, "s"), (4.8e12, "B/s"), (None, "s"), (1.5, "s/s"), (2.0, "s")]
    assert [selfcheck_report.with_unit(*pair) for pair in units] == [
        "12 us", "4.8 TB/s", "-", "1.500", "2 s"
    ]  # fmt: skip
    assert selfcheck_report.plain({"a": float("nan"), "b": (1, None)}) == {
        "a": "nan", "b": [1, None]
    }  # fmt: skip


def test_every_part_has_a_limit_and_the_budget_leaves_room():
    assert gpu_selfcheck.FLAGS["budget_s"].default + 50 < 480  # eight minutes in all
    assert all(0 < seconds <= 330 for seconds in PARTS.values())


@pytest.mark.parametrize(("factor", "num_failed"), [(1.0, 0), (1.05, 2)])
def test_a_kernel_that_is_wrong_by_5_percent_fails(factor, num_failed, monkeypatch):
    real = selfcheck_kernels.attention

    def planted(shape, *, implementation, is_smoke):
        attend = real(shape, implementation="xla", is_smoke=is_smoke)
        times = factor if implementation == "mosaic_gpu" else 1.0
        return lambda *args: (attend(*args) * times).astype(args[0].dtype)

    monkeypatch.setattr(selfcheck_kernels, "attention", planted)
    part = Part("decode", lambda record: None)
    selfcheck_kernels.decode(part, Setup(is_smoke=True, seed=3))
    assert part.num_failed == num_failed
