"""Schemes have names that read back, and count their own bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.quantization import Scheme, parse_scheme
from headrace.configs.schema import EngineConfig


@st.composite
def schemes(draw):
    values = draw(st.sampled_from(["int8", "int4", "float8_e4m3fn"]))
    least = 1 if values == "int4" else 0
    group = draw(st.sampled_from([None, 32, 64, 128][least:]))
    zeros = values != "float8_e4m3fn" and draw(st.booleans())
    acts = values if not group and not zeros and draw(st.booleans()) else None
    return Scheme(values=values, group_size=group, has_zeros=zeros, activations=acts)


@given(schemes())
def test_a_name_reads_back(scheme):
    assert parse_scheme(scheme.name) == scheme


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int4",
        "int3-g64",
        "int4-g",
        "fp8-z",
        "int8-g1",
        "w4a8",
        "INT8",
        "int4-g64-z-",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError):
        parse_scheme(name)
    with pytest.raises(ValueError):
        EngineConfig(quantization=name)


@pytest.mark.parametrize("name, wanted", [
    ("int8", 6 * 256 + 6 * 4),
    ("w8a8", 6 * 256 + 6 * 4),
    ("fp8", 6 * 256 + 6 * 4),
    ("int4-g64", 6 * 256 // 2 + 6 * 4 * 4),
    ("int4-g64-z", 6 * 256 // 2 + 6 * 4 * (4 + 1)),
])  # fmt: skip
def test_bytes_are_values_scales_and_zero_points(name, wanted):
    assert parse_scheme(name).weight_bytes(6, 256) == wanted


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="128 of scheme 'int4-g128' .* 576 inputs"):
        parse_scheme("int4-g128").weight_bytes(8, 576)


@pytest.mark.parametrize("fields", [
    {"values": "int5"},
    {"values": "int8", "activations": "float8_e4m3fn"},
    {"values": "int8", "activations": "int8", "group_size": 64},
    {"values": "float8_e4m3fn", "has_zeros": True},
])  # fmt: skip
def test_what_does_not_go_together_is_refused(fields):
    with pytest.raises(ValueError):
        Scheme(**fields)
