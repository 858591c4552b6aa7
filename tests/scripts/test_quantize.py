"""Quantizing into a store: the whole way on two layers, and what is refused."""

import json
import logging

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from headrace import LLM
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.quality import FILE
from headrace.layers.quantized import is_quantized
from headrace.scripts import quality_report, quantize
from headrace.scripts.quality_needle import found_share, needles


@pytest.fixture(autouse=True)
def parsed_flags():
    with flagsaver.flagsaver():
        flags.FLAGS(["x"])
        flags.FLAGS.config, flags.FLAGS.num_tokens = "tiny", 100
        flags.FLAGS.window_tokens = 50
        yield


def make(store, scheme, **more):
    with flagsaver.flagsaver(scheme=scheme, store=str(store), **more):
        return quantize.main(["x"])


@pytest.mark.parametrize(
    "scheme, kept, method",
    [
        ("gptq-g32", "int4-g32", "gptq"),
        ("w8a8-smooth", "w8a8", "smooth"),
        ("rtn-g32", "int4-g32", None),
    ],
)
def test_a_store_says_how_it_was_made_and_what_it_cost(
    scheme, kept, method, tmp_path, capsys, caplog
):
    store = tmp_path / "store"
    assert make(store, scheme) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["scheme"] == (scheme if method else kept) and line["num_tokens"] == 100
    caplog.set_level(logging.INFO, "headrace.checkpoints")
    found = load_checkpoint(store)
    assert found.quantization == kept
    assert f"perplexity {line['perplexity_increase']:+.2%}" in caplog.text
    assert found.quality["kl_mean"] == line["kl_mean"]
    assert found.quality["layer_error"]["layer_1/down"] > 0
    if method is None:
        assert found.calibration is None
    else:
        facts = found.calibration
        assert (facts["method"], facts["num_windows"]) == (method, 16)
        assert facts["text"] == "the workload offline"


def test_a_calibrated_store_generates(tmp_path):
    assert make(tmp_path / "store", "awq-g32", report=False) == 0
    assert not (tmp_path / "store" / FILE).exists()
    llm = LLM(
        tmp_path / "store",
        config={"num_slots": 2, "num_pages": 9, "max_context_len": 64},
    )
    assert llm.engine_config.quantization == "int4-g32"
    assert is_quantized(llm._runner.params["layer_0"]["qkv"])
    assert llm.generate([1, 2, 3], use_tqdm=False)[0].outputs[0].token_ids
    llm.close()


def test_a_report_of_another_checkpoint_is_not_shown(tmp_path, caplog):
    assert make(tmp_path / "a", "rtn-g32") == 0
    assert make(tmp_path / "b", "int8", report=False) == 0
    caplog.set_level(logging.INFO, "headrace.checkpoints")
    load_checkpoint(tmp_path / "b")
    assert "int8: no quality report" in caplog.text
    (tmp_path / "b" / FILE).write_bytes((tmp_path / "a" / FILE).read_bytes())
    assert load_checkpoint(tmp_path / "b").quality is None
    assert "is the report of another checkpoint" in caplog.text
    (tmp_path / "b" / FILE).write_text("{")
    assert load_checkpoint(tmp_path / "b").quality is None
    assert "is no quality report" in caplog.text


def test_a_checkpoint_is_reported_on_as_it_lies(tmp_path, capsys):
    assert make(tmp_path / "a", "gptq-g32", report=False) == 0
    with flagsaver.flagsaver(checkpoint=str(tmp_path / "a")):
        assert quality_report.main(["x"]) == 0
    kept = json.loads((tmp_path / "a" / FILE).read_text())
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert kept["scheme"] == line["scheme"] == "gptq-g32"


@pytest.mark.parametrize("settings, message", [
    ({"scheme": "kv-int8"}, "is of KV pages"),
    ({"scheme": "int3"}, "quantization must be such as"),
    ({"scheme": None}, "--scheme and --store are needed"),
    ({"scheme": "int8", "quantization": "int8"}, "the base is not quantized"),
    ({"scheme": "gptq-g96"}, "does not divide"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_and_nothing_is_left(
    settings, message, tmp_path, capsys
):
    assert make(tmp_path / "store", **settings) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_never_touched(tmp_path, capsys):
    assert make(tmp_path, "int8") == 1
    assert "exists already" in capsys.readouterr().err


def _encode(text):
    return [ord(c) for c in text]


def test_needles_are_told_once_at_even_depths_and_asked_for_at_the_end():
    filler = [0] * 500
    made = needles(_encode, filler, 400, 4)
    for i, (ids, size) in enumerate(made):
        assert ids.size == 400 and size == 6
        number = ids[-size:].tolist()
        text = ids.tolist()
        places = [i for i in range(400 - size) if text[i : i + size] == number]
        assert len(places) == 1
        room = text.count(0)
        assert text.index(ord("\n")) == room * i // 4
    with pytest.raises(ValueError, match="need a text of"):
        needles(_encode, filler, 50, 1)
    with pytest.raises(ValueError, match="there are 10"):
        needles(_encode, filler[:10], 400, 1)


def test_a_needle_is_found_when_every_token_of_it_is():
    made = needles(_encode, [0] * 500, 300, 4)

    def forward(missed, ids):
        scores = np.zeros((ids.size, 128))
        scores[np.arange(ids.size - 1), ids[1:]] = 1
        if any((ids[:9] == needle.token_ids[:9]).all() for needle in missed):
            scores[-3] = 0
        return scores

    assert found_share(forward, [], made) == 1
    first_differs = [made[0]]
    assert found_share(forward, first_differs, made) == 0.75
