"""The part of train_draft_head that is plain jax: a head's forward, loss and step.

Parameters have the names of the public layout, so what is trained is what is saved.
Attention is dense over whole texts, since pages cannot be differentiated; a test holds
the drafts of the two forms together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from headrace.configs.schema import ModelConfig
from headrace.layers.norm import rms_norm
from headrace.layers.rotary import inverse_frequencies, rotary_tables, rotate

HeadParams = dict[str, Array]

# Of the regression of hidden states against that of tokens. Source: Li et al. 2024,
# section 4.2 (weights), 4.3 (noise on hidden states while training).
_TOKEN_WEIGHT, _NOISE = 0.1, 0.1
# Places of a text whose tokens count in a step: the vocabulary is what costs most.
_TOKEN_PLACES = 32


def first_params(config: ModelConfig, seed: int) -> HeadParams:
    """A head that passes hidden states on as they are."""
    rng = np.random.default_rng(seed)
    D, F, H = config.model_dim, config.ffw_dim, config.head_dim
    N, K = config.num_heads, config.num_kv_heads

    def normal(rows: int, width: int) -> Array:
        return jnp.asarray(
            rng.standard_normal((rows, width), np.float32) / np.float32(np.sqrt(width))
        )

    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    return {
        "fc.weight": jnp.concatenate([0.1 * normal(D, D), jnp.eye(D)], axis=1),
        "fc.bias": jnp.zeros(D),
        f"{attention}.q_proj.weight": normal(N * H, D),
        f"{attention}.k_proj.weight": normal(K * H, D),
        f"{attention}.v_proj.weight": normal(K * H, D),
        f"{attention}.o_proj.weight": jnp.zeros((D, N * H)),
        f"{mlp}.gate_proj.weight": normal(F, D),
        f"{mlp}.up_proj.weight": normal(F, D),
        f"{mlp}.down_proj.weight": jnp.zeros((D, F)),
        "layers.0.post_attention_layernorm.weight": jnp.ones(D),
    }


def guess(
    params: HeadParams,
    config: ModelConfig,
    hidden_BTD: Float[Array, "B T D"],
    token_BTD: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """Hidden states guessed for embedded tokens, as `layers.models.eagle.Eagle` does.

    Args:
      params: of a head of the first kind.
      config: of its layer.
      hidden_BTD: of the target, at positions 0 to T - 1.
      token_BTD: behind each of them.
    """
    both = jnp.concatenate([token_BTD, hidden_BTD], axis=-1)
    x_BTD = both @ params["fc.weight"].T + params["fc.bias"]
    x_BTD = x_BTD + _attended(params, config, x_BTD)
    scale_D = params["layers.0.post_attention_layernorm.weight"]
    normed_BTD = rms_norm(x_BTD, scale_D, config.norm_eps)
    gate, up = (
        normed_BTD @ params[f"layers.0.mlp.{half}_proj.weight"].T
        for half in ("gate", "up")
    )
    return x_BTD + (jax.nn.silu(gate) * up) @ params["layers.0.mlp.down_proj.weight"].T


def _attended(
    params: HeadParams, config: ModelConfig, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    B, T, _ = x_BTD.shape
    K, G, H = config.num_kv_heads, config.group_size, config.head_dim
    frequencies = inverse_frequencies(H, config.rope_base, config.rope_scaling)
    places_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rotary = rotary_tables(places_BT, frequencies)
    q, k, v = (
        x_BTD @ params[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv"
    )
    q_BTKGH = rotate(q.reshape(B, T, K, G, H), *rotary)
    k_BTKH, v_BTKH = rotate(k.reshape(B, T, K, H), *rotary), v.reshape(B, T, K, H)
    z = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH) * H**-0.5
    z = jnp.where(jnp.tri(T, dtype=bool), z, -jnp.inf)
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(z), v_BTKH)
    return out.reshape(B, T, -1) @ params["layers.0.self_attn.o_proj.weight"].T


def loss(
    params: HeadParams,
    batch: dict[str, Array],
    key: Array,
    *,
    config: ModelConfig,
    head_VD: Float[Array, "V D"],
    table_VD: Float[Array, "V D"],
) -> Float[Array, ""]:
    """How far guessed hidden states and their tokens are from the target's.

    Args:
      params: of the head.
      batch: "tokens" [B, T] and "hidden" [B, T, D] of the target.
      key: of noise and of the places whose tokens count.
      config: of the head's layer.
      head_VD: the target's output head.
      table_VD: its embedding.
    """
    tokens_BT, hidden_BTD = batch["tokens"], batch["hidden"]
    noise_key, place_key = jax.random.split(key)
    wanted_BTD = hidden_BTD[:, 1:]
    noise = jax.random.uniform(noise_key, wanted_BTD.shape, minval=-1, maxval=1)
    found_BTD = guess(
        params,
        config,
        hidden_BTD[:, :-1] + _NOISE * noise,
        table_VD[tokens_BT[:, 1:]],
    )
    regression = jnp.mean(optax.huber_loss(found_BTD, wanted_BTD))
    T = wanted_BTD.shape[1]
    place_J = jax.random.choice(place_key, T, (min(T, _TOKEN_PLACES),), replace=False)
    ours = jax.nn.log_softmax(found_BTD[:, place_J] @ head_VD.T)
    theirs = jax.nn.softmax(wanted_BTD[:, place_J] @ head_VD.T)
    tokens = -jnp.mean(jnp.sum(theirs * ours, axis=-1))
    return regression + _TOKEN_WEIGHT * tokens


def training_step(
    config: ModelConfig, weights: dict[str, Array], num_steps: int, rate: float
) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer, and a compiled step.

    Args:
      config: of the head's layer.
      weights: "head_VD" and "table_VD" of the target.
      num_steps: of the whole training; the rate falls to zero over them.
      rate: at its highest.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, min(20, max(1, num_steps // 10)), max(2, num_steps)
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(schedule, b2=0.95)
    )
    value = jax.value_and_grad(functools.partial(loss, config=config))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: HeadParams, state: Any, batch: Any, key: Array, weights: Any):  # type: ignore[no-untyped-def]
        found, gradient = value(params, batch, key, **weights)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, found

    return optimizer, functools.partial(step, weights=weights)


def draft_tokens(
    params: HeadParams,
    config: ModelConfig,
    hidden_TD: Float[Array, "T D"],
    tokens_T: Int[Array, " T"],
    *,
    head_VD: Float[Array, "V D"],
    table_VD: Float[Array, "V D"],
) -> Int[Array, " T-1"]:
    """The first greedy draft behind each token of a text but the first."""
    found = guess(params, config, hidden_TD[None, :-1], table_VD[tokens_T[1:]][None])
    return jnp.argmax(found[0] @ head_VD.T, axis=-1)
