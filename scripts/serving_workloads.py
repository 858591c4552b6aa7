"""The requests of a serving benchmark: read from JSONL, or drawn with a seed.

Prompts are token ids wherever lengths are drawn, so that every engine with the same
vocabulary computes the same. Knows nothing of servers; what their context cannot hold
is shortened, and counted.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.scripts.bench_scheduling import DISTRIBUTIONS
from headrace.scripts.bench_throughput import workload_path

LOGNORMAL = ("chat-short", "chat-long", "code")
SYNTHETIC = (*LOGNORMAL, "agent", "random", "shared-prefix")
# Names that recorded traces give to what we call arrival_s and max_tokens.
_TIMES, _OUTPUTS = ("arrival_s", "timestamp"), ("max_tokens", "output_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One request.

    Attributes:
      prompt: text, or token ids.
      max_tokens: output tokens, forced unless the run lets the model end.
      arrival_s: when it was recorded to come, seconds on any clock; None: not told.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival_s: float | None = None

    @property
    def prompt_len(self) -> int | None:
        """Prompt tokens; None for a text, which only the server can count."""
        return None if isinstance(self.prompt, str) else len(self.prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What synthetic workloads leave open; None takes the workload's own default.

    Attributes:
      input_len, output_len: tokens, of "random" and "shared-prefix".
      range_ratio: "random" draws uniformly from length * (1 - r) to length * (1 + r).
      num_prefixes, prefix_len: shared beginnings, and the tokens of each.
    """

    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    num_prefixes: int = 8
    prefix_len: int = 256

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prefixes", "prefix_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio must be in [0, 1), got {self.range_ratio}")


def synthetic(
    name: str, count: int, shape: Shape, *, vocab_size: int, seed: int
) -> list[Item]:
    """Draws a workload; the same arguments give the same requests.

    Args:
      name: of SYNTHETIC, or "prompt:output" in tokens, such as "128:2048".
      count: requests.
      vocab_size: ids come from its middle: tokenizers keep special ones at the ends.
      seed: of everything drawn.

    Raises:
      ValueError: an unknown name, or a length of 0.
    """
    rng = np.random.default_rng(seed)
    heads: list[tuple[int, ...]] = [()]
    if name == "shared-prefix":
        lengths = [shape.prefix_len] * shape.num_prefixes
        heads = [_ids(rng, length, vocab_size) for length in lengths]
    prompt_lens, output_lens = _lengths(name, count, shape, rng)
    # Each prefix equally often, in an order that says nothing of the next.
    order = rng.permutation(count) % len(heads)
    return [
        Item(
            prompt=heads[head] + _ids(rng, int(prompt), vocab_size),
            max_tokens=int(output),
        )
        for head, prompt, output in zip(order, prompt_lens, output_lens, strict=True)
    ]


def _ids(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    low, high = min(256, vocab_size // 8), vocab_size - vocab_size // 64
    return tuple(rng.integers(low, high, length).tolist())


def is_synthetic(name: str) -> bool:
    """Whether `synthetic` draws it; else it is a file."""
    prompt, colon, output = name.partition(":")
    is_fixed = bool(colon) and prompt.isdecimal() and output.isdecimal()
    return name in SYNTHETIC or is_fixed


def _lengths(
    name: str, count: int, shape: Shape, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output lengths, [count] each."""
    if name in LOGNORMAL:
        prompt, output = DISTRIBUTIONS[name]
        return _lognormal(rng, count, *prompt), _lognormal(rng, count, *output)
    if name == "agent":
        # Medians and 90th percentiles of Mooncake's conversation trace: prompts 6,900
        # and 27,000; outputs 350 and 597, whose mean is below the median, so normal.
        outputs = np.clip(rng.normal(350, 193, count), 4, 2000).round()
        return _lognormal(rng, count, 8.84, 1.05, 120_000), outputs.astype(int)
    if name in ("random", "shared-prefix"):
        defaults = (1024, 128) if name == "random" else (128, 64)
        ratio = shape.range_ratio if name == "random" else 0.0
        prompt_len, output_len = shape.input_len, shape.output_len
        return (
            _uniform(rng, count, prompt_len or defaults[0], ratio),
            _uniform(rng, count, output_len or defaults[1], ratio),
        )
    if not is_synthetic(name):
        raise ValueError(f"a synthetic workload is one of {SYNTHETIC}, got {name!r}")
    fixed = tuple(map(int, name.split(":")))
    if min(fixed) < 1:
        raise ValueError(f"both lengths must be at least 1, got {name!r}")
    return np.full(count, fixed[0]), np.full(count, fixed[1])


def _lognormal(
    rng: np.random.Generator, count: int, mean: float, sigma: float, most: int
) -> np.ndarray:
    drawn = np.exp(rng.normal(mean, sigma, count))
    return np.clip(drawn, 4, most).round().astype(int)


def _uniform(
    rng: np.random.Generator, count: int, length: int, ratio: float
) -> np.ndarray:
    low, high = math.ceil(length * (1 - ratio)), math.floor(length * (1 + ratio))
    return rng.integers(max(1, low), high + 1, count)


def read_items(
    name: str, count: int | None, *, vocab_size: int, seed: int
) -> list[Item]:
    """Reads a workload or a trace.

    A line has `prompt_token_ids`, `prompt` (text) or `input_length`, for which ids are
    drawn; `max_tokens` or `output_length`; and `arrival_s` or `timestamp`, in seconds,
    if it has times.

    Args:
      name: a path ending in .jsonl, or a name in scripts/workloads/.
      count: only the first requests; None takes all.
      vocab_size, seed: as for `synthetic`.

    Raises:
      ValueError: no such workload, fewer requests than `count`, or a wrong line, by
        its number.
    """
    path = workload_path(name, drawn=("PROMPT:OUTPUT", *SYNTHETIC))
    items, rng = [], np.random.default_rng(seed)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or len(items) == count:
                continue
            try:
                items.append(_item(json.loads(line), rng, vocab_size))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not items or len(items) < (count or 0):
        raise ValueError(f"{path} holds {len(items)} requests, wanted {count or 1}")
    return items


def _item(row: Any, rng: np.random.Generator, vocab_size: int) -> Item:
    if not isinstance(row, Mapping):
        raise ValueError(f"a line must be an object, got {type(row).__name__}")
    output = next((row[name] for name in _OUTPUTS if name in row), None)
    if type(output) is not int or output < 1:
        raise ValueError(f"{' or '.join(_OUTPUTS)} must be 1 or more, got {output!r}")
    arrival_s = next((row[name] for name in _TIMES if name in row), None)
    if arrival_s is not None and type(arrival_s) not in (int, float):
        raise ValueError(f"{' or '.join(_TIMES)} must be seconds, got {arrival_s!r}")
    prompt: str | tuple[int, ...]
    if "prompt_token_ids" in row:
        prompt = tuple(row["prompt_token_ids"])
        if not all(type(one) is int and one >= 0 for one in prompt):
            raise ValueError("prompt_token_ids must be whole numbers, 0 or more")
    elif "prompt" in row:
        prompt = row["prompt"]
    else:
        length = row.get("input_length")
        if type(length) is not int or length < 1:
            raise ValueError(f"input_length must be 1 or more, got {length!r}")
        prompt = _ids(rng, length, vocab_size)
    if not prompt or not isinstance(prompt, str | tuple):
        raise ValueError("the prompt must be a text or token ids, and not empty")
    return Item(prompt=prompt, max_tokens=output, arrival_s=arrival_s)


def folded(items: list[Item], vocab_size: int) -> tuple[list[Item], int]:
    """Brings ids into a vocabulary, for models that are smaller than the workload's.

    Returns:
      The requests, and how many of them had an id outside.
    """

    def fold(item: Item) -> Item:
        if isinstance(item.prompt, str) or max(item.prompt) < vocab_size:
            return item
        prompt = tuple(one % vocab_size for one in item.prompt)
        return dataclasses.replace(item, prompt=prompt)

    fitting = [fold(item) for item in items]
    return fitting, _num_changed(items, fitting)


def clipped(items: list[Item], context_len: int | None) -> tuple[list[Item], int]:
    """Shortens what a context cannot hold; texts stay as they are.

    Of a request that is too long the output keeps half of the context, or more where
    the prompt leaves more, and the prompt its first tokens.

    Args:
      context_len: longest prompt plus output, at least 2; None: not known.

    Returns:
      The requests, and how many of them were shortened.

    Raises:
      ValueError: a context of less than 2 tokens.
    """
    if context_len is None:
        return items, 0
    if context_len < 2:
        raise ValueError(f"the context must hold at least 2 tokens, got {context_len}")
    fitting = [_fitted(item, context_len) for item in items]
    return fitting, _num_changed(items, fitting)


def _num_changed(before: list[Item], after: list[Item]) -> int:
    return sum(a is not b for a, b in zip(before, after, strict=True))


def _fitted(item: Item, context_len: int) -> Item:
    if isinstance(item.prompt, str):
        return item
    if len(item.prompt) + item.max_tokens <= context_len:
        return item
    most = max(context_len // 2, context_len - len(item.prompt))
    output = min(item.max_tokens, most)
    prompt = item.prompt[: context_len - output]
    return dataclasses.replace(item, prompt=prompt, max_tokens=output)
