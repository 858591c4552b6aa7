"""StructuredOutputsParams and their compiling: what is checked, refused and cached."""

import pytest
from grammar_walks import FAST, TOKENS, allowed, byte_level, push

from headrace.engine.structured import GrammarCompiler
from headrace.engine.structured_params import StructuredOutputsParams as Params


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENS)


@pytest.mark.parametrize(
    "params, message",
    [
        (Params(json={"type": "strin"}), "json .*Invalid type: strin"),
        (Params(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Params(json={"not": {"type": "string"}}), "not"),
        (Params(json={"type": "string", "format": "shoe"}), "Unknown format: shoe"),
        (Params(json={"type": "integer", "minimum": 3, "maximum": 2}), "greater"),
        (
            Params(json={"oneOf": [{"type": "string"}, {"type": "string"}]}),
            "oneOf constraints are not supported",
        ),
        (Params(json={"$ref": "http://a/b"}), "does not fetch"),
        (Params(json_object=True, whitespace_pattern="("), "unclosed group"),
        (Params(regex="(a"), "regex .*unclosed group"),
        (Params(regex="a(?=b)"), "look-around"),
        (Params(grammar='begin: "a"'), "grammar .*no start rule"),
        (Params(grammar='start: "a'), "grammar"),
        (Params(grammar='{"grammars": []}'), "grammar"),
        (Params(grammar="start: <s>"), "name no tokens"),
        (Params(grammar='start: "a" <[0-9]>'), "name no tokens"),
        (Params(grammar="start: x\nx[temperature=0.5]: /a/"), "'temperature'"),
        (Params(grammar='start: x\nx[stop="b"]: /a/'), "'stop'"),
    ],
)
def test_what_the_library_cannot_take_is_refused(compiler, params, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        compiler.compile(params)


def test_words_of_refused_attributes_are_fine_as_text(compiler):
    grammar = 'start: "stop=<s>" /temperature=1/ // stop= <s>\n'
    push(compiler.compile(Params(grammar=grammar)), "stop=<s>temperature=1", PLAIN)


PLAIN = byte_level()
PLAIN.encode_special_tokens = True


def test_grammar_cannot_ask_for_forced_tokens(compiler):
    grammar = '%llguidance {"no_forcing": false}\nstart: "foo"'
    names = {
        FAST.id_to_token(i) for i in allowed(compiler.compile(Params(grammar=grammar)))
    }
    assert names == {"f", "fo", "foo"}


@pytest.mark.parametrize(
    "options, spaced, plain",
    [
        ({}, True, True),
        ({"disable_any_whitespace": True}, False, True),
        ({"whitespace_pattern": " "}, True, True),
        ({"whitespace_pattern": "\n"}, False, True),
    ],
)
def test_white_space_between_parts_is_as_asked_for(compiler, options, spaced, plain):
    for params in (Params(json={}, **options), Params(json_object=True, **options)):
        state = push(compiler.compile(params), '{"a"')
        assert (FAST.token_to_id("Ġ") in allowed(state)) == spaced
        assert (FAST.token_to_id(":") in allowed(state)) == plain


def test_two_spaces_need_a_pattern_that_has_two(compiler):
    state = compiler.compile(Params(json_object=True, whitespace_pattern=" "))
    assert FAST.token_to_id("ĠĠ") not in allowed(push(state, "{"))
    state = compiler.compile(Params(json_object=True))
    assert FAST.token_to_id("ĠĠ") in allowed(push(state, "{"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, r"exactly one of .* got \[\]"),
        ({"json": None, "json_object": False}, r"got \[\]"),
        ({"regex": "a", "choice": ["b"]}, r"got \['regex', 'choice'\]"),
        ({"json": {}, "json_object": True}, r"got \['json', 'json_object'\]"),
        ({"json": "[1]"}, "json must be a schema that is an object"),
        ({"json": "{"}, "json must be a JSON schema"),
        ({"json": 3}, "json must be a JSON schema"),
        ({"json": {"const": {1, 2}}}, "json must be a JSON schema"),
        ({"json": {"const": float("nan")}}, "json must be a JSON schema"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"regex": ""}, "regex must be a str that is not empty"),
        ({"regex": 3}, "regex must be a str"),
        ({"regex": "\ud800"}, "regex must be valid Unicode"),
        ({"choice": []}, "choice must be a list of at least 1"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice must be a str that is not empty"),
        ({"choice": ["a", 3]}, "choice must be a str"),
        ({"grammar": ""}, "grammar must be a str that is not empty"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"json": {}, "disable_any_whitespace": None}, "disable_any_whitespace"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern must be a str"),
        ({"regex": "a", "whitespace_pattern": " "}, "needs json or json_object"),
        ({"regex": "a", "disable_any_whitespace": True}, "needs json or json_object"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "must be None with disable_any_whitespace",
        ),
    ],
)
def test_parameters_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Params(**fields)


def test_equal_parameters_are_equal_and_hash_alike():
    assert Params(json={"type": "null"}) == Params(json='{"type": "null"}')
    assert len({Params(choice=["a", "b"]), Params(choice=("a", "b"))}) == 1
    assert Params(choice=["a", "b"]) != Params(choice=["b", "a"])
    assert (Params(json={}).kind, Params(json_object=True).kind) == (
        "json",
        "json_object",
    )
