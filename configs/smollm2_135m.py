"""SmolLM2-135M. Source: the facts stored in the published GGUF file."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the model's shapes and an engine that sizes itself."""
    config = ml_collections.ConfigDict()
    config.model = {
        "family": "llama",
        "num_layers": 30,
        "model_dim": 576,
        "ffw_dim": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "context_len": 8192,
        "rope_base": 100000.0,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
        "bos_id": 1,
        "stop_ids": (2,),
    }
    config.engine = {}
    return config
