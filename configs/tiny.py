"""A two-layer model with random weights: what feature tests run on."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns shapes small enough to compile in a second on a CPU."""
    config = ml_collections.ConfigDict()
    config.model = {
        "family": "llama",
        "num_layers": 2,
        "model_dim": 256,
        "ffw_dim": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
        "vocab_size": 512,
        "context_len": 1024,
        "rope_base": 10000.0,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
        "bos_id": None,
        "stop_ids": (0,),
    }
    config.engine = {
        "max_context_len": 512,
        "page_size": 16,
        "num_pages": 257,
        "num_slots": 12,
        "decode_batch_sizes": (8, 12),
        "prefill_shapes": ((1, 32), (1, 128)),
    }
    return config
