"""A small engine on the card: the probe's verdict, bits in company, greedy tokens.

Built of the engine's own parts over synthetic weights: no tokenizer, no files.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.configs import load_config, parse_config
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.loop import EngineLoop
from headrace.engine.model_runner import ModelRunner
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.warmup import warm_up
from headrace.layers.models import param_shapes
from headrace.scripts.selfcheck_device import Setup
from headrace.scripts.selfcheck_naive import naive_logits
from headrace.scripts.selfcheck_report import Part

# Two logits as near as this are a tie; rounding may take either.
TIE = 1e-2

# What a request gave: its tokens, and the bits of its log-probabilities.
Result = tuple[list[int], list[list[tuple[int, str]]]]


def random_params(model: ModelConfig, dtype: str, seed: int) -> dict[str, Any]:
    """Weights as of `checkpoints.synthetic`, but drawn on the device."""
    shapes, tree = jax.tree.flatten(
        param_shapes(model), is_leaf=lambda node: isinstance(node, tuple)
    )
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    leaves = [_drawn(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)


def filled(config: EngineConfig, setup: Setup) -> EngineConfig:
    """The config without Nones: a pool for all slots, no host memory."""
    assert config.max_context_len and config.num_slots
    dtype = "float32" if setup.is_smoke else "bfloat16"
    pages = -(-config.max_context_len // config.page_size)
    return dataclasses.replace(
        config,
        num_pages=config.num_slots * pages + 1,
        param_dtype=dtype,
        kv_dtype=dtype,
        memory_fraction=0.5,
        host_kv_bytes=0,
        compile_threads=2 if setup.is_smoke else 12,
    )


def small_engine(setup: Setup) -> tuple[ModelConfig, EngineConfig]:
    """A model like Llama 3.1 8B in all but size, served by the same kernels."""
    model, _ = parse_config(load_config("tiny"))
    if setup.is_smoke:
        sizes: dict[str, Any] = {
            "max_context_len": 128,
            "page_size": 16,
            "num_slots": 3,
            "decode_batch_sizes": (3,),
            "prefill_shapes": ((1, 32),),
        }
        return model, filled(EngineConfig(**sizes), setup)
    model = dataclasses.replace(
        model,
        num_layers=4,
        model_dim=1024,
        ffw_dim=2816,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=16384,
        context_len=4096,
        tie_embeddings=False,
    )
    sizes = {
        "max_context_len": 1024,
        "num_slots": 32,
        "decode_batch_sizes": (8, 16, 32),
        "prefill_shapes": ((1, 128), (1, 512)),
    }
    return model, filled(EngineConfig(**sizes), setup)


def engine(part: Part, setup: Setup) -> None:
    """Builds the engine and runs requests alone, in company, in other slots."""
    model, config = small_engine(setup)
    assert config.param_dtype
    params = random_params(model, config.param_dtype, setup.seed)
    runner = ModelRunner(model, config, params)
    runner.compile_all()
    config = _probed(part, runner)
    for line in runner.ledger.table().splitlines():
        part.say(line)
    entries = runner.ledger.entries
    part.facts(
        verdict=runner.ledger.verdict,
        bit_classes={name: entry.bit_class for name, entry in entries.items()},
        unused=[name for name, entry in entries.items() if not entry.used],
        compile_s={name: round(e.seconds, 2) for name, e in entries.items()},
    )
    loop = EngineLoop(runner, config, model, tokenizer=None, identity="synthetic")
    requests = _requests(model, config, setup)
    everyone = range(len(requests))
    alone = {i: _wave(loop, requests, [i])[i] for i in everyone}
    orders = {"in company": list(everyone), "in other slots": list(everyone)[::-1]}
    for name, order in orders.items():
        together = _wave(loop, requests, order)
        part.check(
            f"{len(order)} requests {name} give the bits that they give alone",
            together == alone,
            tokens_differ=sum(together[i][0] != alone[i][0] for i in order),
            bits_differ=sum(together[i][1] != alone[i][1] for i in order),
        )
    greedy = [i for i in everyone if requests[i][1].temperature == 0]
    sequences = [(requests[i][0], alone[i][0]) for i in greedy]
    check_greedy(part, params, model, sequences, config.param_dtype)
    loop.close()


def _probed(part: Part, runner: ModelRunner) -> EngineConfig:
    """The config that the probe leaves; without invariance what "fast" leaves."""
    try:
        config = warm_up(runner, None)
    except ValueError as error:
        part.check("the probe finds programs of one bit class per role", False)
        part.facts(probe_error=str(error))
        runner.config = dataclasses.replace(runner.config, numerics="fast")
        return warm_up(runner, None)
    part.check(
        "the probe finds programs of one bit class per role",
        True,
        decode=config.decode_batch_sizes,
        prefill=config.prefill_shapes,
    )
    return config


def _requests(
    model: ModelConfig, config: EngineConfig, setup: Setup
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts around the edges of pages and chunks; every second is greedy."""
    rng = np.random.default_rng(setup.seed)
    lengths = [1, 63, 64, 65, 127, 128, 129, 200, 513, 700, 30, 512]
    max_tokens = 48
    if setup.is_smoke:
        lengths, max_tokens = [1, 16, 40], 5
    requests = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, model.vocab_size, length).tolist()
        params = SamplingParams(
            temperature=0.0 if i % 2 == 0 else 0.8,
            top_p=1.0 if i % 2 == 0 else 0.95,
            seed=int(rng.integers(0, 2**62)),
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=min(5, config.max_logprobs),
            detokenize=False,
        )
        requests.append((ids, params))
    return requests


def _wave(
    loop: EngineLoop, requests: Sequence[tuple], order: list[int]
) -> dict[int, Result]:
    """Runs some requests together, submitted in this order."""
    states = {i: loop.submit(*requests[i], uses_cache=False) for i in order}
    while any(not state.is_finished for state in states.values()):
        loop.turn()
    loop.drop(*states.values())
    return {i: _result(state.output()) for i, state in states.items()}


def _result(output: Any) -> Result:
    (completion,) = output.outputs
    bits = [
        [(token_id, float(entry.logprob).hex()) for token_id, entry in step.items()]
        for step in completion.logprobs
    ]
    return list(completion.token_ids), bits


def check_greedy(
    part: Part,
    params: dict[str, Any],
    model: ModelConfig,
    sequences: list[tuple[list[int], list[int]]],
    dtype: str,
) -> None:
    """Holds (prompt, tokens) against the naive loop: each token is its argmax.

    Where it is not, the gap between the two logits is listed; one above a tie, and
    above twice what rounding to `dtype` moves any logit, fails.
    """
    longest = max(len(prompt) + len(tokens) for prompt, tokens in sequences)

    def scores(tokens_T: jax.Array) -> tuple[jax.Array, ...]:
        logits_TV = naive_logits(params, model, tokens_T, jnp.dtype(dtype))
        with jax.default_matmul_precision("highest"):
            exact_TV = naive_logits(params, model, tokens_T, jnp.float32)
        following_T1 = jnp.roll(tokens_T, -1)[:, None]
        taken_T = jnp.take_along_axis(logits_TV, following_T1, 1)[:, 0]
        moved_T = jnp.abs(logits_TV - exact_TV).max(-1)
        return logits_TV.max(-1) - taken_T, moved_T

    score = jax.jit(scores)
    flips, num_tokens, noise = [], 0, 0.0
    for place, (prompt, tokens) in enumerate(sequences):
        ids = [*prompt, *tokens]
        padded = np.array(ids + [0] * (longest - len(ids)), np.int32)
        gap_T, moved_T = (np.asarray(array) for array in score(padded))
        noise = max(noise, float(moved_T[: len(ids)].max()))
        num_tokens += len(tokens)
        for step in range(len(tokens)):
            gap = float(gap_T[len(prompt) + step - 1])
            if gap > 0:
                flips.append({"request": place, "token": step, "gap": gap})
    limit = max(TIE, 2 * noise)
    for flip in flips:
        part.say(f"not the naive loop's token: {flip}")
    part.facts(flips=flips, rounding_of_logits=noise)
    part.check(
        "greedy tokens are those of the naive loop, but for ties",
        all(flip["gap"] <= limit for flip in flips),
        tokens=num_tokens,
        flips=len(flips),
        largest_gap=max((flip["gap"] for flip in flips), default=0.0),
        limit=limit,
    )
