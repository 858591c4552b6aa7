"""Rows of offline jobs: what is read of a file, and what of a line; never a crash."""

import hashlib
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.scripts.batch_records import RecordStyle, error_record, record_of
from headrace.scripts.batch_rows import (
    BadRow,
    Line,
    Row,
    is_of_shard,
    parse_row,
    read_lines,
    seed_of,
)

JOB = "f" * 64
STYLE = RecordStyle(job=JOB, model="m")

# Values of any shape below the names that rows know, and below others.
NAMES = st.sampled_from(
    [
        "custom_id", "method", "url", "body", "prompt", "messages", "prompt_token_ids",
        "id", "seed", "n", "max_tokens", "temperature", "stop", "logit_bias",
        "logprobs", "response_format", "structured_outputs", "role", "content",
        "model", "type", "json_schema", "schema", "top_logprobs", "tools", "bad_words",
        "x",
    ]
)  # fmt: skip
WORDS = st.sampled_from(
    ["POST", "/v1/completions", "/v1/chat/completions", "user", "json_schema", "text"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | WORDS
    | st.integers(-(10**400), 10**400)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
SOUND = [
    {"prompt_token_ids": [1, 2], "seed": 3, "id": "a"},
    {"prompt": "hello", "max_tokens": 5, "logit_bias": {"7": -1.5}},
    {"messages": [{"role": "user", "content": "x"}], "temperature": 0},
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    },
    {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [1, 2, 3], "n": 2, "stop": ["a"]},
    },
]


def parsed(text, defaults=None, number=5):
    """The row of a line, and that an error's record can be written."""
    row = parse_row(Line(number, text), defaults or {}, JOB)
    if isinstance(row, BadRow):
        record = error_record(row, STYLE)
        assert b"\n" not in record
        assert json.loads(record)["error"]["line"] == number
    else:
        assert isinstance(row, Row) and row.params.seed is not None
        assert (row.prompt is None) != (row.messages is None)
    return row


def dumped(fields):
    return json.dumps(fields).encode()


@given(st.binary(max_size=200))
def test_any_bytes_make_a_row_or_an_error(text):
    parsed(text)


@given(st.dictionaries(NAMES, VALUES, max_size=8))
def test_any_json_makes_a_row_or_an_error(fields):
    parsed(dumped(fields))


@given(st.sampled_from(SOUND), NAMES, VALUES)
def test_any_value_in_the_place_of_a_right_one_makes_a_row_or_an_error(
    fields, name, value
):
    parsed(dumped(fields | {name: value}))
    if "body" in fields:
        parsed(dumped(fields | {"body": fields["body"] | {name: value}}))


@given(st.sampled_from(SOUND), st.data())
def test_cut_lines_are_errors(fields, data):
    text = dumped(fields)
    end = data.draw(st.integers(0, len(text) - 1))
    assert parsed(text[:end]).code == "invalid_json"


@pytest.mark.parametrize("fields", SOUND)
def test_sound_rows_are_rows(fields):
    assert isinstance(parsed(dumped(fields)), Row)


@pytest.mark.parametrize(
    "text, message",
    [
        (b'{"prompt": "\xff"}', "no UTF-8: byte 0xff at place 12"),
        (b'{"prompt": "a", "seed": NaN}', "numbers must be finite, got NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "must be finite, got 1e999"),
        (b"[" * 100_000, "brackets must nest at most 64 deep"),
        (b'{"a":' * 100_000, "brackets must nest at most 64 deep"),
        (b'"' + b"[" * 100 + b'"', "a JSON object is wanted, got str"),
        (b"[1]", "a JSON object is wanted, got list"),
        ('{"prompt": "a"}'.encode("utf-16"), "no UTF-8"),
        (b'{"prompt": "a"} {}', "no JSON: Extra data"),
        (b'{"prompt": "a\tb"}', "no JSON: Invalid control character"),
    ],
)
def test_lines_that_are_no_sound_json_say_why(text, message):
    row = parsed(text)
    assert row.code == "invalid_json" and message in row.message


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "a row has one of"),
        ({"prompt": "a", "messages": []}, "a row has one of"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'"),
        ({"prompt": "a", "output_kind": "delta"}, "unknown field 'output_kind'"),
        ({"prompt": 5}, "'prompt' must be a str"),
        ({"prompt_token_ids": "5"}, "must be a list of token ids"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"prompt": "a", "n": 0}, "n must be in"),
        ({"prompt": "a", "id": 1.5}, "id must be a string of 1 to 512"),
        ({"prompt": "a", "id": True}, "id must be a string"),
        ({"prompt": "a", "temperature": 10**400}, "int too large"),
        (SOUND[3] | {"custom_id": 7}, "custom_id must be a string"),
        (SOUND[3] | {"custom_id": "x" * 513}, "custom_id must be a string"),
        (SOUND[3] | {"method": "GET"}, "method must be 'POST'"),
        (SOUND[3] | {"url": "/v1/embeddings"}, "url must be in"),
        (SOUND[3] | {"body": []}, "body must be an object"),
        (SOUND[3] | {"extra": 1}, "a row has the fields"),
        (SOUND[3] | {"body": {"messages": [], "stream": True}}, "stream must be false"),
        (SOUND[3] | {"body": {"prompt": "a"}}, "unknown field 'prompt'"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    row = parsed(dumped(fields))
    assert row.code == "invalid_request" and message in row.message


def test_error_rows_keep_id_and_shape_as_far_as_they_are_read():
    plain = json.loads(error_record(parsed(b'{"id": 7}'), STYLE))
    assert (plain["id"], plain["line"], "custom_id" in plain) == (7, 5, False)
    batch = json.loads(error_record(parsed(dumped(SOUND[4] | {"body": 1})), STYLE))
    assert (batch["custom_id"], batch["response"]) == ("b", None)
    assert batch["id"].startswith("batch_req_") and batch["error"]["line"] == 5
    unread = json.loads(error_record(parsed(b"{"), STYLE))
    assert (unread["id"], unread["custom_id"], unread["line"]) == (None, None, 5)


def test_defaults_hold_for_plain_rows_alone():
    defaults = {"max_tokens": 77, "temperature": 0.5, "seed": None}
    row = parsed(b'{"prompt": "a", "temperature": 0.25}', defaults)
    assert (row.params.max_tokens, row.params.temperature) == (77, 0.25)
    row = parsed(dumped(SOUND[4]), defaults)
    assert (row.params.max_tokens, row.params.temperature) == (16, 1.0)


def test_seeds_are_the_rows_own_unless_they_follow_from_job_and_line():
    assert parsed(b'{"prompt": "a", "seed": 9}').params.seed == 9
    assert parsed(b'{"prompt": "a"}', {"seed": 4}).params.seed == 4
    drawn = {parsed(b'{"prompt": "a", "seed": null}', number=n).params.seed
             for n in range(1, 50)}  # fmt: skip
    assert len(drawn) == 49 and seed_of(JOB, 7) in drawn
    assert seed_of(JOB, 7) == 8526431488268198610 and seed_of("x", 7) not in drawn
    batch = parse_row(Line(7, dumped(SOUND[4])), {}, JOB)
    assert batch.params.seed == seed_of(JOB, 7)


def test_size_orders_rows_by_what_they_may_cost():
    sizes = [
        parsed(dumped(fields)).size
        for fields in (
            {"prompt_token_ids": [1] * 9, "max_tokens": 5},
            {"prompt_token_ids": [1] * 9, "max_tokens": 5, "n": 3},
            {"prompt": "x" * 4000, "max_tokens": 5},
            {"prompt": "x", "max_tokens": None},
        )
    ]
    assert sizes[:2] == [14, 24] and sizes == sorted(sizes)


LINES = st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b), max_size=12)


@given(LINES, st.booleans(), st.integers(1, 9), st.integers(1, 5))
def test_reading_gives_every_line_that_is_not_blank(lines, ends, limit, shards):
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    digest = hashlib.sha256()
    found = list(read_lines(io.BytesIO(text), limit, digest))
    assert digest.digest() == hashlib.sha256(text).digest()
    expected = []
    for number, line in enumerate(lines, 1):
        if len(line) > limit:
            expected.append((number, None))
        elif line.strip():
            expected.append((number, line))
    bare = [(n, t if t is None else t.removesuffix(b"\n")) for n, t in found]
    # The mark of UTF-8 cannot come up: no example is that long.
    assert bare == expected
    parts = [n for i in range(shards) for n, _ in found if is_of_shard(n, (i, shards))]
    assert sorted(parts) == [n for n, _ in found]


def test_mark_of_utf8_and_carriage_returns_do_no_harm():
    file = io.BytesIO(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    lines = list(read_lines(file, 100))
    assert [line.number for line in lines] == [1, 3]
    rows = [parse_row(line, {}, JOB) for line in lines]
    assert [row.prompt for row in rows] == [{"prompt": "a"}, {"prompt": "b"}]


def test_long_lines_are_not_held():
    class Watched(io.BytesIO):
        most = 0

        def readline(self, size=-1):
            piece = super().readline(size)
            self.most = max(self.most, len(piece))
            return piece

    file = Watched(b"x" * 5_000_000 + b"\n{}\n")
    assert list(read_lines(file, 100)) == [Line(1, None), Line(2, b"{}\n")]
    assert file.most <= 1 << 20


def output_of(reason="stop", logprob=-0.5, **fields):
    step = {7: Logprob(-0.1, 1, "top"), 5: Logprob(logprob, 9, "was")}
    completion = CompletionOutput(
        text="was", token_ids=[5], logprobs=[step], finish_reason=reason, **fields
    )
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=[1, 2], outputs=[completion],
        finished=True,
    )  # fmt: skip


def test_chat_rows_get_the_usual_object():
    fields = json.loads(dumped(SOUND[3]))
    fields["body"] |= {"top_logprobs": 1, "model": "mine"}
    record, is_error = record_of(parsed(dumped(fields)), output_of(), STYLE)
    body = json.loads(record)["response"]["body"]
    choice = body["choices"][0]
    assert not is_error and (body["model"], body["created"]) == ("mine", 0)
    assert choice["message"]["content"] == "was" and choice["finish_reason"] == "stop"
    place = choice["logprobs"]["content"][0]
    assert (place["token"], place["bytes"]) == ("was", [119, 97, 115])
    assert [one["token"] for one in place["top_logprobs"]] == ["top"]
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3,
    }  # fmt: skip


@pytest.mark.parametrize("reason", ["error", "rejected", "deadline", "cancelled"])
def test_rows_that_end_badly_are_error_rows(reason):
    row = parsed(b'{"prompt": "a", "id": "x"}')
    record, is_error = record_of(row, output_of(reason, finish_message="why"), STYLE)
    error = json.loads(record)["error"]
    assert (
        is_error
        and error["message"] == f"line 5: the request ended with {reason!r}: why"
    )


def test_number_that_json_does_not_have_is_an_error_row():
    row = parsed(b'{"prompt": "a"}')
    record, is_error = record_of(row, output_of(logprob=-math.inf), STYLE)
    assert is_error and "not finite" in json.loads(record)["error"]["message"]
