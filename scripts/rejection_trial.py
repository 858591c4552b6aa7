"""The part of verify_exactness that compares distributions: rejection against plain.

Each prompt is continued many times by both engines, with other seeds, and the first
tokens that drafts may bring are counted. Two samples of one distribution differ by
chance; how much is known, and what would have been seen is told with it.
"""

import collections
import dataclasses
import json
import sys
from typing import Any

import numpy as np

from headrace.engine.sampling_params import SamplingParams

# The first token comes from a prefill; the two behind it from a pass with drafts.
_NUM_TOKENS = 3
_NUM_PROMPTS, _TOP_K, _TEMPERATURE = 6, 4, 0.8
_LEAST_COUNT = 10
_SPLITS = 500
SIGNIFICANCE = 1e-3
# The distance that the power is told for.
_DISTANCE = 0.1

Counts = collections.Counter[tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two samples of continuations of one prompt.

    Attributes:
      chi_square, freedom: of the hypothesis that both follow one distribution.
      distance: total variation between the samples.
      by_chance: 99 % of pairs of samples of one distribution are nearer.
      noncentrality: the least of chi_square's, were the distributions _DISTANCE apart.
    """

    chi_square: float
    freedom: int
    distance: float
    by_chance: float
    noncentrality: float


def draw(llm: Any, draws: int, seed: int) -> list[Counts]:
    """Continuations of each prompt, counted.

    Args:
      llm: an engine.
      draws: of each prompt.
      seed: of prompts; those of requests differ from engine to engine.
    """
    rng = np.random.default_rng(seed)
    asked, params = [], []
    first = 0 if llm.engine_config.draft is None else 2**40
    for prompt in range(_NUM_PROMPTS):
        part = rng.integers(0, llm.model_config.vocab_size, 6).tolist()
        asked += [{"prompt_token_ids": part * 3}] * draws
        params += [
            SamplingParams(
                temperature=_TEMPERATURE, top_k=_TOP_K, max_tokens=_NUM_TOKENS + 3,
                ignore_eos=True, detokenize=False, seed=first + prompt * draws + index,
            )
            for index in range(draws)
        ]  # fmt: skip
    outputs = llm.generate(asked, params, use_tqdm=False)
    tokens = [tuple(o.outputs[0].token_ids[:_NUM_TOKENS]) for o in outputs]
    return [
        collections.Counter(tokens[prompt * draws : (prompt + 1) * draws])
        for prompt in range(_NUM_PROMPTS)
    ]


def compare_counts(one: Counts, two: Counts, seed: int) -> Comparison:
    """Two samples of the same size; outcomes that are rare in both count as one."""
    keys = sorted(one.keys() | two.keys())
    table_2K = np.array([[sample[key] for key in keys] for sample in (one, two)])
    draws = int(table_2K[0].sum())
    often_K = table_2K.sum(axis=0) >= _LEAST_COUNT
    rare = table_2K[:, ~often_K].sum(axis=1, keepdims=True)
    cells_2K = np.concatenate([table_2K[:, often_K], rare], axis=1)
    cells_2K = cells_2K[:, cells_2K.sum(axis=0) > 0]
    both_K = cells_2K.sum(axis=0)
    chi_square = float(np.sum((cells_2K[0] - cells_2K[1]) ** 2 / both_K))
    rng = np.random.default_rng(seed)
    split_SK = rng.multivariate_hypergeometric(table_2K.sum(axis=0), draws, _SPLITS)
    differences_SK = np.abs(2 * split_SK - table_2K.sum(axis=0))
    distances_S = differences_SK.sum(axis=1) / (2 * draws)
    return Comparison(
        chi_square=chi_square,
        freedom=len(both_K) - 1,
        distance=float(np.abs(table_2K[0] - table_2K[1]).sum() / (2 * draws)),
        by_chance=float(np.quantile(distances_S, 0.99)),
        # It is least where one half of the mass gives to the other in proportion.
        noncentrality=draws / 2 * 4 * _DISTANCE**2 if len(both_K) > 1 else 0.0,
    )


def report(
    plain: list[Counts], drafted: list[Counts], stats: dict[str, Any], seed: int
) -> int:
    """Prints the table and a JSON line; the exit code.

    Args:
      plain: without drafts.
      drafted: with drafts that are accepted by rejection sampling.
      stats: "speculation" of `LLM.stats`.
      seed: of the splits that say what chance does.
    """
    import scipy.stats

    pairs = zip(plain, drafted, strict=True)
    found = [compare_counts(one, two, seed) for one, two in pairs]
    print(f"{'prompt':<8}{'outcomes':>9}{'chi2':>9}{'distance':>10}{'99 % chance':>13}")
    for prompt, one in enumerate(found, 1):
        print(
            f"{prompt:<8}{one.freedom + 1:>9}{one.chi_square:>9.1f}"
            f"{one.distance:>10.3f}{one.by_chance:>13.3f}"
        )
    chi_square = sum(one.chi_square for one in found)
    freedom = sum(one.freedom for one in found)
    p_value = float(scipy.stats.chi2.sf(chi_square, freedom))
    bound = scipy.stats.chi2.isf(SIGNIFICANCE, freedom)
    shift = sum(one.noncentrality for one in found)
    power = float(scipy.stats.ncx2.sf(bound, freedom, shift))
    passed, accepted = stats["tokens_per_pass"], stats["num_accepted_tokens"]
    print(
        f"{plain[0].total()} draws of each: chi-square {chi_square:.1f} for {freedom} "
        f"degrees of freedom, p = {p_value:.3g} (fails under {SIGNIFICANCE}); a "
        f"distance of {_DISTANCE} would be seen with probability {power:.3f}; "
        f"{passed:.2f} tokens per pass"
    )
    facts = {"p_value": p_value, "power": power, "draws": plain[0].total()}
    print(json.dumps(stats | facts))
    if not accepted:
        print("error: no draft was accepted: nothing is shown", file=sys.stderr)
        return 1
    return 1 if p_value < SIGNIFICANCE else 0
