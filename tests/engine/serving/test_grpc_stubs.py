"""The generated files are those of generation.proto; the client needs no engine."""

import pathlib
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from headrace import SamplingParams, StructuredOutputsParams
from headrace.engine.serving.grpc_params import read_params, write_params
from headrace.engine.serving.limits import ServiceLimits

ROOT = pathlib.Path(__file__).parents[3]
PROTO = "headrace/engine/serving/proto/generation.proto"


@pytest.mark.parametrize("kind", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_stubs_are_what_the_protocol_says(kind, made_stubs):
    made = (made_stubs / PROTO.replace(".proto", kind)).read_text()
    kept = (ROOT / PROTO.split("/", 1)[1]).with_name(f"generation{kind}")
    assert _plain(kept.read_text()) == _plain(made)


@pytest.fixture(scope="module")
def made_stubs(tmp_path_factory):
    """Folder with what grpcio-tools makes of the protocol now."""
    folder = tmp_path_factory.mktemp("stubs")
    kinds = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.typing", *kinds,
         f".typing/{PROTO}"],
        cwd=ROOT,
        check=True,
    )  # fmt: skip
    return folder


def _plain(source):
    """Without the versions of the tools, whatever lies between them."""
    lines = source.splitlines()
    return [
        line
        for line in lines
        if "Version" not in line
        and "GENERATED_VERSION =" not in line
        and not line.strip().rstrip(",").isdecimal()
    ]


def test_stubs_change_with_the_protocol(made_stubs):
    made = (made_stubs / PROTO.replace(".proto", "_pb2.py")).read_text()
    assert _plain(made) != _plain(made.replace("temperature", "tempreature"))


def test_the_client_imports_no_jax():
    code = "import headrace.client, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NAMES = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(NAMES, st.floats(0.01, 1)),
            "frequency_penalty": st.floats(-2, 2),
            "top_k": st.integers(-1, 99),
            "seed": st.integers(0, 2**64 - 1),
            "max_tokens": st.one_of(st.none(), st.integers(10, 2**31 - 1)),
            "min_tokens": st.integers(0, 10),
            "n": st.integers(1, 16),
            "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
            "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3),
            "logit_bias": st.dictionaries(
                st.integers(0, 99), st.floats(-100, 100), min_size=1, max_size=3
            ),
            "allowed_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=3),
            "bad_words": st.lists(st.text(min_size=1, max_size=5), max_size=3),
            "logprobs": st.integers(-1, 20),
            "prompt_logprobs": st.integers(0, 20),
            "ignore_eos": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "spaces_between_special_tokens": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "structured_outputs": st.sampled_from(
                [
                    StructuredOutputsParams(regex="a+"),
                    StructuredOutputsParams(choice=["a", "b"]),
                    StructuredOutputsParams(grammar='start: "a"'),
                    StructuredOutputsParams(
                        json='{"type": "object"}', whitespace_pattern=" "
                    ),
                    StructuredOutputsParams(
                        json_object=True, disable_any_whitespace=True
                    ),
                ]
            ),
        },
    )
)
def test_parameters_come_through_as_they_are(values):
    params = SamplingParams(**values)
    assert read_params(write_params(params), ServiceLimits()) == params


def test_every_parameter_has_a_field():
    fields = {f.name for f in write_params(SamplingParams()).DESCRIPTOR.fields}
    names = set(SamplingParams.__dataclass_fields__)
    assert names - fields == {"output_kind"} and fields - names == {"fills_context"}
