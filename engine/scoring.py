"""How likely the model finds a given text: scores of continuations, perplexity.

A scored text is the prompt of a request that asks for the log-probabilities of its
prompt and is over with its first token. It is always computed as a whole: it takes no
pages from the prefix cache.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.configs.schema import EngineConfig
from headrace.engine import prompts
from headrace.engine.batch_run import Batch
from headrace.engine.new_request import longest_request
from headrace.engine.outputs import RequestOutput
from headrace.engine.prompt_reader import PromptReader
from headrace.engine.sampling_params import SamplingParams


class Pair(NamedTuple):
    """Prompt and continuation as one, and how many tokens are the continuation."""

    prompt: prompts.Prompt
    length: int


PARAMS = SamplingParams(
    temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOutput:
    """How likely one continuation is, token by token.

    Attributes:
      token_ids: of the continuation.
      logprobs: natural log-probability of each, given all before it.
      ranks: of each; 1 is the likeliest token at its place.
      logprob: their sum.
      is_greedy: whether greedy decoding would give just this continuation.
      error: why the pair could not be scored; the rest is then empty.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    ranks: Sequence[int] = ()
    logprob: float = 0.0
    is_greedy: bool = False
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityOutput:
    """Perplexity of one text.

    Attributes:
      perplexity: exp of the mean negative log-probability of a token.
      logprob: natural log-probability of all scored tokens together.
      num_tokens: scored tokens: all but the first.
    """

    perplexity: float
    logprob: float
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Scorer:
    """What scoring needs of an engine.

    Attributes:
      config: resolved.
      reader: token ids of a prompt.
      batch: runs prompts.
    """

    config: EngineConfig
    reader: PromptReader
    batch: Batch

    def run(self, items: Sequence[prompts.Prompt | ValueError]) -> list[RequestOutput]:
        """The log-probabilities of whole prompts."""
        check_scores(self.config)
        return self.batch.run(items, PARAMS)


def check_scores(config: EngineConfig) -> None:
    """Raises ValueError where an engine was not built for it."""
    if not config.scoring:
        raise ValueError("scoring needs an engine with scoring=True in its config")


def score(scorer: Scorer, prompts_: Any, continuations: Any) -> list[ScoreOutput]:
    """Scores pairs of prompt and continuation; see `LLM.score`."""
    firsts = prompts.as_prompts_or_errors(prompts_)
    rests = prompts.as_prompts_or_errors(continuations)
    if len(firsts) != len(rests):
        raise ValueError(
            f"continuations must be as many as prompts, {len(firsts)}, got {len(rests)}"
        )
    pairs = [
        _joined_or_error(scorer.reader, first, rest)
        for first, rest in zip(firsts, rests, strict=True)
    ]
    outputs = scorer.run([pair[0] for pair in pairs])
    return [
        score_output(output, length)
        for output, (_, length) in zip(outputs, pairs, strict=True)
    ]


def _joined_or_error(
    reader: PromptReader,
    first: prompts.Prompt | ValueError,
    rest: prompts.Prompt | ValueError,
) -> tuple[prompts.Prompt | ValueError, int]:
    try:
        for part in (first, rest):
            if isinstance(part, ValueError):
                raise part
        assert isinstance(first, prompts.Prompt) and isinstance(rest, prompts.Prompt)
        return joined(reader, first, rest)
    except ValueError as error:
        return error, 0


def joined(reader: PromptReader, first: prompts.Prompt, rest: prompts.Prompt) -> Pair:
    """One prompt of both.

    Raises:
      ValueError: one of them is empty or cannot be read.
    """
    before = reader.ids(first, add_bos=not first.is_chat)
    after = reader.ids(rest, add_bos=False)
    for name, ids in (("prompt", before), ("continuation", after)):
        if not len(ids):
            raise ValueError(f"the {name} must have at least 1 token, got 0")
    return Pair(prompts.Prompt(token_ids=[*before, *after]), len(after))


def score_output(output: RequestOutput, length: int) -> ScoreOutput:
    """The last `length` tokens of a scored prompt."""
    if (error := _why_not_scored(output)) is not None:
        return ScoreOutput(error=error)
    ids = output.prompt_token_ids[-length:]
    found = _entries(output)[-length:]
    logprobs = [value for value, _ in found]
    ranks = [rank for _, rank in found]
    return ScoreOutput(
        token_ids=ids,
        logprobs=logprobs,
        ranks=ranks,
        logprob=math.fsum(logprobs),
        is_greedy=all(rank == 1 for rank in ranks),
    )


def _why_not_scored(output: RequestOutput) -> str | None:
    """Why some token has no score, None if all have."""
    found, one = output.prompt_logprobs, output.outputs[0]
    if output.error is not None or (found and None not in found[1:]):
        return output.error
    return one.finish_message or f"it ended before it was scored: {one.finish_reason}"


def _entries(output: RequestOutput) -> list[tuple[float, int]]:
    """Log-probability and rank of every token but the first."""
    assert output.prompt_logprobs is not None
    found = []
    ids = output.prompt_token_ids
    for token_id, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        one = entry[token_id]
        assert one.rank is not None
        found.append((one.logprob, one.rank))
    return found


def perplexity(scorer: Scorer, text: Any, stride: int | None) -> PerplexityOutput:
    """Perplexity over sliding windows of the engine's context; see `LLM.perplexity`.

    Every token but the first is scored once. A text that fits one window is scored as
    it is; in a longer one a token sees at least a window less the stride before it.
    """
    window = longest_request(scorer.config)[0] - 1  # a request generates one token
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        raise ValueError(f"stride must be in [1, {window - 1}], got {stride}")
    ids = list(scorer.reader.ids(prompts.as_prompt(text), add_bos=True))
    if len(ids) < 2:
        raise ValueError(f"the text must have at least 2 tokens, got {len(ids)}")
    last = max(0, -(-(len(ids) - window) // stride))  # index of the last window
    begins = [index * stride for index in range(last + 1)]
    items = [prompts.Prompt(token_ids=ids[b : b + window]) for b in begins]
    logprobs: list[float] = []
    for begin, output in zip(begins, scorer.run(items), strict=True):
        if (error := _why_not_scored(output)) is not None:
            raise ValueError(error)
        # Token 1 + k of a window has entry k; those before were scored already.
        entries = _entries(output)[len(logprobs) - begin :]
        logprobs += [value for value, _ in entries]
    total = math.fsum(logprobs)
    return PerplexityOutput(
        perplexity=math.exp(-total / len(logprobs)),
        logprob=total,
        num_tokens=len(logprobs),
    )
