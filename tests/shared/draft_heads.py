"""Writes draft heads in the public layouts, as folders; see `checkpoints/draft_heads`.

What they guess is that the last token comes again: weights of layers are small, and
what the target made of its text passes through. That is right now and then. With a
larger `scale` what came long before has its say.
"""

import json

import numpy as np
import safetensors.numpy


def write_medusa(folder, model, target, *, heads=3, prefix=""):
    """Heads of one residual block each; returns the folder's name."""
    rng, D = np.random.default_rng(1), model.model_dim
    tensors = {}
    for i in range(heads):
        tensors[f"{prefix}{i}.0.linear.weight"] = _small(rng, D, D)
        tensors[f"{prefix}{i}.0.linear.bias"] = _small(rng, D)
        tensors[f"{prefix}{i}.1.weight"] = np.array(target["embedding"])
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1}
    return _write(folder, config, tensors, "medusa_lm_head.safetensors")


def write_eagle(folder, model, *, has_bias=True, scale=0.02):
    """A head of the first kind."""
    rng, D = np.random.default_rng(2), model.model_dim
    passes = np.concatenate([_small(rng, D, D, scale=scale), np.eye(D)], axis=1)
    tensors = {"fc.weight": passes.astype(np.float32)}
    if has_bias:
        tensors["fc.bias"] = _small(rng, D)
    tensors |= _layer("layers.0", model, rng, D, scale)
    tensors["embed_tokens.weight"] = np.zeros((model.vocab_size, D), np.float32)
    return _write(folder, _config(model), tensors)


def write_eagle3(folder, model, target, *, aux_layers=(0, 1), vocab=None, scale=0.02):
    """A head of the third kind that drafts every second token of the vocabulary."""
    rng, D = np.random.default_rng(3), model.model_dim
    vocab = vocab or model.vocab_size // 2
    ids = 2 * np.arange(vocab)
    parts = [np.zeros((D, D))] * (len(aux_layers) - 1) + [np.eye(D)]
    ones = np.ones(D, np.float32)
    tensors = {
        "fc.weight": np.concatenate(parts, axis=1).astype(np.float32),
        "midlayer.hidden_norm.weight": ones,
        "midlayer.input_layernorm.weight": ones,
        "norm.weight": ones,
        "lm_head.weight": np.array(target["embedding"])[ids % model.vocab_size],
        "d2t": ids - np.arange(vocab),
        "t2d": (np.arange(model.vocab_size) % 2 == 0).astype(np.int8),
    } | _layer("midlayer", model, rng, 2 * D, scale)
    config = _config(model) | {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers)}
    }
    return _write(folder, config, tensors)


def _layer(name, model, rng, width, scale):
    D, F, H = model.model_dim, model.ffw_dim, model.head_dim
    rows = {"q": model.num_heads * H, "k": model.num_kv_heads * H}
    rows["v"] = rows["k"]
    return {
        f"{name}.self_attn.{x}_proj.weight": _small(rng, rows[x], width, scale=scale)
        for x in "qkv"
    } | {
        f"{name}.self_attn.o_proj.weight": _small(rng, D, rows["q"], scale=scale),
        f"{name}.mlp.gate_proj.weight": _small(rng, F, D, scale=scale),
        f"{name}.mlp.up_proj.weight": _small(rng, F, D, scale=scale),
        f"{name}.mlp.down_proj.weight": _small(rng, D, F, scale=scale),
        f"{name}.post_attention_layernorm.weight": np.ones(D, np.float32),
    }


def _config(model):
    return {
        "hidden_size": model.model_dim,
        "intermediate_size": model.ffw_dim,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
    }


def _small(rng, *shape, scale=0.02):
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def _write(folder, config, tensors, name="model.safetensors"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / name)
    return str(folder)
