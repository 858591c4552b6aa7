"""A tiny Llama as source tensors, and as the files that carry it."""

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from headrace.configs.schema import ModelConfig

CONFIG = ModelConfig(
    num_layers=2, model_dim=32, ffw_dim=64, num_heads=4, num_kv_heads=2, head_dim=8,
    vocab_size=7, context_len=64, rope_base=5000.0, norm_eps=1e-5,
    tie_embeddings=True, bos_id=5, stop_ids=(6,),
)  # fmt: skip

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 7, "max_position_embeddings": 64,
    "rope_theta": 5000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 5, "eos_token_id": 6,
}  # fmt: skip

SHAPES = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
    "input_layernorm": (32,), "post_attention_layernorm": (32,),
}  # fmt: skip

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip

TOKENS = ("a", "b", "1", "2", "12", "<s>", "</s>")


@pytest.fixture
def tensors():
    """Hugging Face name -> float32 array."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (7, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        for name, shape in SHAPES.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {n: rng.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}


@pytest.fixture
def write_folder(tmp_path):
    """Writes a Hugging Face folder; keyword arguments change its config."""

    def write(tensors, **config):
        folder = tmp_path / "hf"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(HF_CONFIG | config))
        vocab = {"a": 0, "<s>": 5}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        settings = {"bos_token": {"content": "<s>"}, "chat_template": "T"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return write


def permute(w_OD, heads):
    """llama.cpp's order, index by index: HF row i + j H/2 becomes row 2 i + j."""
    size = w_OD.shape[0] // heads
    out = np.empty_like(w_OD)
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + 2 * i + j] = w_OD[head * size + i + j * size // 2]
    return out


@pytest.fixture
def write_gguf(tmp_path):
    """Writes the tensors as llama.cpp would; `edit(writer)` may add keys."""

    def write(
        tensors,
        *,
        architecture="llama",
        pre="gpt-2",
        tokens=TOKENS,
        extra=(),
        edit=None,
    ):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_block_count(2)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_rope_freq_base(5000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1, 1, 1, 1, 1, 3, 3])
        writer.add_token_merges(["1 2"])
        writer.add_bos_token_id(5)
        writer.add_eos_token_id(6)
        writer.add_chat_template("T")
        if edit:
            edit(writer)
        for name, array in tensors.items():
            for part, heads in (("q_proj", 4), ("k_proj", 2)):
                if part in name:
                    array = permute(array, heads)
            writer.add_tensor(_gguf_name(name), array)
        for name in extra:
            writer.add_tensor(name, np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _gguf_name(name):
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, *middle, _ = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(middle)]}.weight"


@pytest.fixture
def assert_holds():
    """Compares a parameter tree with source tensors."""
    return _assert_holds


@pytest.fixture
def tiny_model():
    """The config that the tiny files carry."""
    return CONFIG


def _assert_holds(params, tensors):
    """Compares with the tensors one row at a time, without reshapes."""

    def same(ours, theirs):
        np.testing.assert_array_equal(np.asarray(ours), theirs)

    same(params["embedding"], tensors["model.embed_tokens.weight"])
    same(params["final_norm"], tensors["model.norm.weight"])
    for layer in range(2):
        ours = params[f"layer_{layer}"]

        def source(name, layer=layer):
            return tensors[f"model.layers.{layer}.{name}.weight"]

        same(ours["attention_norm"], source("input_layernorm"))
        same(ours["mlp_norm"], source("post_attention_layernorm"))
        same(ours["out"], source("self_attn.o_proj"))
        same(ours["down"], source("mlp.down_proj"))
        same(ours["gate_up"][0], source("mlp.gate_proj"))
        same(ours["gate_up"][1], source("mlp.up_proj"))
        for k in range(2):
            for h in range(8):
                for g in range(2):
                    row = source("self_attn.q_proj")[(k * 2 + g) * 8 + h]
                    same(ours["qkv"][k, g, h], row)
                same(ours["qkv"][k, 2, h], source("self_attn.k_proj")[k * 8 + h])
                same(ours["qkv"][k, 3, h], source("self_attn.v_proj")[k * 8 + h])
