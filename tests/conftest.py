"""Engines shared by the tests: one tiny one, one real one, one compile cache."""

import jax
import numpy as np
import pytest

from headrace import LLM
from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import load_config, parse_config


@pytest.fixture(scope="session")
def tiny_config():
    """(ModelConfig, EngineConfig) of the two-layer model."""
    return parse_config(load_config("tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_config):
    """Seeded random weights of the two-layer model."""
    return synthetic_checkpoint(tiny_config[0], seed=3)


@pytest.fixture(scope="session")
def tiny_llm(tiny_config, tiny_checkpoint):
    """An engine over the two-layer model: token ids in, token ids out."""
    llm = LLM.from_checkpoint(tiny_checkpoint, config=tiny_config[1])
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def smollm_llm():
    """SmolLM2 with few buckets, for the tests that need real weights."""
    llm = LLM(
        "smollm2-135m-instruct",
        config={
            "max_context_len": 1024,
            "num_slots": 16,
            "decode_batch_sizes": (8, 16),
            "prefill_shapes": ((1, 64), (1, 256)),
        },
    )
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def dense_logits():
    """(config, params, ids) -> [T, V]: the forward that all others are held against."""
    return _dense_logits


def _dense_logits(config, params, ids):
    """float64, one sequence, no cache, no pages, written from the equations."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    T, H, K, G = len(ids), config.head_dim, config.num_kv_heads, config.group_size
    half = H // 2
    angle = np.arange(T)[:, None] * config.rope_base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rope(x):  # [..., T, H]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = p["embedding"][np.array(ids)]
    for layer in range(config.num_layers):
        w = p[f"layer_{layer}"]
        h = norm(x, w["attention_norm"])
        qkv = np.einsum("kjhd,td->kjth", w["qkv"], h)
        q, k, v = rope(qkv[:, :G]), rope(qkv[:, G]), qkv[:, G + 1]
        score = np.einsum("kgth,ksh->kgts", q, k) / np.sqrt(H)
        score = np.where(np.tri(T, dtype=bool), score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        out = np.einsum("kgts,ksh->tkgh", weight, v).reshape(T, K * G * H)
        x = x + out @ w["out"].T
        h = norm(x, w["mlp_norm"])
        gate, up = h @ w["gate_up"][0].T, h @ w["gate_up"][1].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    head = p["embedding"] if config.tie_embeddings else p["head"]
    return norm(x, p["final_norm"]) @ head.T
