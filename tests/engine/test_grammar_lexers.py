"""Requests with the same grammar share a lexer, and none notices the others."""

import threading
import time

import numpy as np
import pytest
from grammar_walks import FAST, TOKENS, allowed, push

from headrace.engine import structured
from headrace.engine.structured import GrammarCompiler
from headrace.engine.structured_params import StructuredOutputsParams as Params

# Each text makes lexer states of its own.
HARD = Params(regex="[ab]*a[ab]{18}c")


@pytest.fixture
def made(monkeypatch):
    """The grammars of which a new lexer was made."""
    made, real = [], structured.Grammar.new_matcher

    def new_matcher(self):
        made.append(self._params)
        return real(self)

    monkeypatch.setattr(structured.Grammar, "new_matcher", new_matcher)
    return made


def test_one_compiled_grammar_serves_all_that_ask_for_the_same(made):
    compiler = GrammarCompiler(TOKENS)
    first = compiler.compile(Params(choice=["foo", "bar"]))
    begin = allowed(first)
    push(first, "ba")
    second = compiler.compile(Params(choice=("foo", "bar")))
    assert allowed(second) == begin
    assert allowed(push(second, "ba")) == allowed(first) == {FAST.token_to_id("r")}
    compiler.compile(Params(choice=["foo"]))
    assert len(made) == 2


def test_cache_is_bounded_and_keeps_what_was_used_last(made):
    compiler = GrammarCompiler(TOKENS, max_cached=2)
    one, two, three = (Params(regex=text) for text in "abc")
    for params in (one, two, one, three, one, three, two):
        compiler.compile(params)
    assert made == [one, two, three, two]


def _text(state, rng):
    """A text of HARD, and the masks on its way."""
    text = (
        "".join(rng.choice(["a", "b"], 12)) + "a" + "".join(rng.choice(["a", "b"], 18))
    )
    masks = []
    for char in text:
        push(state, char)
        masks.append(allowed(state))
    return text, masks


def test_what_others_did_to_the_lexer_ends_nobody(monkeypatch, made):
    monkeypatch.setattr(
        structured, "_LIMITS", {"max_lexer_states": 600, "verbose_errors": False}
    )
    compiler = GrammarCompiler(TOKENS)
    begun = push(compiler.compile(HARD), "abba")
    twin = begun.copy()
    for seed in range(40):
        _text(compiler.compile(HARD), np.random.default_rng(seed))
    # The limit was met again and again; each time two new lexers.
    assert 3 < len(made) < 20
    _, masks = _text(begun, np.random.default_rng(0))
    alone = push(GrammarCompiler(TOKENS).compile(HARD), "abba")
    assert masks == _text(alone, np.random.default_rng(0))[1]
    assert masks == _text(twin, np.random.default_rng(0))[1]
    assert FAST.token_to_id("c") in masks[-1]


def test_a_grammar_beyond_the_limits_fails_by_itself(monkeypatch):
    monkeypatch.setattr(
        structured, "_LIMITS", {"max_lexer_states": 300, "verbose_errors": False}
    )
    compiler = GrammarCompiler(TOKENS)
    good = compiler.compile(Params(choice=["foo"]))
    bad = compiler.compile(HARD)
    with pytest.raises(ValueError, match="within llguidance's limits, got .*states"):
        for seed in range(9):
            _text(bad, np.random.default_rng(seed))
    with pytest.raises(ValueError, match="within llguidance's limits"):
        allowed(bad)
    assert push(good, "foo").is_complete
    assert allowed(push(compiler.compile(HARD), "ab"))


def test_a_lexer_is_renewed_before_it_is_worn_and_beside_the_requests(monkeypatch):
    monkeypatch.setattr(structured, "RENEW_AFTER", 2)
    state = GrammarCompiler(TOKENS).compile(Params(regex="a+"))
    gate, real = threading.Event(), structured.Grammar.new_matcher

    def new_matcher(self):
        gate.wait(20)
        return real(self)

    monkeypatch.setattr(structured.Grammar, "new_matcher", new_matcher)
    push(state, "aaaa")
    assert allowed(state) == {FAST.token_to_id("a")}
    shared = state._grammar._matcher
    gate.set()
    for _ in range(400):
        if state._grammar._matcher is not shared:
            break
        time.sleep(0.01)
    assert state._grammar._matcher is not shared
    assert allowed(push(state, "a")) == {FAST.token_to_id("a")}
