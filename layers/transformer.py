"""The pre-norm decoder block over a paged cache, shared by the model families.

Linen defines parameters and the forward pass; at run time parameters are a plain
nested dict. Layers are unrolled: a scan over stacked weights would copy each layer's
weights every step.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from headrace.configs.schema import ModelConfig
from headrace.layers import kv_cache as kv
from headrace.layers import linear
from headrace.layers.inputs import KVGroup, ModelInputs
from headrace.layers.linear import PackedWeight, Weight
from headrace.layers.norm import rms_norm
from headrace.layers.rotary import rotate
from headrace.pallas_kernels.paged_attention.api import paged_attention

RotaryTables = tuple[Float[Array, "B T R"], Float[Array, "B T R"]]
WritePlaces = tuple[Int[Array, "B T"], Int[Array, "B T"]]


class Block(nn.Module):
    """Attention over the pages of one KV group, then a SwiGLU MLP.

    Source: Touvron et al. 2023, section 2.2 (pre-norm, SwiGLU, rotary).
    """

    config: ModelConfig
    kv_group: int
    kv_index: int
    param_dtype: str = "float32"

    def setup(self) -> None:
        """Declares the six arrays of a layer, each with its logical axes."""
        c = self.config
        self.attention_norm = declare_scale(self, "attention_norm", c.model_dim)
        self.qkv, self.out = declare_attention(self, c, c.model_dim)
        self.mlp_norm = declare_scale(self, "mlp_norm", c.model_dim)
        self.gate_up, self.down = declare_mlp(self, c)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        group: KVGroup,
        inputs: ModelInputs,
        *,
        rotary: RotaryTables,
        places: WritePlaces,
    ) -> tuple[Float[Array, "B T D"], KVGroup]:
        """One layer; returns the new hidden states and the group's pools."""
        eps = self.config.norm_eps
        attended, group = attend(
            (self.qkv, self.out),
            rms_norm(x_BTD, self.attention_norm, eps),
            (group, self.kv_group, self.kv_index),
            inputs,
            rotary=rotary,
            places=places,
        )
        x_BTD = x_BTD + attended
        normed_BTD = rms_norm(x_BTD, self.mlp_norm, eps)
        return x_BTD + gated_mlp(self.gate_up, self.down, normed_BTD, inputs), group


def declare_scale(module: nn.Module, name: str, size: int) -> Float[Array, " D"]:
    """A norm's scale."""
    init = nn.with_logical_partitioning(nn.initializers.ones, ("model_dim",))
    return module.param(name, init, (size,), jnp.dtype(module.param_dtype))


def declare_attention(
    module: nn.Module, config: ModelConfig, input_dim: int
) -> tuple[PackedWeight, Weight]:
    """`qkv` and `out` of a layer whose attention reads rows of `input_dim`."""
    D, H, K = config.model_dim, config.head_dim, config.num_kv_heads
    J = config.group_size + 2
    axes = ("kv_heads", "q_per_kv_plus_2", "head_dim", "model_dim")
    qkv = linear.declare(module, "qkv", (K, J, H, input_dim), axes)
    axes = ("model_dim", "heads_times_head_dim")
    return qkv, linear.declare(module, "out", (D, config.num_heads * H), axes)


def declare_mlp(module: nn.Module, config: ModelConfig) -> tuple[PackedWeight, Weight]:
    """`gate_up` and `down` of a layer."""
    D, F = config.model_dim, config.ffw_dim
    axes = ("gate_and_up", "ffw_dim", "model_dim")
    gate_up = linear.declare(module, "gate_up", (2, F, D), axes)
    return gate_up, linear.declare(module, "down", (D, F), ("model_dim", "ffw_dim"))


def attend(
    weights: tuple[PackedWeight, Weight],
    x_BTD: Float[Array, "B T D"],
    pages: tuple[KVGroup, int, int],
    inputs: ModelInputs,
    *,
    rotary: RotaryTables,
    places: WritePlaces,
) -> tuple[Float[Array, "B T D"], KVGroup]:
    """Writes the rows' keys and values, and attends to all of the context.

    Args:
      weights: `qkv` and `out`.
      x_BTD: normed hidden states.
      pages: of the layer's KV group, the group's number, the layer's place in it.
      inputs: of the call.
      rotary: see `rotary.rotary_tables`.
      places: see `kv_cache.write_places`.
    """
    (qkv, out), (group, kv_group, kv_index) = weights, pages
    q_BTKGH, k_BTKH, v_BTKH = linear.packed_qkv(qkv, x_BTD, inputs.query_len_B)
    q_BTKGH, k_BTKH = rotate(q_BTKGH, *rotary), rotate(k_BTKH, *rotary)
    group = kv.write(group, kv_index, places, k_BTKH, v_BTKH)
    out_BTKGH = paged_attention(
        q_BTKGH,
        group[:2],
        kv_index,
        page_table_BM=inputs.page_tables[kv_group],
        positions_BT=inputs.positions_BT,
        context_len_B=inputs.context_len_B,
        scales=kv.scales_of(group),
    )
    flat = out_BTKGH.reshape(*out_BTKGH.shape[:2], -1)
    return linear.matmul(out, flat, inputs.query_len_B), group


def gated_mlp(
    gate_up: PackedWeight,
    down: Weight,
    x_BTD: Float[Array, "B T D"],
    inputs: ModelInputs,
) -> Float[Array, "B T D"]:
    """SwiGLU of normed hidden states. Source: Shazeer 2020, equation 6."""
    gate, up = linear.packed_gate_up(gate_up, x_BTD, inputs.query_len_B)
    return linear.matmul(down, jax.nn.silu(gate) * up, inputs.query_len_B)
