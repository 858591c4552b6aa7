"""Quantizes a model with data, layer by layer: GPTQ, AWQ, SmoothQuant.

Each layer is calibrated on what the layers before it give once they are quantized, so
their errors are made up for where that is possible. Beside the model one layer is held
a second time, and the hidden states of the calibration text.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoints.activation_scaling import awq, smooth
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.gptq import gptq
from headrace.checkpoints.quantize import Rounding, is_skipped, place_quantized
from headrace.configs.schema import ModelConfig
from headrace.layers import kv_cache as kv
from headrace.layers import linear
from headrace.layers.inputs import pages_of, whole_prompt
from headrace.layers.quantized import QuantizedTensor
from headrace.layers.rotary import inverse_frequencies, rotary_tables
from headrace.layers.transformer import Block

Method = Literal["gptq", "awq", "smooth"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "smooth")

# A layer's weights in the order of its products.
_WEIGHTS = ("qkv", "out", "gate_up", "down")
_PAGE = 64
_STORAGE = kv.KVStorage(dtype="float32")
# Rows that AWQ's search compares products of.
_SEARCH_ROWS = 1024


def calibrated(
    checkpoint: Checkpoint,
    rounding: Rounding,
    method: Method,
    texts: Sequence[np.ndarray],
    tell: Callable[[int], None] = lambda layer: None,
    donate: bool = False,
) -> Checkpoint:
    """A checkpoint with quantized weights.

    Args:
      checkpoint: float32, on one device, not quantized.
      rounding: scheme, and what stays as it is; tables always do.
      method: "smooth" is for schemes with activations, the others for those without.
      texts: windows of the calibration text, token ids of one length each.
      tell: called with the number of each layer that is done.
      donate: put each layer in its place in `checkpoint` as soon as it is done, so
        that what it was is freed; the checkpoint is of no other use afterwards.

    Raises:
      ValueError: a method that does not go with the scheme or the checkpoint.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if (method == "smooth") != (rounding.scheme.activations is not None):
        raise ValueError(
            f"{method} does not go with scheme {rounding.scheme.name}: smooth is for "
            "quantized activations, gptq and awq are for weights alone"
        )
    if checkpoint.quantization is not None:
        raise ValueError(f"quantized already, as {checkpoint.quantization}")
    params = checkpoint.params if donate else dict(checkpoint.params)
    tokens = jnp.asarray(np.stack(texts), jnp.int32)
    states = list(linear.embed(params["embedding"], tokens, "float32"))
    step = _layer_step(checkpoint.config, tokens.shape[1])
    for layer in range(checkpoint.config.num_layers):
        name = f"layer_{layer}"
        quantized = dict(params[name])
        for index, key in enumerate(_WEIGHTS):
            if is_skipped((name, key), 2, rounding.skip):
                continue
            rows = (step(quantized, x)[1][index] for x in states)
            weight = np.asarray(params[name][key])
            found = _quantize(weight, rows, rounding, method)
            quantized[key] = place_quantized(found, None)
        params[name] = quantized
        states = [step(quantized, x)[0] for x in states]
        tell(layer)
    return dataclasses.replace(
        checkpoint,
        params=params,
        quantization=rounding.scheme.name,
        identity=_identity(checkpoint, rounding, method, texts),
        calibration={
            "method": method,
            "num_windows": len(texts),
            "window_tokens": int(tokens.shape[1]),
            "tokens_sha256": _digest(texts),
            "of": checkpoint.identity,
        },
    )


def _quantize(
    weight: np.ndarray,
    rows: Iterator[jax.Array],
    rounding: Rounding,
    method: Method,
) -> QuantizedTensor:
    """One weight, with any leading axes for its outputs."""
    flat = weight.reshape(-1, weight.shape[-1])
    if method == "gptq":
        hessian = np.zeros((flat.shape[1],) * 2)
        for x in rows:
            hessian += np.asarray(x.T @ x, np.float64)
        found = gptq(flat, hessian, rounding.scheme)
    elif method == "awq":
        sample = np.concatenate([np.asarray(x) for x in rows])
        every = -(-sample.shape[0] // _SEARCH_ROWS)
        found = awq(flat, sample[::every], rounding.scheme)
    else:
        most = functools.reduce(
            np.maximum, (np.asarray(jnp.abs(x).max(0)) for x in rows)
        )
        found = smooth(flat, most, rounding.scheme)
    return found.reshape_outputs(*weight.shape[:-1])


def _layer_step(model: ModelConfig, length: int) -> Callable[[dict, jax.Array], Any]:
    """step(layer's parameters, hidden [T, D]) -> hidden, rows of its four products."""
    block = Block(model, kv_group=0, kv_index=0)
    one_layer = dataclasses.replace(model, num_layers=1)
    num_pages = pages_of(length, _PAGE) + 1
    inputs = whole_prompt(jnp.zeros(length, jnp.int32), _PAGE)  # ids: see `embed`

    @jax.jit
    def step(params: dict, x_TD: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        group = kv.allocate(
            one_layer, num_pages=num_pages, page_size=_PAGE, storage=_STORAGE
        )[0]
        rotary = rotary_tables(
            inputs.positions_BT,
            inverse_frequencies(model.head_dim, model.rope_base, model.rope_scaling),
        )
        (table,) = inputs.page_tables
        places = kv.write_places(inputs.positions_BT, inputs.query_len_B, table, _PAGE)
        with linear.recording() as seen:
            out, _ = block.apply(
                {"params": params},
                x_TD[None],
                group,
                inputs,
                rotary=rotary,
                places=places,
            )
        return out[0], seen

    return step


def _identity(
    checkpoint: Checkpoint,
    rounding: Rounding,
    method: Method,
    texts: Sequence[np.ndarray],
) -> str:
    facts = f"{rounding.identity(checkpoint.identity)}:{method}:{_digest(texts)}"
    return hashlib.sha256(facts.encode()).hexdigest()


def _digest(texts: Sequence[np.ndarray]) -> str:
    whole = hashlib.sha256()
    for text in texts:
        whole.update(np.asarray(text, np.int32).tobytes())
    return whole.hexdigest()
