"""Streamed text against one decode of the whole, as scripts/fuzz_text.py has it."""

import json

import pytest
from absl.testing import flagsaver

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.text_stream import TextStream
from headrace.scripts import fuzz_text
from headrace.scripts.fuzz_text import SAMPLES, Case, complaint, read_as_user

FAMILY, FLAG = "\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7"

vocabularies = pytest.mark.parametrize(
    "name",
    ["llama2-like", pytest.param("smollm2", marks=pytest.mark.real_model)],
)


def case_of(tokenizer, text, **fields):
    """A completion of just this text, read after every token."""
    ids = tokenizer.encode(text, add_bos=False)
    return Case(ids=tuple(ids), reads=frozenset(range(len(ids))), **fields)


def test_vocabulary_like_llama_2_has_its_leading_space_and_its_bytes():
    tokenizer = fuzz_text.llama2_like()
    assert len(tokenizer.byte_token_ids) == 256
    ids = tokenizer.encode("the")
    assert tokenizer.decode(ids * 2) == "the the", "the space belongs to the token"
    for name, text in SAMPLES.items():
        ids = tokenizer.encode(text)
        num_bytes = sum(i in tokenizer.byte_token_ids for i in ids)
        assert num_bytes < len(ids), f"{name} is bytes only"
        assert num_bytes > 0 or name in ("CRLF", "code")


@vocabularies
def test_random_tokens_stream_to_the_decoded_whole(name):
    counts, wrong = fuzz_text.fuzz(fuzz_text.VOCABULARIES[name](), 1, 400)
    print(counts)
    assert wrong is None, complaint(fuzz_text.VOCABULARIES[name](), wrong)
    assert counts["sequences"] == 400 and counts["tokens"] > 8000
    assert counts["stopped"] > 100, "few stop strings were found"
    assert counts["with_stops"] - counts["stopped"] > 50, "few were not"


@vocabularies
@pytest.mark.parametrize("sample", SAMPLES)
def test_fixed_text_comes_out_as_it_went_in(name, sample):
    tokenizer, text = fuzz_text.VOCABULARIES[name](), SAMPLES[sample]
    case = case_of(tokenizer, text)
    deltas, stop = read_as_user(tokenizer, case)
    assert ("".join(deltas), stop) == (text, None)
    assert complaint(tokenizer, case) == ""
    assert "\ufffd" not in "".join(deltas).replace("\ufffd", "", text.count("\ufffd"))


@vocabularies
@pytest.mark.parametrize("sample", SAMPLES)
def test_fixed_text_is_cut_at_any_part_of_it(name, sample):
    """Each part of up to three characters, and the same that never ends."""
    tokenizer, text = fuzz_text.VOCABULARIES[name](), SAMPLES[sample]
    parts = {text[i : i + n] for i in range(len(text)) for n in (1, 2, 3)}
    for number, part in enumerate(sorted(parts)):
        keeps_stop = number % 2 == 1
        case = case_of(tokenizer, text, stops=(part,), keeps_stop=keeps_stop)
        assert complaint(tokenizer, case) == "", part
        # One stop string: it is first whole where it begins first, in any pieces.
        end = text.index(part) + len(part) * keeps_stop
        deltas, stop = read_as_user(tokenizer, case)
        assert ("".join(deltas), stop) == (text[:end], part)
        case = case_of(tokenizer, text, stops=(part + "\x01",))
        assert complaint(tokenizer, case) == "", part
        assert "".join(read_as_user(tokenizer, case)[0]) == text


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (FLAG, FLAG[1] + "!", ""),
        (FAMILY, FAMILY[2] + "!", FAMILY[0]),
        (["a\u200d\u200d"], "!", "a"),
        (["a\u200d", FLAG[0]], "!", "a"),
    ],
)
def test_what_is_drawn_as_one_is_held_back_in_front_of_what_is_held(
    pieces, stop, shown
):
    stream = TextStream([stop], keeps_stop=False)
    assert "".join(stream.push(piece) for piece in pieces) == shown


def faults():
    """Ways to break the stream, by name: (owner, attribute, what stands there)."""
    hold, push = Detokenizer._ends_in_byte_run, TextStream.push
    return {
        "half characters pass": (Detokenizer, "_advance", _advance_at_once),
        "a run of bytes is not awaited": (
            Detokenizer,
            "_ends_in_byte_run",
            lambda self, ids: hold(self, ids) and False,
        ),
        "no context is kept": (Detokenizer, "push", _push_without_context),
        "stops are looked for in each piece alone": (
            TextStream,
            "_begun_stop",
            lambda self, text: 0,
        ),
        "what is held at the end is lost": (TextStream, "flush", lambda self: ""),
        "joiners pass": (TextStream, "push", _without_unfinished(push)),
    }


# A run of byte tokens waits for its end anyway; a byte-level vocabulary has no runs.
NO_FAULTS = {
    ("llama2-like", "half characters pass"),
    ("smollm2", "a run of bytes is not awaited"),
}


def _advance_at_once(self, *, is_final):
    before = self._decode(self._window[: self._num_context])
    now = self._decode(self._window)
    self._num_context = len(self._window)
    return now[len(before) :]


def _push_without_context(self, ids):
    return self._decode(ids)


def _without_unfinished(push):
    def broken(self, text, *, may_stop=True):
        out = push(self, text, may_stop=may_stop)
        if self.stopped_by is None and self._held[:1] == "\u200d":
            out, self._held = out + self._held, ""
        return out

    return broken


@vocabularies
@pytest.mark.parametrize("fault", faults())
def test_fuzz_finds_a_planted_fault_and_shrinks_it(name, fault, monkeypatch):
    if (name, fault) in NO_FAULTS:
        pytest.skip("it is none for this vocabulary")
    tokenizer = fuzz_text.VOCABULARIES[name]()
    monkeypatch.setattr(*faults()[fault])
    counts, wrong = fuzz_text.fuzz(tokenizer, 1, 400)
    assert wrong is not None
    print(f"{name}, {fault}: after {counts['sequences']}, {wrong.ids}, {wrong.stops}")
    assert complaint(tokenizer, wrong) != ""
    assert len(wrong.ids) <= 12 and len(wrong.stops) <= 1


def run(capsys):
    """Runs the script on the small vocabulary: (exit code, output, errors)."""
    if not fuzz_text.FLAGS.is_parsed():
        fuzz_text.FLAGS(["fuzz_text"])
    with flagsaver.flagsaver(sequences=30, vocabulary=["llama2-like"]):
        code = fuzz_text.main([])
    return code, *capsys.readouterr()


def test_script_prints_a_line_per_vocabulary_and_one_of_json(capsys):
    code, out, _ = run(capsys)
    line, last = out.splitlines()
    assert code == 0 and line.startswith("llama2-like: 30 sequences, ")
    assert json.loads(last)["vocabularies"]["llama2-like"]["sequences"] == 30


def test_script_exits_with_1_and_the_ids_of_a_difference(capsys, monkeypatch):
    monkeypatch.setattr(*faults()["no context is kept"])
    code, out, errors = run(capsys)
    assert code == 1 and "{" not in out
    assert errors.startswith("error: ") and "Case(ids=(" in errors
