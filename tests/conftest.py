"""Engines shared by the tests: one tiny one, one real one, one compile cache."""

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
