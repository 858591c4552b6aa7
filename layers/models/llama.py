"""The Llama family: Llama 2/3.x and SmolLM2.

`apply(params, kv_cache, inputs) -> (ModelOutput, kv_cache)` for decode, verify and
prefill alike, and `logits` for the head, which the engine runs on few rows only.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from headrace.configs.schema import ModelConfig
from headrace.layers import kv_cache as kv
from headrace.layers import linear
from headrace.layers.inputs import KVCache, ModelInputs, ModelOutput, Params
from headrace.layers.norm import rms_norm
from headrace.layers.rotary import inverse_frequencies, rotary_tables
from headrace.layers.transformer import Block


class Llama(nn.Module):
    """Embedding, unrolled blocks, final norm, tied or untied head."""

    config: ModelConfig
    param_dtype: str = "float32"
    kv_skip: tuple[int, ...] = ()
    aux_layers: tuple[int, ...] = ()

    def setup(self) -> None:
        """Declares the embedding, the blocks, the final norm and the head."""
        c = self.config
        V, D = c.vocab_size, c.model_dim
        dtype = jnp.dtype(self.param_dtype)
        axes = ("vocab", "model_dim")
        self.embedding = linear.declare(self, "embedding", (V, D), axes)
        for layer, (group, index) in enumerate(kv.layer_slots(c, self.kv_skip)):
            block = Block(c, group, index, self.param_dtype, name=f"layer_{layer}")
            setattr(self, f"block_{layer}", block)
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("model_dim",))
        self.final_norm = self.param("final_norm", ones, (D,), dtype)
        if not c.tie_embeddings:
            self.head = linear.declare(self, "head", (V, D), axes)

    def __call__(
        self, kv_cache: KVCache, inputs: ModelInputs
    ) -> tuple[ModelOutput, KVCache]:
        """Runs all layers on the call's tokens and writes their keys and values.

        Args:
          kv_cache: one pair of pools per KV group.
          inputs: see ModelInputs.

        Returns:
          Normed hidden states of every token, with what goes into each of
          `aux_layers`, and the updated cache.
        """
        c = self.config
        groups = list(kv_cache)
        page_size = groups[0][0].shape[3]
        rotary = rotary_tables(
            inputs.positions_BT,
            inverse_frequencies(c.head_dim, c.rope_base, c.rope_scaling),
        )
        places = [
            kv.write_places(inputs.positions_BT, inputs.query_len_B, table, page_size)
            for table in inputs.page_tables
        ]
        x_BTD = linear.embed(self.embedding, inputs.tokens_BT, self.param_dtype)
        aux_hidden = []
        for layer, (group, _) in enumerate(kv.layer_slots(c, self.kv_skip)):
            if layer in self.aux_layers:
                aux_hidden.append(x_BTD)
            x_BTD, groups[group] = getattr(self, f"block_{layer}")(
                x_BTD, groups[group], inputs, rotary=rotary, places=places[group]
            )
        hidden_BTD = rms_norm(x_BTD, self.final_norm, c.norm_eps)
        output = ModelOutput(hidden_BTD=hidden_BTD, aux_hidden=tuple(aux_hidden))
        return output, tuple(groups)

    def logits(
        self,
        hidden_XD: Float[Array, "*X D"],
        query_len_B: Int[Array, " B"] | None = None,
    ) -> Float[Array, "*X V"]:
        """Float32 scores over the vocabulary for normed hidden states.

        Args:
          hidden_XD: any number of leading axes.
          query_len_B: valid tokens of each row, if they are [B, T, D]; the others'
            scores need not be computed.
        """
        head = self.embedding if self.config.tie_embeddings else self.head
        return linear.matmul(head, hidden_XD, query_len_B, out_dtype=jnp.float32)


def param_specs(config: ModelConfig, param_dtype: str = "float32") -> Params:
    """The parameter tree as boxed ShapeDtypeStructs with logical axis names."""
    model = Llama(config, param_dtype)

    def init(rng: Array) -> Params:
        row = jnp.zeros((1, 1), jnp.int32)
        inputs = ModelInputs(
            tokens_BT=row,
            positions_BT=row,
            query_len_B=row[0],
            context_len_B=row[0],
            page_tables=(row,),
        )
        storage = kv.KVStorage(dtype="float32")
        cache = kv.allocate(config, num_pages=1, page_size=16, storage=storage)
        return model.init(rng, cache, inputs)["params"]

    return jax.eval_shape(init, jax.ShapeDtypeStruct((2,), jnp.uint32))


def param_shapes(config: ModelConfig) -> dict:
    """The parameter tree with a shape tuple in each array's place."""
    return jax.tree.map(lambda leaf: leaf.shape, nn.unbox(param_specs(config)))
