"""Small Hugging Face folders in each published quantized format, written by its rules.

Every layer is made of drawn stored values, packed here, and dequantized here one input
at a time; nothing of what reads them is used.

AWQ "gemm" (github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py): qweight
  [in, out / 8] and qzeros [groups, out / 8] hold 8 outputs a word; the field at bit 4 p
  is output (0, 2, 4, 6, 1, 3, 5, 7)[p] of the 8. weight = (q - zero) * scale.
GPTQ (github.com/AutoGPTQ/AutoGPTQ, qlinear_cuda_old.py): qweight [in * bits / 32, out]
  along inputs, qzeros [groups, out * bits / 32] along outputs, both in order from the
  lowest bits; "gptq" stores zero - 1, "gptq_v2" (github.com/ModelCloud/GPTQModel) the
  zero. g_idx [in] is the group of an input.
compressed-tensors (github.com/neuralmagic/compressed-tensors, pack_quantized.py,
  pack_to_int32): value plus half the range, in order from the lowest bits, along
  inputs; zero points alike, along outputs. weight_scale [out, groups]. Others are
  stored as int8 or fp8, with weight_scale of the tensor [1], of outputs [out, 1] or of
  blocks.
fp8 (docs.vllm.ai, quantization/fp8; DeepSeek-V3, README_WEIGHTS.md): weight_scale and
  input_scale, or weight_scale_inv [out / 128, in / 128]; both are multiplied by.
"""

import json
import math

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

D, F, H, N, K, V, L = 128, 256, 32, 4, 2, 96, 2
SHAPES = {
    "self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D),
    "self_attn.v_proj": (K * H, D), "self_attn.o_proj": (D, N * H),
    "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
}  # fmt: skip
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": D, "intermediate_size": F,
    "num_hidden_layers": L, "num_attention_heads": N, "num_key_value_heads": K,
    "head_dim": H, "vocab_size": V, "max_position_embeddings": 512,
    "rope_theta": 5000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def words_in_order(fields, bits, axis):
    """Fields packed from the lowest bits on, one after another along an axis."""
    fields = np.moveaxis(np.asarray(fields), axis, 0)
    per = 32 // bits
    words = np.zeros((math.ceil(len(fields) / per), *fields.shape[1:]), np.uint32)
    for i, row in enumerate(fields):
        words[i // per] |= row.astype(np.uint32) << np.uint32(bits * (i % per))
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), 0, axis))


def words_of_awq(fields_XO):
    """Eight outputs a word, even ones in the lower half."""
    words = np.zeros((len(fields_XO), fields_XO.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            field = fields_XO[:, 8 * word + output].astype(np.uint32)
            words[:, word] |= field << np.uint32(4 * place)
    return words.view(np.int32)


def fp8_value(octet):
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa (arxiv 2209.05433)."""
    exponent, mantissa = octet >> 3 & 15, octet & 7
    size = mantissa * 2.0**-9
    if exponent:
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if octet & 128 else size


def dequantized(values_OI, zeros_OS, scales_OS, group_I):
    """(value - zero) * scale in float32, input by input."""
    weight = np.empty(values_OI.shape, np.float32)
    for i, group in enumerate(group_I):
        centred = values_OI[:, i].astype(np.float32) - zeros_OS[:, group]
        weight[:, i] = centred.astype(np.float32) * scales_OS[:, group]
    return weight


def _groups(rng, shape, size, act_order):
    """The group of each input, and scales of all groups in float16."""
    groups = np.arange(shape[1]) // (size or shape[1])
    if act_order:
        groups = rng.permutation(groups)
    scales = rng.uniform(0.005, 0.02, (shape[0], groups.max() + 1)).astype(np.float16)
    return groups, scales


def awq(rng, shape, group_size=32):
    """Tensors by suffix, and the weight."""
    O, I = shape  # noqa: E741
    groups, scales = _groups(rng, shape, group_size, False)
    q, zeros = rng.integers(0, 16, (O, I)), rng.integers(0, 16, scales.shape)
    tensors = {
        "qweight": words_of_awq(q.T),
        "qzeros": words_of_awq(zeros.T),
        "scales": np.ascontiguousarray(scales.T),
    }
    return tensors, dequantized(q, zeros, scales.astype(np.float32), groups)


def gptq(rng, shape, *, bits=4, group_size=32, sym=True, act_order=False, offset=1):
    """Tensors by suffix, and the weight."""
    O, I = shape  # noqa: E741
    groups, scales = _groups(rng, shape, group_size, act_order)
    scales = (scales / 2 ** (bits - 4)).astype(np.float16)
    q = rng.integers(0, 2**bits, (O, I))
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if not sym:
        zeros = rng.integers(offset, 2**bits - 1 + offset, scales.shape)
        zeros = zeros.clip(max=2**bits - 1)
    tensors = {
        "qweight": words_in_order(q.T, bits, 0),
        "qzeros": words_in_order(zeros.T - offset, bits, 1),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": groups.astype(np.int32),
    }
    return tensors, dequantized(q, zeros, scales.astype(np.float32), groups)


def packed(rng, shape, *, bits=4, group_size=32, sym=True, act_order=False):
    """compressed-tensors, pack-quantized: tensors by suffix, and the weight."""
    O, I = shape  # noqa: E741
    groups, scales = _groups(rng, shape, group_size, act_order)
    scales = (scales.astype(np.float32) / 2 ** (bits - 4)).astype(ml_dtypes.bfloat16)
    half = 2 ** (bits - 1)
    values = rng.integers(-half, half, (O, I))
    zeros = np.zeros(scales.shape, int)
    tensors = {
        "weight_packed": words_in_order(values + half, bits, 1),
        "weight_scale": scales,
        "weight_shape": np.array([O, I], np.int64),
    }
    if not sym:
        zeros = rng.integers(-half, half, scales.shape)
        tensors["weight_zero_point"] = words_in_order(zeros + half, bits, 0)
    if act_order:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    return tensors, dequantized(values, zeros, scales.astype(np.float32), groups)


def stored(rng, shape, *, kind="int8", strategy="channel", sym=True, static=False,
           suffix="weight_scale", bits=8, block=(128, 128)):  # fmt: skip
    """int8 or fp8 stored one by one: tensors by suffix, and the weight."""
    O, I = shape  # noqa: E741
    if kind == "int8":
        half, top = 2 ** (bits - 1), 0.2
        values = rng.integers(-half, half, (O, I)).astype(np.int8)
        numbers = values.astype(np.float32)
    else:
        octets = rng.integers(0, 256, (O, I)).astype(np.uint8)
        octets[octets & 127 == 127] = 0  # not a number
        values, half, top = octets.view(ml_dtypes.float8_e4m3fn), 448, 0.6
        table = np.array([fp8_value(o) for o in range(256)], np.float32)
        numbers = table[octets]
    sizes = {"tensor": (O, I), "channel": (1, I), "block": block}[strategy]
    scale_shape = (math.ceil(O / sizes[0]), math.ceil(I / sizes[1]))
    scales = (top / half * rng.uniform(0.5, 1, scale_shape)).astype(np.float32)
    zeros = np.zeros(scale_shape, np.int8)
    said = scales.reshape(1) if strategy == "tensor" else scales
    tensors = {"weight": values, suffix: said}
    if not sym:
        zeros = rng.integers(-half, half, scale_shape).astype(np.int8)
        tensors["weight_zero_point"] = zeros
    if static:
        tensors["input_scale"] = np.array([rng.uniform(0.01, 0.02)], np.float32)
    weight = np.empty((O, I), np.float32)
    for o in range(O):
        for j in range(scale_shape[1]):
            part, at = slice(j * sizes[1], (j + 1) * sizes[1]), (o // sizes[0], j)
            weight[o, part] = (numbers[o, part] - np.float32(zeros[at])) * scales[at]
    return tensors, weight


def write_folder(folder, quantization, make, plain=(), seed=0, **config):
    """A whole model.

    Args:
      folder: is made.
      quantization: quantization_config, or None.
      make: (rng, shape, layer) -> tensors by suffix and the weight.
      plain: parts of names of layers that are not quantized, such as "down_proj".

    Returns:
      Name -> weight in float32, as "...q_proj.weight".
    """
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)

    weights = {"model.embed_tokens.weight": drawn(V, D), "lm_head.weight": drawn(V, D)}
    weights["model.norm.weight"] = np.ones(D, np.float32)
    tensors = dict(weights)
    for layer in range(L):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"{prefix}.{norm}.weight"
            tensors[name] = weights[name] = np.ones(D, np.float32)
        for part, shape in SHAPES.items():
            name = f"{prefix}.{part}"
            if any(word in name for word in plain):
                tensors[f"{name}.weight"] = weights[f"{name}.weight"] = drawn(*shape)
                continue
            made, weight = make(rng, shape, name)
            weights[f"{name}.weight"] = weight
            tensors |= {f"{name}.{suffix}": array for suffix, array in made.items()}
    write_tensors(folder, tensors, quantization, **config)
    return weights


def write_tensors(folder, tensors, quantization, **config):
    """A folder of these tensors; `config` changes config.json."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    said = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | said | config))
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
