"""A Llama without cache, pages or kernels: what greedy tokens are held against.

One forward over the whole sequence, dense attention, rounded to the storage type where
the engine's model rounds. Written anew: it shares no code with layers/.
"""

from typing import Any

import jax
import jax.numpy as jnp

from headrace.configs.schema import ModelConfig


def naive_logits(
    params: dict[str, Any], model: ModelConfig, tokens_T: jax.Array, dtype: Any
) -> jax.Array:
    """Logits [T, V] in float32.

    Args:
      params: the engine's own arrays.
      model: of the family llama, without rope_scaling.
      tokens_T: int32.
      dtype: to compute in; float32 tells what rounding costs.
    """
    assert model.family == "llama" and model.rope_scaling is None
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    x_TD = params["embedding"][tokens_T]
    for layer in range(model.num_layers):
        weights = params[f"layer_{layer}"]
        normed_TD = _norm(x_TD, weights["attention_norm"], model.norm_eps)
        x_TD = x_TD + _attend(normed_TD, weights, model)
        normed_TD = _norm(x_TD, weights["mlp_norm"], model.norm_eps)
        gate_TF, up_TF = (_product(normed_TD, w_FD) for w_FD in weights["gate_up"])
        x_TD = x_TD + _product(jax.nn.silu(gate_TF) * up_TF, weights["down"])
    hidden_TD = _norm(x_TD, params["final_norm"], model.norm_eps)
    head_VD = params["embedding"] if model.tie_embeddings else params["head"]
    return jnp.einsum("td,vd->tv", hidden_TD, head_VD, preferred_element_type="float32")


def _norm(x_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    wide = x_TD.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide / size * scale_D.astype(jnp.float32)).astype(x_TD.dtype)


def _product(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    return jnp.einsum("ti,oi->to", x_TI, w_OI)


def _attend(x_TD: jax.Array, weights: dict[str, Any], model: ModelConfig) -> jax.Array:
    T, D = x_TD.shape
    K, G, H = model.num_kv_heads, model.group_size, model.head_dim
    y_TKJH = jnp.einsum("td,kjhd->tkjh", x_TD, weights["qkv"])
    q_TKGH = _rotate(y_TKJH[:, :, :G], model.rope_base).astype(jnp.float32)
    k_TKH = _rotate(y_TKJH[:, :, G : G + 1], model.rope_base)[:, :, 0]
    score = jnp.einsum("tkgh,skh->kgts", q_TKGH, k_TKH.astype(jnp.float32)) * H**-0.5
    is_past_TS = jnp.arange(T)[:, None] >= jnp.arange(T)
    weight = jax.nn.softmax(jnp.where(is_past_TS, score, -jnp.inf), -1)
    v_TKH = y_TKJH[:, :, G + 1].astype(jnp.float32)
    out_TKGH = jnp.einsum("kgts,skh->tkgh", weight, v_TKH).astype(x_TD.dtype)
    return _product(out_TKGH.reshape(T, K * G * H), weights["out"])


def _rotate(x_TKJH: jax.Array, base: float) -> jax.Array:
    """Dimension i turns with i + H/2 by position * base^(-2 i / H)."""
    T, _, _, H = x_TKJH.shape
    turn_R = base ** (-2 * jnp.arange(H // 2) / H)
    angle = (jnp.arange(T)[:, None] * turn_R)[:, None, None, :]
    first, second = jnp.split(x_TKJH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x_TKJH.dtype)
