"""The notebook runs from its first cell to its last, in a real kernel."""

import json
import pathlib
import re

import nbformat
import numpy as np
import pytest
import tokenizers
from nbclient import NotebookClient
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "scripts" / "headrace_colab.ipynb"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>"]
LAYERS, D, F, N, K, H = 2, 64, 128, 4, 2, 16


def write_model(folder):
    """A Hugging Face folder with random weights and one token per byte."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={
                character: token_id
                for token_id, character in enumerate(
                    sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
                )
            },
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id("<|end|>")
    V = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "vocab_size": V,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": end_id,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    chat = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chat))
    save_file(random_weights(V), str(folder / "model.safetensors"))
    return str(folder)


def random_weights(V):
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (D,),
            f"{at}.post_attention_layernorm.weight": (D,),
            f"{at}.self_attn.q_proj.weight": (N * H, D),
            f"{at}.self_attn.k_proj.weight": (K * H, D),
            f"{at}.self_attn.v_proj.weight": (K * H, D),
            f"{at}.self_attn.o_proj.weight": (D, N * H),
            f"{at}.mlp.gate_proj.weight": (F, D),
            f"{at}.mlp.up_proj.weight": (F, D),
            f"{at}.mlp.down_proj.weight": (D, F),
        }
    random = np.random.default_rng(0)
    return {
        name: random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def run_notebook(tmp_path, monkeypatch):
    """Executes a copy on the CPU and returns everything that it printed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".typing"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    return "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )


def check_printed(text):
    """The engine answered, and gave its memory back."""
    before, after = re.search(
        r"live arrays: ([\d,]+) bytes before, ([\d,]+) bytes after", text
    ).groups()
    assert int(before.replace(",", "")) > 100_000
    assert int(after.replace(",", "")) < 1_000
    assert "'Water boils at' -> '" in text
    assert "decode[8]" in text


def test_notebook_runs_with_a_tiny_model(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.setenv("HEADRACE_NOTEBOOK_MODEL", write_model(model))
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    check_printed(run_notebook(tmp_path, monkeypatch))


@pytest.mark.real_model
def test_notebook_runs_with_the_default_model(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_NOTEBOOK_MODEL", raising=False)
    text = run_notebook(tmp_path, monkeypatch)
    check_printed(text)
    assert "Paris" in text


def test_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
