"""The part of verify_exactness that compares an engine with drafts and one without.

Most prompts repeat themselves, so that drafts are accepted; half of the requests are
greedy, half sampled with random parameters.
"""

import json
import sys
from typing import Any

import numpy as np

from headrace.engine.sampling_params import SamplingParams

_LONGEST = 64

# What a request gave: its tokens, and the bits of its log-probabilities.
Result = tuple[list[int], list[list[tuple[int, str]]]]


def trial_requests(
    vocab_size: int, room: int, count: int, seed: int
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters.

    Args:
      vocab_size: of the model.
      room: tokens of a prompt and its output together.
      count: requests.
      seed: of everything random.
    """
    rng = np.random.default_rng(seed)
    most = min(_LONGEST, room // 2)
    asked = []
    for index in range(count):
        part = rng.integers(0, vocab_size, int(rng.integers(2, max(3, most // 3))))
        prompt = np.tile(part, 1 + int(rng.integers(0, most // len(part))))
        is_greedy = index % 2 == 0
        params = SamplingParams(
            temperature=0.0 if is_greedy else float(rng.uniform(0.05, 1.0)),
            top_k=0 if is_greedy else int(rng.choice([0, 1, 5, 50])),
            top_p=1.0 if is_greedy else float(rng.choice([1.0, 0.9, 0.5])),
            min_p=0.0 if is_greedy else float(rng.choice([0.0, 0.1])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.1])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.2])),
            seed=int(rng.integers(0, 2**62)),
            max_tokens=int(rng.integers(1, room - len(prompt))),
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
        )
        asked.append((prompt.tolist(), params))
    return asked


def run_requests(
    llm: Any, asked: list[tuple[list[int], SamplingParams]]
) -> list[Result]:
    """All of them together: token ids, and the bits of each log-probability."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    outputs = llm.generate(prompts, [params for _, params in asked], use_tqdm=False)
    for output in outputs:
        if output.outputs[0].finish_reason == "error":
            raise ValueError(f"a request failed: {output.error}")
    return [result_of(output) for output in outputs]


def result_of(output: Any) -> Result:
    """Tokens and bits of all completions, one after the other."""
    tokens: list[int] = []
    bits = []
    for completion in output.outputs:
        tokens += completion.token_ids
        bits += [
            [(token_id, float(entry.logprob).hex()) for token_id, entry in step.items()]
            for step in completion.logprobs
        ]
    return tokens, bits


def compare(plain: list[Result], drafted: list[Result], stats: dict[str, Any]) -> int:
    """Prints the table and a JSON line; the exit code.

    Args:
      plain: without drafts.
      drafted: with them.
      stats: "speculation" of `LLM.stats`.
    """
    pairs = list(zip(plain, drafted, strict=True))
    tokens = sum(a[0] != b[0] for a, b in pairs)
    bits = sum(a[1] != b[1] for a, b in pairs)
    drafts = stats["num_draft_tokens_per_pos"]
    accepted = stats["num_accepted_tokens_per_pos"]
    print(f"{'draft':<8}{'tried':>8}{'accepted':>10}{'share':>8}")
    for place, (tried, right) in enumerate(zip(drafts, accepted, strict=True), 1):
        print(f"{place:<8}{tried:>8}{right:>10}{right / max(tried, 1):>8.3f}")
    print(
        f"{len(pairs)} requests, {stats['tokens_per_pass']:.2f} tokens per pass; "
        f"{tokens} differ in tokens, {bits} in bits"
    )
    print(json.dumps(stats | {"requests": len(pairs), "differences": tokens + bits}))
    if not stats["num_accepted_tokens"]:
        print("error: no draft was accepted: nothing is shown", file=sys.stderr)
        return 1
    return 1 if tokens or bits else 0
