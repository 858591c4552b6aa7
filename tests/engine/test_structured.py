"""GrammarState: the mask holds the tokens that fit the grammar, and no others.

A walk takes a random token of the mask until the text is complete, as sampling would.
"""

import concurrent.futures
import json
import re

import jsonschema
import numpy as np
import pytest
from grammar_walks import (
    BOS,
    EOS,
    FAST,
    NUM_WORDS,
    SCHEMA,
    TOKENS,
    VOCAB_SIZE,
    allowed,
    push,
    walk,
)

from headrace.engine.grammar_tokens import GrammarTokens
from headrace.engine.structured import GrammarCompiler
from headrace.engine.structured_params import StructuredOutputsParams as Params

DEAD_END = 'start: "a" X\nX: /bc/ & /bd/'
SUMS = 'start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[0-9]/\n'


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENS)


def is_sum(text):
    while "(" in text:
        shorter = re.sub(r"\([0-9]\+[0-9]\)", "0", text)
        if shorter == text:
            return False
        text = shorter
    return re.fullmatch("[0-9]", text) is not None


def is_schema_json(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


WORDS = ("foo", "food", 'a "b"', "line\n\\d", "日本🦙", "\x01\x7f", "#//x|y")
PATTERN = r"(foo|é+|\d{2,3})(-[a-c]/?){0,2}|[^\n]{3}"
LANGUAGES = [
    (Params(json=SCHEMA, whitespace_pattern="[ \n]{1,2}"), is_schema_json),
    (Params(json=json.dumps(SCHEMA), disable_any_whitespace=True), is_schema_json),
    (
        Params(json_object=True, disable_any_whitespace=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
    (Params(regex=PATTERN), lambda text: re.fullmatch(PATTERN, text) is not None),
    (Params(choice=WORDS), lambda text: text in WORDS),
    (Params(grammar=SUMS), is_sum),
]


@pytest.mark.parametrize(
    "params, belongs", LANGUAGES, ids=lambda value: getattr(value, "kind", "")
)
def test_random_walks_end_in_texts_of_the_language(compiler, params, belongs):
    rng = np.random.default_rng(0)
    texts = set()
    for _ in range(12):
        ids = walk(compiler.compile(params), rng, most=20_000)
        assert max(ids) < BOS
        text = FAST.decode(ids)
        assert belongs(text), text
        texts.add(text)
    assert len(texts) > 3


@pytest.mark.parametrize(
    "params, text",
    [
        (Params(regex=PATTERN), "123-a-c/"),
        (Params(regex="a+?b"), "aab"),
        (Params(regex="^foo$"), "foo"),
        *((Params(choice=WORDS), word) for word in WORDS),
        (Params(grammar=SUMS), "((1+2)+(3+4))"),
        (
            Params(json=SCHEMA),
            '{ "name": "é🦙",\n\t"age": -5, "kind": null, "tags": []}',
        ),
        (Params(json_object=True), '{"a": [1.5e3, {"b": null}], "": "\\n"}'),
    ],
)
def test_text_of_the_language_is_allowed_token_by_token(compiler, params, text):
    state = compiler.compile(params)
    for token_id in FAST.encode(text).ids:
        assert token_id in allowed(state)
        state.advance(token_id)
    assert state.is_complete and EOS in allowed(state, stop_ids=[EOS])


def test_mask_holds_every_token_that_fits_and_no_other():
    """Bytes of each token against the prefixes of the whole finite language."""
    words = ("foo", "food", "fo  x", "é", '{"k",')
    whole = [word.encode() for word in words]
    tokens = GrammarTokens(FAST.to_str(), 263, [])
    state = GrammarCompiler(tokens).compile(Params(choice=words))
    byte_of = {v: k for k, v in _byte_chars().items()}
    pieces = {
        token_id: bytes(byte_of[char] for char in FAST.id_to_token(token_id))
        for token_id in range(BOS)
    }
    todo = [(b"", state)]
    seen = set()
    while todo:
        text, state = todo.pop()
        fits = {
            token_id
            for token_id, piece in pieces.items()
            if any(word.startswith(text + piece) for word in whole)
        }
        assert allowed(state, 9) == fits
        assert state.is_complete == (text in whole)
        assert state.can_go_on == bool(fits)
        seen.add(text)
        for token_id in fits:
            twin = state.copy()
            twin.advance(token_id)
            todo.append((text + pieces[token_id], twin))
    assert set(whole) < seen


def _byte_chars():
    """How byte-level tokenizers write each byte (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    chars = {byte: chr(byte) for byte in shown}
    return chars | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def test_token_that_does_not_fit_is_refused_and_leaves_the_state_as_it_was(compiler):
    state = push(compiler.compile(Params(choice=["foo", "bar"])), "ba")
    before = allowed(state)
    for token_id in (FAST.token_to_id("a"), EOS, 280, VOCAB_SIZE, -1):
        with pytest.raises(ValueError, match=f"token_id .* got {token_id}"):
            state.advance(token_id)
    assert allowed(state) == before == {FAST.token_to_id("r")}


def test_copy_goes_on_by_itself(compiler):
    state = push(compiler.compile(Params(choice=["foo1", "foo2", "bar"])), "fo")
    twin = state.copy()
    push(twin, "o2")
    assert twin.is_complete and not twin.can_go_on
    assert not state.is_complete
    push(state, "o")
    assert allowed(state) == {FAST.token_to_id("1"), FAST.token_to_id("2")}
    push(state, "1")
    assert state.is_complete


def test_stop_ids_are_allowed_where_the_text_is_complete_and_a_stop_may_come(compiler):
    state = compiler.compile(Params(regex="ab?"))
    a, b = FAST.token_to_id("a"), FAST.token_to_id("b")
    stops = [EOS, BOS, 290]
    assert allowed(state, stop_ids=stops) == {a}
    state.advance(a)
    assert allowed(state, stop_ids=stops) == {b, *stops}
    assert allowed(state, stop_ids=stops, allow_stop=False) == {b}
    assert allowed(state, stop_ids=()) == {b}
    state.advance(b)
    # Nothing else can come: a stop must, whatever min_tokens says.
    assert state.is_complete and not state.can_go_on
    assert allowed(state, stop_ids=stops, allow_stop=False) == set(stops)
    assert allowed(state) == set()


def test_stop_id_that_is_text_ends_nothing_before_it_may(compiler):
    state = compiler.compile(Params(regex="aba?"))
    a, b = FAST.token_to_id("a"), FAST.token_to_id("b")
    assert allowed(state, stop_ids=[b], allow_stop=False) == {a}
    state.advance(a)
    # Nothing but the stop id goes on, so it comes in spite of min_tokens.
    assert allowed(state, stop_ids=[b], allow_stop=False) == {b}
    state.advance(b)
    assert allowed(state, stop_ids=[b]) == {a, b}
    assert allowed(state, stop_ids=[b], allow_stop=False) == {a}
    state = compiler.compile(Params(regex="[ab]{3}"))
    assert allowed(state, stop_ids=[b]) == {a, b}
    assert allowed(state, stop_ids=[b], allow_stop=False) == {a}


def test_dead_end_allows_nothing(compiler):
    state = push(compiler.compile(Params(grammar=DEAD_END)), "a")
    assert not (state.can_go_on or state.is_complete)
    for allow_stop in (True, False):
        assert allowed(state, stop_ids=[EOS], allow_stop=allow_stop) == set()
    with pytest.raises(ValueError, match="token_id must be one that fits"):
        state.advance(EOS)


def test_stop_token_changes_nothing(compiler):
    state = push(compiler.compile(Params(regex="a+")), "aa")
    for stop_id in (EOS, BOS, 290, FAST.token_to_id("z")):
        state.advance(stop_id)
        assert state.is_complete and state.can_go_on
        assert allowed(state) == {FAST.token_to_id("a")}


@pytest.mark.parametrize("stop_id", [-1, VOCAB_SIZE])
def test_stop_id_out_of_the_vocabulary_is_refused(compiler, stop_id):
    state = push(compiler.compile(Params(regex="a")), "a")
    with pytest.raises(ValueError, match=rf"stop_ids .*\[0, 299\], got {stop_id}"):
        state.fill_mask(np.zeros(NUM_WORDS, np.int32), stop_ids=[stop_id])


def test_special_tokens_and_ids_past_the_tokenizer_are_never_text(compiler):
    state = compiler.compile(Params(regex=r"(?s)(.|<s>|</s>)*"))
    assert max(allowed(state)) < BOS
    push(state, "<")
    assert max(allowed(state)) < BOS
    # Written out, their names are text like any other.
    state = compiler.compile(Params(choice=["<s>"]))
    assert allowed(state) == {FAST.token_to_id("<")}


def test_character_split_over_tokens_is_complete_only_when_whole(compiler):
    state = compiler.compile(Params(choice=["🦙"]))
    ids = FAST.encode("🦙").ids
    assert len(ids) == 4
    for token_id in ids:
        assert not state.is_complete
        assert allowed(state, stop_ids=[EOS]) == {token_id}
        state.advance(token_id)
    assert state.is_complete


def test_threads_compile_and_walk_at_once(compiler):
    params = [Params(json=SCHEMA, disable_any_whitespace=True), Params(choice=WORDS)]

    def run(seed):
        state = compiler.compile(params[seed % 2])
        return FAST.decode(walk(state, np.random.default_rng(seed)))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(12)))
    assert together == [run(seed) for seed in range(12)]
