"""EAGLE's draft heads: one decoder layer over the target's hidden states.

A head reads pairs of a hidden state and the token that came of it, and guesses the
hidden state of that token, from which the next draft follows.

Sources: Li et al. 2024 (EAGLE), section 4.1; Li et al. 2025 (EAGLE-3), section 3.1.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from headrace.configs.schema import ModelConfig
from headrace.layers import kv_cache as kv
from headrace.layers import linear
from headrace.layers.inputs import KVCache, ModelInputs
from headrace.layers.norm import rms_norm
from headrace.layers.rotary import inverse_frequencies, rotary_tables
from headrace.layers.transformer import (
    attend,
    declare_attention,
    declare_mlp,
    declare_scale,
    gated_mlp,
)


class Eagle(nn.Module):
    """A head of the first kind, or of the third, which fuses inner hidden states.

    The first joins token and hidden state before its layer and shares the target's
    output head; the third joins them as the input of attention, and has a norm and a
    head of its own.

    Attributes:
      config: of its layer; dimensions of hidden states are the target's.
      num_fused: hidden states that it fuses; 0 is the first kind.
      draft_vocab: rows of its own head.
      param_dtype: of weights that are not quantized.
    """

    config: ModelConfig
    num_fused: int = 0
    draft_vocab: int = 0
    param_dtype: str = "float32"

    def setup(self) -> None:
        """Declares the head's arrays."""
        c, D = self.config, self.config.model_dim
        axes = ("model_dim", "model_dim")
        self.fc = linear.declare(self, "fc", (D, (self.num_fused or 2) * D), axes)
        width = 2 * D if self.num_fused else D
        self.qkv, self.out = declare_attention(self, c, width)
        self.mlp_norm = declare_scale(self, "mlp_norm", D)
        self.gate_up, self.down = declare_mlp(self, c)
        if self.num_fused:
            self.token_norm = declare_scale(self, "token_norm", D)
            self.hidden_norm = declare_scale(self, "hidden_norm", D)
            self.final_norm = declare_scale(self, "final_norm", D)
            axes = ("vocab", "model_dim")
            self.head = linear.declare(self, "head", (self.draft_vocab, D), axes)
        else:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("model_dim",))
            dtype = jnp.dtype(self.param_dtype)
            self.fc_bias = self.param("fc_bias", zeros, (D,), dtype)

    def fuse(self, hidden_BTA: Float[Array, "B T A"]) -> Float[Array, "B T D"]:
        """The target's hidden states as the head takes them."""
        return linear.matmul(self.fc, hidden_BTA) if self.num_fused else hidden_BTA

    def __call__(
        self,
        kv_cache: KVCache,
        inputs: ModelInputs,
        hidden_BTD: Float[Array, "B T D"],
        token_BTD: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Hidden states guessed for the tokens.

        Args:
          kv_cache: the head's own group.
          inputs: positions are those of the hidden states.
          hidden_BTD: fused ones of the target, or guessed before.
          token_BTD: embedded, the token behind each hidden state.
        """
        c = self.config
        (group,) = kv_cache
        rotary = rotary_tables(
            inputs.positions_BT,
            inverse_frequencies(c.head_dim, c.rope_base, c.rope_scaling),
        )
        places = kv.write_places(
            inputs.positions_BT,
            inputs.query_len_B,
            inputs.page_tables[0],
            group[0].shape[3],
        )
        if self.num_fused:
            x_BTD = hidden_BTD
            token_BTD = rms_norm(token_BTD, self.token_norm, c.norm_eps)
            normed_BTD = rms_norm(hidden_BTD, self.hidden_norm, c.norm_eps)
            asks = jnp.concatenate([token_BTD, normed_BTD], axis=-1)
        else:
            both = jnp.concatenate([token_BTD, hidden_BTD], axis=-1)
            x_BTD = linear.matmul(self.fc, both, inputs.query_len_B) + self.fc_bias
            asks = x_BTD
        attended, group = attend(
            (self.qkv, self.out),
            asks,
            (group, 0, 0),
            inputs,
            rotary=rotary,
            places=places,
        )
        x_BTD = x_BTD + attended
        normed_BTD = rms_norm(x_BTD, self.mlp_norm, c.norm_eps)
        return x_BTD + gated_mlp(self.gate_up, self.down, normed_BTD, inputs), (group,)

    def logits(
        self, hidden_BTD: Float[Array, "B T D"], query_len_B: Int[Array, " B"]
    ) -> Float[Array, "B T W"]:
        """Float32 scores of the third kind's own head over its own vocabulary."""
        normed_BTD = rms_norm(hidden_BTD, self.final_norm, self.config.norm_eps)
        return linear.matmul(self.head, normed_BTD, query_len_B, out_dtype=jnp.float32)
