"""GGUF tensors that stay in fewer bits: exactly what dequantizing them gives."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.checkpoints.gguf_packed import packed_weight
from headrace.checkpoints.int4_bytes import bytes_to_int4, is_packed
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.orbax_store import save_store
from headrace.checkpoints.quantize import Rounding
from headrace.configs.quantization import parse_scheme
from headrace.layers.quantized import is_quantized, tree_bytes
from headrace.pallas_kernels.quantized_matmul.reference import dequantize

SCHEMES = {"Q8_0": "int8-g32", "Q4_0": "int4-g32", "Q5_0": "int8-g32",
           "Q6_K": "int8-g16"}  # fmt: skip
EXPANDED = ["Q4_1", "Q5_1", "Q4_K"]


def drawn_blocks(rng, kind, rows, inputs):
    """Random bytes whose float16 fields are finite: every value a file can hold."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    octets = rng.integers(0, 256, (rows, inputs // block, size)).astype(np.uint8)
    scales = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2]}
    for at in scales.get(kind, [0]):
        drawn = rng.uniform(-1, 1, octets.shape[:2]) * 2.0 ** rng.integers(-16, 0)
        octets[..., at : at + 2] = drawn.astype(np.float16)[..., None].view(np.uint8)
    return octets.reshape(rows, -1)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEMES)), st.integers(0, 2**32), st.integers(1, 5))
def test_every_value_is_that_of_the_reference(kind, seed, rows):
    octets = drawn_blocks(np.random.default_rng(seed), kind, rows, 512)
    tensor = packed_weight(octets, kind)
    assert tensor.scheme.name == SCHEMES[kind]
    values = np.asarray(tensor.values)
    if is_packed(tensor):
        values = np.asarray(bytes_to_int4(tensor.values))
    reference = gguf.dequantize(octets, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(dequantize(values, tensor.scales), reference)


@pytest.mark.parametrize("kind", [*EXPANDED, "F16"])
def test_what_no_scheme_holds_is_left_to_be_expanded(kind):
    assert packed_weight(np.zeros((2, 288), np.uint8), kind) is None


def test_scale_that_is_not_finite_is_refused():
    octets = np.full((1, 34), 255, np.uint8)
    with pytest.raises(ValueError, match="a scale is not finite"):
        packed_weight(octets, "Q8_0")


@pytest.fixture
def write_quantized(tmp_path, write_gguf, tensors):
    """Writes the tiny model with its matrices in a type, or one for each name."""

    def write(kind_of):
        def add(writer):
            original = writer.add_tensor

            def add_tensor(name, array):
                kind = kind_of(name)
                if array.ndim < 2 or kind == "F32":
                    return original(name, array)
                as_type = gguf.GGMLQuantizationType[kind]
                return original(
                    name, gguf.quants.quantize(array, as_type), raw_dtype=as_type
                )

            writer.add_tensor = add_tensor

        return write_gguf(tensors, edit=add)

    return write


def _dequantized(weight):
    if isinstance(weight, tuple):
        return [np.asarray(_dequantized(part)) for part in weight]
    return np.asarray(weight.dequantized() if is_quantized(weight) else weight)


def _flat(weight, whole):
    """Parts in the shape of the whole that they would be joined to."""
    parts = _dequantized(weight)
    if not isinstance(parts, list):
        return parts
    if len(parts) == 2:
        return np.stack(parts)
    q, k, v = parts
    return np.concatenate([q, k[:, None], v[:, None]], 1).reshape(whole.shape)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "Q4_1"])
def test_packed_or_expanded_the_weights_are_the_same(kind, write_quantized):
    path = write_quantized(lambda name: kind)
    packed, plain = (load_checkpoint(path, keep_packed=k) for k in (True, False))
    assert plain.quantization is None and plain.quantization_skip is None
    assert packed.quantization == SCHEMES.get(kind)
    for layer in ("layer_0", "layer_1"):
        for name, weight in plain.params[layer].items():
            ours = packed.params[layer][name]
            assert is_quantized(ours) == (kind in SCHEMES and weight.ndim > 1)
            np.testing.assert_array_equal(_flat(ours, weight), np.asarray(weight))
    assert (packed.identity == plain.identity) == (kind not in SCHEMES)
    if kind in SCHEMES:
        assert packed.quantization_skip == ()
        assert tree_bytes(packed.params) < tree_bytes(plain.params) / 2


def test_types_that_differ_within_a_weight_stay_in_parts(write_quantized, tmp_path):
    kinds = {"attn_v": "Q8_0", "ffn_up": "Q4_1", "token_embd": "F32"}

    def kind_of(name):
        return next((k for part, k in kinds.items() if part in name), "Q4_0")

    path = write_quantized(kind_of)
    packed, plain = (load_checkpoint(path, keep_packed=k) for k in (True, False))
    assert packed.quantization == "int4-g32"
    parts = {
        "embedding",
        *(f"layer_{i}/{n}" for i in (0, 1) for n in ("qkv", "gate_up")),
    }
    assert set(packed.quantization_skip) == parts
    save_store(tmp_path / "store", packed)
    for found in (packed, load_checkpoint(tmp_path / "store")):
        for name, weight in plain.params["layer_1"].items():
            ours = _flat(found.params["layer_1"][name], weight)
            np.testing.assert_array_equal(ours, np.asarray(weight))


def test_packed_and_rounded_exclude_one_another(write_quantized):
    rounding = Rounding(scheme=parse_scheme("int8"))
    with pytest.raises(ValueError, match="keep_packed and quantization exclude"):
        load_checkpoint(
            write_quantized(lambda name: "Q8_0"), keep_packed=True, rounding=rounding
        )


def test_an_engine_over_packed_weights_gives_the_expanded_ones_tokens(write_quantized):
    path = write_quantized(lambda name: "Q4_0" if "ffn" in name else "Q8_0")
    config = {
        "max_context_len": 64, "num_pages": 33, "num_slots": 4,
        "decode_batch_sizes": (4,), "prefill_shapes": ((1, 32),),
    }  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for keep_packed in (True, False):
        llm = LLM(path, config=config | {"keep_packed": keep_packed})
        output = llm.generate([1, 2, 3, 4, 5], greedy, use_tqdm=False)[0]
        found.append((output.outputs[0].token_ids, tree_bytes(llm._runner.params)))
        llm.close()
    (packed, packed_bytes), (plain, plain_bytes) = found
    assert packed == plain and packed_bytes < plain_bytes / 2
