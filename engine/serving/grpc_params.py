"""SamplingParams as messages, there and back. Host side, no jax.

What a message leaves out has the default of SamplingParams; the names are the same.
"""

from collections.abc import Mapping
from typing import Any

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.limits import ServiceLimits, check_at_most
from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.structured_params import StructuredOutputsParams

# Fields that know whether they were set, fields whose default is protobuf's, lists.
_OPTIONAL = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "n", "logprobs", "prompt_logprobs",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
_PLAIN = ("min_tokens", "ignore_eos", "include_stop_str_in_output")
_LISTS = ("stop", "stop_token_ids", "bad_words")
_STRUCTURED = ("json", "regex", "grammar", "whitespace_pattern")


def read_params(message: pb.SamplingParams, limits: ServiceLimits) -> SamplingParams:
    """A message as SamplingParams.

    Args:
      message: from anybody.
      limits: bound the lists before they are looked through.

    Raises:
      ServiceError: invalid_argument, with field, value and range.
    """
    _check_counts(message, limits)
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)
    }
    values |= {name: getattr(message, name) for name in _PLAIN}
    values |= {name: tuple(getattr(message, name)) for name in _LISTS}
    if message.logit_bias:
        values["logit_bias"] = dict(message.logit_bias)
    if message.allowed_token_ids:
        values["allowed_token_ids"] = tuple(message.allowed_token_ids)
    if message.fills_context:
        if "max_tokens" in values:
            raise ServiceError(
                "invalid_argument",
                "max_tokens must be absent with fills_context, got "
                f"{values['max_tokens']}",
            )
        values["max_tokens"] = None
    try:
        if message.HasField("structured_outputs"):
            structured = _read_structured(message.structured_outputs)
            values["structured_outputs"] = structured
        return SamplingParams(**values)
    except ValueError as error:
        raise ServiceError("invalid_argument", str(error)) from None


def _check_counts(message: pb.SamplingParams, limits: ServiceLimits) -> None:
    structured = message.structured_outputs
    texts = [getattr(structured, name) for name in _STRUCTURED]
    for name, count, most in (
        ("number of stop strings", len(message.stop), limits.max_stop_strings),
        ("number of stop_token_ids", len(message.stop_token_ids), 64),
        ("number of bad_words", len(message.bad_words), limits.max_bias_entries),
        ("entries of logit_bias", len(message.logit_bias), limits.max_bias_entries),
        (
            "number of allowed_token_ids",
            len(message.allowed_token_ids),
            limits.max_bias_entries,
        ),
        (
            "characters of structured_outputs",
            max(map(len, [*texts, structured.choice.choice])),
            limits.max_grammar_chars,
        ),
    ):
        check_at_most(name, count, most)


def _read_structured(message: pb.StructuredOutputs) -> StructuredOutputsParams:
    kind = message.WhichOneof("kind")
    values: dict[str, Any] = {
        "disable_any_whitespace": message.disable_any_whitespace,
    }
    if kind == "choice":
        values["choice"] = tuple(message.choice.choice)
    elif kind is not None:
        values[kind] = getattr(message, kind)
    if message.HasField("whitespace_pattern"):
        values["whitespace_pattern"] = message.whitespace_pattern
    try:
        return StructuredOutputsParams(**values)
    except ValueError as error:
        raise ValueError(f"structured_outputs: {error}") from None


def write_params(params: SamplingParams) -> pb.SamplingParams:
    """SamplingParams as a message.

    Raises:
      ValueError: what the protocol cannot say: a negative seed, an `output_kind`.
    """
    if params.output_kind != "delta":
        raise ValueError(
            f"output_kind must be 'delta': generate gives the whole, stream gives "
            f"deltas, got {params.output_kind!r}"
        )
    if params.seed is not None and params.seed < 0:
        raise ValueError(f"seed must be in [0, 2**64 - 1] here, got {params.seed}")
    message = pb.SamplingParams()
    for name in (*_OPTIONAL, *_PLAIN):
        if (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(params, name))
    message.fills_context = params.max_tokens is None
    message.logit_bias.update(params.logit_bias or {})
    message.allowed_token_ids.extend(params.allowed_token_ids or ())
    structured = params.structured_outputs
    if structured is not None:
        assert not isinstance(structured, Mapping)  # SamplingParams made it one
        _write_structured(structured, message.structured_outputs)
    return message


def _write_structured(
    params: StructuredOutputsParams, message: pb.StructuredOutputs
) -> None:
    if params.choice is not None:
        message.choice.choice.extend(params.choice)
    else:
        setattr(message, params.kind, getattr(params, params.kind))
    message.disable_any_whitespace = params.disable_any_whitespace
    if params.whitespace_pattern is not None:
        message.whitespace_pattern = params.whitespace_pattern
