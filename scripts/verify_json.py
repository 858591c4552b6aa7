"""Proves on your model that structured output is valid, for random JSON schemas.

    python -m headrace.scripts.verify_json --num_schemas=50

Makes random schemas whose longest text fits into MAX_TOKENS, asks for each with a seed,
greedily or not, and checks that the text is JSON, that it fits its schema and that the
model ended it. Some are asked for again as a stream, which must give the same text.
Needs the extra `test`. Exits with 1 if one fails, and prints its schema, seed and text.
"""

import dataclasses
import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured_params import StructuredOutputsParams
from headrace.scripts import engine_flags

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_schemas", 24, "Random schemas to ask for.", lower_bound=1)
flags.DEFINE_integer("schema_seed", 0, "Seed of the schemas and of their requests.")
flags.DEFINE_integer(
    "stream_every", 4, "Every so many are streamed as well.", lower_bound=1
)

# Of a request, the end token included. A token is at least a byte.
MAX_TOKENS = 192
NAMES = ("name", "age", "city", "tags", "is_open", "größe", "a b", 'q"', "x")
WORDS = ("red", "green", "blue", "", "très bien", "日本", 'say "hi"\n', "null")
# A character of a string at its longest: \u001f.
CHAR_BYTES = 6
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One schema and how it is asked for.

    Attributes:
      is_spaced: one space may stand between JSON's parts, else none.
    """

    schema: dict[str, Any]
    seed: int
    temperature: float
    is_spaced: bool

    @property
    def outputs_params(self) -> StructuredOutputsParams:
        """What the request asks for."""
        if self.is_spaced:
            return StructuredOutputsParams(json=self.schema, whitespace_pattern=" ")
        return StructuredOutputsParams(json=self.schema, disable_any_whitespace=True)

    @property
    def prompt(self) -> str:
        """A few words that name the properties."""
        return f"JSON with the keys {', '.join(self.schema['properties'])}:\n"


@dataclasses.dataclass
class Outcome:
    """What came out of a run."""

    total: int = 0
    valid: int = 0
    streamed: int = 0
    tokens: int = 0


def make_cases(count: int, seed: int) -> list[Case]:
    """Random cases, the same for the same seed; none can need over MAX_TOKENS."""
    rng = random.Random(seed)
    cases = []
    while len(cases) < count:
        case = Case(
            schema=_object(rng, depth=0),
            seed=rng.randrange(2**31),
            temperature=(0.0, 0.7, 1.5)[len(cases) % 3],
            is_spaced=rng.random() < 0.5,
        )
        if longest_bytes(case.schema, case.is_spaced) < MAX_TOKENS:
            cases.append(case)
    return cases


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4 if depth == 0 else 2))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "boolean", "enum"]
    kind = rng.choice([*kinds, "array", "object"] if depth == 1 else kinds)
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        items = _value(rng, depth + 1)
        return {"type": "array", "items": items, "maxItems": rng.randint(0, 3)}
    if kind == "string":
        longest = rng.randint(0, 8)
        least = rng.randint(0, longest)
        return {"type": "string", "minLength": least, "maxLength": longest}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-z]{1,3}-[0-9]{2}$", "maxLength": 6}
    if kind == "integer":
        ends = sorted(rng.randint(-1000, 1000) for _ in range(2))
        return {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 7, -1.5, None, True], rng.randint(1, 4))}
    return {"type": "boolean"}


def longest_bytes(schema: dict[str, Any], is_spaced: bool) -> int:
    """Bytes of the longest text that fits a schema of `make_cases`, or a few more."""
    # Of {}[]:, each may have a space on both sides.
    mark = 3 if is_spaced else 1
    if "enum" in schema:
        return max(len(json.dumps(value)) for value in schema["enum"])
    if schema["type"] == "object":
        total = 2 * mark
        for name, value in schema["properties"].items():
            total += len(json.dumps(name)) + 2 * mark + longest_bytes(value, is_spaced)
        return total
    if schema["type"] == "array":
        item = longest_bytes(schema["items"], is_spaced) + mark
        return 2 * mark + schema["maxItems"] * item
    if schema["type"] == "string":
        return 2 + CHAR_BYTES * schema["maxLength"]
    if schema["type"] == "integer":
        return max(len(str(schema[end])) for end in ("minimum", "maximum"))
    return len("false")


def fault(case: Case, text: str, finish_reason: str | None) -> str | None:
    """What is wrong with a text, None if nothing is."""
    import jsonschema

    if finish_reason != "stop":
        return f"finish_reason is {finish_reason!r}, not 'stop'"
    try:
        jsonschema.validate(json.loads(text), case.schema)
    except ValueError as error:
        return f"no JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"does not fit: {error.message}"
    if not case.is_spaced and re.search(r"\s", _STRING.sub("", text)):
        return "has white space where none is allowed"
    return None


def run_cases(llm: Any, cases: Sequence[Case], stream_every: int) -> Outcome:
    """Asks for all of them together, then streams some; prints each that fails."""
    params = [
        SamplingParams(
            structured_outputs=case.outputs_params,
            max_tokens=MAX_TOKENS,
            seed=case.seed,
            temperature=case.temperature,
        )
        for case in cases
    ]
    outcome = Outcome(total=len(cases))
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    for i, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        completion = output.outputs[0]
        outcome.tokens += len(completion.token_ids)
        found = output.error or fault(case, completion.text, completion.finish_reason)
        if found is None and i % stream_every == 0:
            outcome.streamed += 1
            pieces = llm.stream(case.prompt, params[i])
            joined = "".join(piece.outputs[0].text for piece in pieces)
            if joined != completion.text:
                found = f"streamed it is {joined!r}"
        if found is None:
            outcome.valid += 1
        else:
            print(
                f"error: {found}\n  schema {json.dumps(case.schema)}\n"
                f"  seed {case.seed}, temperature {case.temperature}, "
                f"spaced {case.is_spaced}\n  text {completion.text!r}",
                file=sys.stderr,
            )
    return outcome


def verify() -> int:
    """Returns the exit code: 0 only where all texts are valid.

    Raises:
      ValueError: the package jsonschema is not installed.
    """
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        raise ValueError("jsonschema must be installed: the extra `test`") from None
    cases = make_cases(FLAGS.num_schemas, FLAGS.schema_seed)
    outcome = run_cases(engine_flags.build_llm(), cases, FLAGS.stream_every)
    print(
        f"{outcome.valid}/{outcome.total} valid, {outcome.streamed} of them streamed, "
        f"{outcome.tokens} tokens"
    )
    print(json.dumps(dataclasses.asdict(outcome)))
    return 0 if outcome.valid == outcome.total else 1


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(verify)


if __name__ == "__main__":
    app.run(main)
