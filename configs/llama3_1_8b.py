"""Llama 3.1 8B. Source: the published config.json and the Llama 3 model card."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the model's shapes and an engine that sizes itself."""
    config = ml_collections.ConfigDict()
    config.model = {
        "family": "llama",
        "num_layers": 32,
        "model_dim": 4096,
        "ffw_dim": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "context_len": 131072,
        "rope_base": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_context_len": 8192,
        },
        "norm_eps": 1e-5,
        "tie_embeddings": False,
        "bos_id": 128000,
        "stop_ids": (128001, 128008, 128009),
    }
    config.engine = {}
    return config
