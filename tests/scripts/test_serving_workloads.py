"""Workloads of the serving benchmark: what is drawn, read, shortened, refused."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scripts.serving_workloads import (
    SYNTHETIC,
    Item,
    Shape,
    clipped,
    folded,
    is_synthetic,
    read_items,
    synthetic,
)


def draw(name, count=50, shape=None, vocab_size=49_152, seed=0):
    return synthetic(name, count, shape or Shape(), vocab_size=vocab_size, seed=seed)


def read(path, count=None, vocab_size=512, seed=0):
    return read_items(str(path), count, vocab_size=vocab_size, seed=seed)


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# Medians and 90th percentiles of prompts and outputs, of the definitions.
@pytest.mark.parametrize(
    ("name", "prompts", "outputs"),
    [
        ("chat-short", (128, 594), (105, 456)),
        ("chat-long", (757, 2700), (151, 456)),
        ("code", (1097, 6268), (16, 48)),
        ("agent", (6900, 27_000), (350, 597)),
    ],
)
def test_drawn_lengths_are_distributed_as_defined(name, prompts, outputs):
    items = draw(name, 400 if name == "agent" else 1500)  # its prompts are long
    lengths = np.array([(item.prompt_len, item.max_tokens) for item in items])
    found = np.percentile(lengths, (50, 90), axis=0).T
    np.testing.assert_allclose(found, [prompts, outputs], rtol=0.15)


@pytest.mark.parametrize("name", [*SYNTHETIC, "30:7"])
def test_a_seed_gives_the_same_requests_and_another_gives_others(name):
    assert draw(name, 4) == draw(name, 4)
    assert draw(name, 4) != draw(name, 4, seed=1)
    assert len(draw(name, 4)) == 4


@pytest.mark.parametrize("vocab_size", [8, 512, 128_256])
def test_ids_stay_off_the_ends_of_the_vocabulary(vocab_size):
    ids = [
        one for item in draw("64:1", 20, vocab_size=vocab_size) for one in item.prompt
    ]
    assert min(ids) >= min(256, vocab_size // 8) >= 1
    assert max(ids) < vocab_size
    assert vocab_size < 128_000 or max(ids) < 128_000  # Llama 3's special ids


def test_fixed_and_random_lengths_are_those_asked():
    assert {(i.prompt_len, i.max_tokens) for i in draw("30:7")} == {(30, 7)}
    assert {(i.prompt_len, i.max_tokens) for i in draw("random", 3)} == {(1024, 128)}
    shape = Shape(input_len=10, output_len=4, range_ratio=0.5)
    items = draw("random", 300, shape)
    assert {item.prompt_len for item in items} == set(range(5, 16))
    assert {item.max_tokens for item in items} == set(range(2, 7))


def test_prefixes_are_shared_equally_and_the_rest_is_not():
    shape = Shape(num_prefixes=3, prefix_len=20, input_len=10, output_len=2)
    items = draw("shared-prefix", 12, shape)
    heads = [item.prompt[:20] for item in items]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({item.prompt[20:] for item in items}) == 12
    assert {(i.prompt_len, i.max_tokens) for i in items} == {(30, 2)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_len": 0}, "input_len must be at least 1, got 0"),
        ({"prefix_len": 0}, "prefix_len must be at least 1"),
        ({"range_ratio": 1.0}, r"range_ratio must be in \[0, 1\), got 1.0"),
    ],
)
def test_shapes_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Shape(**values)


def test_names_of_synthetic_workloads_are_told_from_files():
    assert all(map(is_synthetic, ("code", "128:2048")))
    assert not any(map(is_synthetic, ("online", "a:b", "128", "C:/x.jsonl", "1:2:3")))
    with pytest.raises(ValueError, match="at least 1, got '0:5'"):
        draw("0:5")
    with pytest.raises(ValueError, match="one of .*got 'poems'"):
        draw("poems")


def test_workload_files_keep_ids_lengths_and_times():
    items = read("online", vocab_size=49_152)
    assert len(items) == 48
    assert (items[2].prompt_len, items[2].max_tokens) == (96, 144)
    assert items[2].arrival_s == 2.1684
    assert items[0].prompt[:3] == (43, 3310, 28)
    assert len(read("online", 5, vocab_size=49_152)) == 5


def test_traces_with_lengths_alone_get_drawn_ids(tmp_path):
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 3, "input_length": 9, "output_length": 2},
        {"arrival_s": 4.5, "prompt": "hello", "max_tokens": 3},
    )
    first, second = read(path)
    assert (first.prompt_len, first.max_tokens, first.arrival_s) == (9, 2, 3)
    assert (second.prompt, second.prompt_len) == ("hello", None)
    assert read(path) == [first, second]
    assert read(path, seed=1)[0].prompt != first.prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "line 2: a line must be an object, got list"),
        ({"input_length": 3}, "max_tokens or output_length must be 1 or more"),
        ({"input_length": 0, "max_tokens": 1}, "input_length must be 1 or more, got 0"),
        ({"prompt": "", "max_tokens": 1}, "not empty"),
        ({"prompt": 5, "max_tokens": 1}, "text or token ids"),
        ({"prompt_token_ids": [-1], "max_tokens": 1}, "whole numbers, 0 or more"),
        ({"prompt_token_ids": 7, "max_tokens": 1}, "line 2: "),
        (
            {"prompt": "a", "max_tokens": 1, "timestamp": "x"},
            "must be seconds, got 'x'",
        ),
    ],
)
def test_wrong_lines_are_refused_by_their_number(tmp_path, row, message):
    path = write(tmp_path / "w.jsonl", {"prompt": "a", "max_tokens": 1}, row)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_unknown_names_and_files_that_hold_too_few_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'latency'.*got 'nothing'"):
        read("nothing")
    path = write(tmp_path / "w.jsonl", {"prompt": "a", "max_tokens": 1})
    with pytest.raises(ValueError, match="holds 1 requests, wanted 2"):
        read(path, 2)
    with pytest.raises(ValueError, match="holds 0 requests, wanted 1"):
        read(write(tmp_path / "empty.jsonl"))


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=9),
    context=st.integers(2, 400),
)
def test_shortened_requests_fit_and_the_others_are_left_alone(lengths, context):
    items = [Item(prompt=tuple(range(i)), max_tokens=o) for i, o in lengths]
    fitting, count = clipped(items, context)
    assert count == sum(sum(pair) > context for pair in lengths)
    for item, found in zip(items, fitting, strict=True):
        if item.prompt_len + item.max_tokens <= context:
            assert found is item
            continue
        # Nothing of the context is wasted, and neither part is lost.
        assert found.prompt_len + found.max_tokens == context
        assert found.prompt_len >= 1 and found.max_tokens >= 1
        assert found.prompt == item.prompt[: found.prompt_len]
        assert found.max_tokens >= min(item.max_tokens, context // 2)


def test_texts_and_unknown_contexts_are_not_shortened():
    items = [Item(prompt="x" * 99, max_tokens=99), Item(prompt=(1,) * 9, max_tokens=9)]
    assert clipped(items, None) == (items, 0)
    fitting, count = clipped(items, 10)
    assert (fitting[0], count) == (items[0], 1)
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        clipped(items, 1)


def test_ids_outside_the_vocabulary_are_folded_and_counted():
    inside, outside = (Item(prompt=ids, max_tokens=1) for ids in ((3, 4), (3, 11)))
    text = Item(prompt="abc", max_tokens=1)
    found, count = folded([inside, outside, text], 10)
    assert [item.prompt for item in found] == [(3, 4), (3, 1), "abc"]
    assert count == 1
