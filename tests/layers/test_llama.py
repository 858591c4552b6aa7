"""The Llama forward over pages against an independent dense forward in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.configs import ModelConfig, RopeScaling
from headrace.layers import kv_cache as kv
from headrace.layers.inputs import ModelInputs
from headrace.layers.models.llama import Llama, param_shapes, param_specs
from headrace.layers.rotary import inverse_frequencies

CONFIG = ModelConfig(
    num_layers=2,
    model_dim=24,
    ffw_dim=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    context_len=256,
    tie_embeddings=False,
)
C, PAGES = 16, 40
STORAGE = kv.KVStorage(dtype="float32")


def _params(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.array(
            rng.standard_normal(shape, np.float32) * 0.3 + (len(shape) == 1)
        ),
        param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def paged_logits(config, params, tokens, chunks):
    """The model in chunks over shuffled pages, as the engine would call it."""
    model = Llama(config)

    @jax.jit
    def forward(params, cache, inputs):
        output, cache = model.apply({"params": params}, cache, inputs)
        logits = model.apply({"params": params}, output.hidden_BTD, method="logits")
        return logits[0], cache

    cache = kv.allocate(config, num_pages=PAGES, page_size=C, storage=STORAGE)
    table = np.random.default_rng(1).permutation(np.arange(1, 17))[None].astype("i4")
    rows, start = [], 0
    for length in chunks:
        inputs = ModelInputs(
            tokens_BT=jnp.array([tokens[start : start + length]], jnp.int32),
            positions_BT=jnp.arange(start, start + length)[None],
            query_len_B=jnp.array([length]),
            context_len_B=jnp.array([start + length]),
            page_tables=(jnp.array(table),),
        )
        logits, cache = forward(params, cache, inputs)
        rows.append(np.asarray(logits))
        start += length
    return np.concatenate(rows)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [[40], [1] * 40, [17, 1, 22], [16, 16, 8]])
def test_forward_in_any_chunks_equals_the_dense_forward(tied, chunks, dense_logits):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = _params(config)
    tokens = np.random.default_rng(2).integers(0, 50, 40).tolist()
    seen = paged_logits(config, params, tokens, chunks)
    assert np.abs(seen - dense_logits(config, params, tokens)).max() < 2e-4


def test_padding_writes_to_the_dummy_page_only():
    params, model = _params(CONFIG), Llama(CONFIG)
    cache = kv.allocate(CONFIG, num_pages=PAGES, page_size=C, storage=STORAGE)
    inputs = ModelInputs(
        tokens_BT=jnp.ones((2, 8), jnp.int32),
        positions_BT=jnp.arange(8)[None].repeat(2, 0),
        query_len_B=jnp.array([3, 0]),
        context_len_B=jnp.array([3, 0]),
        page_tables=(jnp.array([[5, 6], [7, 8]]),),
    )
    output, cache = model.apply({"params": params}, cache, inputs)
    for pool in cache[0]:
        pages = np.abs(np.asarray(pool)).sum(axis=(0, 2, 4))  # [P, C]
        assert (pages[5, :3] > 0).all() and (pages[5, 3:] == 0).all()
        assert (pages[[1, 2, 3, 4, 6, 7, 8]] == 0).all()
    assert np.isfinite(np.asarray(output.hidden_BTD)).all()


def test_llama3_scaling_keeps_short_wavelengths_and_divides_long_ones():
    """Numbers from the published Llama 3.1 rule: factor 8, 1, 4, 8192."""
    scaling = RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_len=8192,
    )
    plain = inverse_frequencies(128, 500000.0, None)
    scaled = inverse_frequencies(128, 500000.0, scaling)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 2048, wavelength > 8192
    assert short.any() and long.any()
    assert np.array_equal(scaled[short], plain[short])
    assert np.allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    middle = ~short & ~long
    assert middle.any()
    assert (scaled[middle] < plain[middle]).all()
    assert (scaled[middle] > plain[middle] / 8).all()


def test_every_parameter_names_its_logical_axes():
    specs = param_specs(CONFIG)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: hasattr(x, "names"))
    assert leaves and all(hasattr(leaf, "names") for leaf in leaves)
    for leaf in leaves:
        assert len(leaf.names) == leaf.value.ndim
