"""What a job's fingerprint covers, and a real engine's part in it."""

import datetime
import json

from headrace.engine.sampling_params import SamplingParams
from headrace.scripts.batch_engine import LLMRows
from headrace.scripts.batch_fingerprint import (
    differences,
    engine_facts,
    fingerprint,
    hlo_sha256,
)
from headrace.scripts.batch_rows import Line, parse_row


def test_fingerprint_is_of_the_facts_alone():
    facts = {"a": {"b": (1, 2)}, "c": None}
    assert fingerprint(facts) == fingerprint({"c": None, "a": {"b": [1, 2]}})
    assert fingerprint(facts) != fingerprint({"c": None, "a": {"b": [2, 1]}})
    assert differences(json.loads(json.dumps(facts)), facts) == []
    assert differences({"a": {"b": 1, "x": 2}}, {"a": {"b": 1}}) == ["a.x: 2 -> null"]


def test_hash_of_a_program_is_free_of_where_its_code_stands():
    text = (
        "HloModule jit_f\n\nFileNames\n1 \"{0}.py\"\n\nFunctionNames\n1 \"{0}\"\n\n"
        "ENTRY %main (p: f32[2]) -> f32[2] {{\n"
        "  ROOT %add = f32[{1}] add(%p, %p), metadata={{op_name=\"a}}{0}\" id=3}}\n}}\n"
    )  # fmt: skip
    same = {hlo_sha256(text.format(place, 2)) for place in ("here", "there")}
    assert len(same) == 1 and hlo_sha256(text.format("here", 3)) not in same


def test_engine_facts_name_every_program_and_no_path(tiny_llm):
    facts = json.loads(json.dumps(engine_facts(tiny_llm)))
    assert len(facts["programs"]) == len(tiny_llm.ledger.entries) > 10
    assert len(set(facts["programs"].values())) == len(facts["programs"])
    assert facts["device"] == {"platform": "cpu", "kind": "cpu", "count": 1}
    assert facts["weights"] and facts["engine"]["num_slots"] == 12
    assert "policy" not in facts["engine"]
    assert "/" not in json.dumps(facts).replace("prefill-(1, ", "")


TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_chat_template_is_told_the_date_of_the_job(text_llm, monkeypatch):
    monkeypatch.setattr(text_llm.tokenizer, "chat_template", TEMPLATE)
    date = datetime.date(2024, 7, 26)
    engine = LLMRows(text_llm, date)
    text = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}'
    engine.submit(parse_row(Line(1, text), {}, "job"))
    done = []
    while engine.num_open:
        done += engine.turn()
    output = done[0].output
    assert output.prompt == "26 Jul 2024hi"
    params = SamplingParams(max_tokens=3, seed=output.outputs[0].seed)
    (alone,) = text_llm.generate("26 Jul 2024hi", params, use_tqdm=False)
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids
