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
        D, F, H = c.model_dim, c.ffw_dim, c.head_dim
        K, J, NH = c.num_kv_heads, c.group_size + 2, c.num_heads * c.head_dim
        self.attention_norm = self._scale("attention_norm", D)
        self.qkv = linear.declare(
            self,
            "qkv",
            (K, J, H, D),
            ("kv_heads", "q_per_kv_plus_2", "head_dim", "model_dim"),
        )
        self.out = linear.declare(
            self, "out", (D, NH), ("model_dim", "heads_times_head_dim")
        )
        self.mlp_norm = self._scale("mlp_norm", D)
        self.gate_up = linear.declare(
            self, "gate_up", (2, F, D), ("gate_and_up", "ffw_dim", "model_dim")
        )
        self.down = linear.declare(self, "down", (D, F), ("model_dim", "ffw_dim"))

    def _scale(self, name: str, size: int) -> Float[Array, " D"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("model_dim",))
        return self.param(name, init, (size,), jnp.dtype(self.param_dtype))

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
        attended, group = self._attend(
            rms_norm(x_BTD, self.attention_norm, eps), group, inputs, rotary, places
        )
        x_BTD = x_BTD + attended
        query_len_B = inputs.query_len_B
        gate, up = linear.packed_gate_up(
            self.gate_up, rms_norm(x_BTD, self.mlp_norm, eps), query_len_B
        )
        hidden_BTF = jax.nn.silu(gate) * up
        return x_BTD + linear.matmul(self.down, hidden_BTF, query_len_B), group

    def _attend(
        self,
        x_BTD: Float[Array, "B T D"],
        group: KVGroup,
        inputs: ModelInputs,
        rotary: RotaryTables,
        places: WritePlaces,
    ) -> tuple[Float[Array, "B T D"], KVGroup]:
        q_BTKGH, k_BTKH, v_BTKH = linear.packed_qkv(self.qkv, x_BTD, inputs.query_len_B)
        q_BTKGH, k_BTKH = rotate(q_BTKGH, *rotary), rotate(k_BTKH, *rotary)
        group = kv.write(group, self.kv_index, places, k_BTKH, v_BTKH)
        out_BTKGH = paged_attention(
            q_BTKGH,
            group[:2],
            self.kv_index,
            page_table_BM=inputs.page_tables[self.kv_group],
            positions_BT=inputs.positions_BT,
            context_len_B=inputs.context_len_B,
            scales=kv.scales_of(group),
        )
        flat = out_BTKGH.reshape(*out_BTKGH.shape[:2], -1)
        return linear.matmul(self.out, flat, inputs.query_len_B), group
