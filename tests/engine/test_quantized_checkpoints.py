"""Engines over published quantized formats give the dequantized model's tokens."""

import ml_dtypes
import numpy as np
import pytest
import quantized_folders as qf
from quantized_cases import CASES, write_case

from headrace import LLM, SamplingParams
from headrace.checkpoints.load import load_checkpoint
from headrace.configs.schema import EngineConfig
from headrace.engine import sizing
from headrace.engine.device_facts import device_facts, with_weights_of
from headrace.layers.quantized import tree_bytes
from headrace.pallas_kernels.quantized_matmul import api

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
CONFIG = {
    "max_context_len": 128, "page_size": 16, "num_pages": 65, "num_slots": 8,
    "decode_batch_sizes": (8,), "prefill_shapes": ((1, 32),),
}  # fmt: skip
# One of each layout of arrays (each is compiled anew), and every packing of int4.
WEIGHTS_ONLY = ["awq", "awq_plain", "gptq", "gptq_v2", "gptq_order", "ct_int4",
                "ct_int4_zeros", "ct_int8", "ct_fp8", "fp8_block"]  # fmt: skip
ACTIVATIONS = ["ct_w8a8", "ct_w8a8_static", "fp8_static"]


def _prompts():
    rng = np.random.default_rng(1)
    return [
        {"prompt_token_ids": rng.integers(1, qf.V, n).tolist()} for n in (5, 40, 17)
    ]


def generate(folder):
    """Tokens and log-probabilities, and the config."""
    llm = LLM(folder, config=CONFIG)
    outputs = [o.outputs[0] for o in llm.generate(_prompts(), GREEDY, use_tqdm=False)]
    logprobs = [[next(iter(e.values())).logprob for e in o.logprobs] for o in outputs]
    llm.close()
    return [o.token_ids for o in outputs], logprobs, llm.engine_config


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_greedy_tokens_are_those_of_the_dequantized_model(name, tmp_path):
    weights = write_case(tmp_path / "hf", name)
    qf.write_tensors(tmp_path / "plain", weights, None)
    tokens, logprobs, config = generate(tmp_path / "hf")
    plain_tokens, plain_logprobs, _ = generate(tmp_path / "plain")
    assert tokens == plain_tokens
    if api.cpu_identity() and "order" not in name:
        assert logprobs == plain_logprobs
    np.testing.assert_allclose(logprobs, plain_logprobs, atol=1e-4)
    assert config.quantization == CASES[name][3]


def _fake_quantized(x, kind, fixed):
    """Rows rounded to 8 bits and back."""
    limit = 127 if kind == "int8" else 448
    scale = fixed or np.abs(x).max(-1, keepdims=True) / limit
    scaled = np.clip(x / scale, -limit, limit).astype(np.float32)
    dtype = ml_dtypes.float8_e4m3fn
    rounded = np.rint(scaled) if kind == "int8" else scaled.astype(dtype)
    return rounded.astype(np.float32) * np.float32(scale)


def _forward(weights, scales, kind, ids):
    """Logits [T, V] of one sequence, activations rounded before each linear layer."""
    G, half = qf.N // qf.K, qf.H // 2
    steps = np.arange(half) / half
    angle = np.arange(len(ids))[:, None] * 5000.0**-steps
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def rope(x):
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(x, num):
        return x.reshape(len(ids), num, qf.H).transpose(1, 0, 2)

    x = weights["model.embed_tokens.weight"][np.array(ids)].astype(np.float64)
    for layer in range(qf.L):

        def linear(part, x, layer=layer):
            name = f"model.layers.{layer}.{part}_proj"
            rounded = _fake_quantized(x, kind, scales.get(name))
            return rounded.astype(np.float64) @ weights[f"{name}.weight"].T

        h = norm(x)
        q, k, v = (linear(f"self_attn.{part}", h) for part in "qkv")
        q, k, v = rope(heads(q, qf.N)), rope(heads(k, qf.K)), heads(v, qf.K)
        k, v = np.repeat(k, G, 0), np.repeat(v, G, 0)
        score = q @ k.transpose(0, 2, 1) / np.sqrt(qf.H)
        score = np.where(np.tri(len(ids), dtype=bool), score, -np.inf)
        share = np.exp(score - score.max(-1, keepdims=True))
        mixed = share / share.sum(-1, keepdims=True) @ v
        x = x + linear("self_attn.o", mixed.transpose(1, 0, 2).reshape(len(ids), -1))
        h = norm(x)
        gate, up = linear("mlp.gate", h), linear("mlp.up", h)
        x = x + linear("mlp.down", gate / (1 + np.exp(-gate)) * up)
    return norm(x) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rounded_activations_follow_the_formats_own_scales(name, tmp_path):
    """Rounding is no smooth function, so this is near, not equal."""
    weights = write_case(tmp_path / "hf", name)
    scales = {}
    if "static" in name:
        from headrace.checkpoints.safetensors_source import SafetensorsSource

        source = SafetensorsSource(tmp_path / "hf")
        names = [n for n in source.names() if n.endswith(".input_scale")]
        scales = {n.removesuffix(".input_scale"): source.stored(n)[0] for n in names}
        assert len(set(scales.values())) == 7 * qf.L
    kind = "int8" if name.startswith("ct_w8a8") else "fp8"
    tokens, logprobs, _ = generate(tmp_path / "hf")
    for prompt, made, said in zip(_prompts(), tokens, logprobs, strict=True):
        ids = prompt["prompt_token_ids"] + list(made)
        logits = _forward(weights, scales, kind, ids)[len(ids) - len(made) - 1 : -1]
        shifted = logits - logits.max(-1, keepdims=True)
        wanted = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        ours = wanted[np.arange(len(made)), list(made)]
        np.testing.assert_allclose(ours, said, atol=0.05)
        assert (wanted.max(-1) - ours < 0.05).all()


@pytest.mark.parametrize("name", ["gptq_order", "ct_w8a8_static", "awq"])
def test_the_plan_counts_the_weights_that_are_there(name, tmp_path):
    """Orders of inputs, scales of activations and parts that differ included."""
    write_case(tmp_path / "hf", name)
    checkpoint = load_checkpoint(tmp_path / "hf")
    facts = with_weights_of(checkpoint, device_facts(checkpoint.params))
    config = sizing.resolve(checkpoint.config, EngineConfig(**CONFIG), facts)
    plan = sizing.plan_of(checkpoint.config, config, facts)
    assert plan.weights_bytes == tree_bytes(checkpoint.params)


def test_weights_that_came_quantized_are_what_the_engine_says(tmp_path):
    write_case(tmp_path / "hf", "awq_plain")
    checkpoint = load_checkpoint(tmp_path / "hf")
    llm = LLM.from_checkpoint(checkpoint, config=CONFIG)
    assert llm.engine_config.quantization == "int4-g32-z"
    assert "layer_0/qkv" in llm.engine_config.quantization_skip
    llm.close()
