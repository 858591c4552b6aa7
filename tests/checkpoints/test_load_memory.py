"""Loading holds, beside the finished arrays, at most twice the largest of them."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import quantized_folders as qf
from quantized_cases import AWQ, FP8, GPTQ, write_case

D, F, H, N, K = 2048, 16384, 128, 16, 4
SHAPES = {
    "self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D),
    "self_attn.v_proj": (K * H, D), "self_attn.o_proj": (D, N * H),
    "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
}  # fmt: skip
CONFIG = {
    "hidden_size": D, "intermediate_size": F, "num_attention_heads": N,
    "num_key_value_heads": K, "head_dim": H, "vocab_size": 64,
}  # fmt: skip

# Loads a small folder first, so that what is imported and compiled once is there.
# VmHWM, since ru_maxrss has in it what the parent had when it forked.
PROGRAM = """
import json, sys
import jax, psutil
from headrace.checkpoints.load import load_checkpoint
from headrace.layers.quantized import tree_bytes
load_checkpoint(sys.argv[1])
before = psutil.Process().memory_info().rss
params = load_checkpoint(sys.argv[2]).params
status = open("/proc/self/status").read()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
jax.block_until_ready(params)
largest = max(tree_bytes(w) for layer in params.values() if isinstance(layer, dict)
              for w in layer.values())
print(json.dumps([peak - before, tree_bytes(params), largest]))
"""


def _words(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def _awq(rng, shape, layer):
    O, I = shape  # noqa: E741
    scales = np.full((I // 128, O), 0.01, np.float16)
    zeros = _words(rng, I // 128, O // 8)
    return {"qweight": _words(rng, I, O // 8), "qzeros": zeros, "scales": scales}, None


def _gptq(rng, shape, layer):
    O, I = shape  # noqa: E741
    return {
        "qweight": _words(rng, I // 8, O),
        "qzeros": np.full((I // 128, O // 8), 0x77777777, np.int32),
        "scales": np.full((I // 128, O), 0.01, np.float16),
        "g_idx": rng.permutation(np.arange(I) // 128).astype(np.int32),
    }, None


def _fp8(rng, shape, layer):
    weight = np.ones(shape, ml_dtypes.float8_e4m3fn)
    return {"weight": weight, "weight_scale": np.ones(1, np.float32)}, None


def _plain(rng, shape, layer):
    return {"weight": np.ones(shape, ml_dtypes.bfloat16)}, None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantization, make, small, layers", [
    (AWQ | {"group_size": 128}, _awq, "awq", 3),
    (GPTQ | {"group_size": 128, "desc_act": True}, _gptq, "gptq_order", 3),
    (FP8, _fp8, "fp8", 3),
    (None, _plain, "fp8", 1),
], ids=["awq", "gptq_order", "fp8", "bfloat16"])  # fmt: skip
def test_loading_holds_little_beside_the_finished_arrays(
    quantization, make, small, layers, tmp_path, monkeypatch
):
    write_case(tmp_path / "small", small)
    monkeypatch.setattr(qf, "SHAPES", SHAPES)
    for name, value in (("D", D), ("V", 64), ("L", layers)):
        monkeypatch.setattr(qf, name, value)
    config = CONFIG | {"num_hidden_layers": layers}
    qf.write_folder(tmp_path / "hf", quantization, make, **config)
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "small", tmp_path / "hf"],
        capture_output=True, text=True, check=False, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, arrays, largest = json.loads(done.stdout.splitlines()[-1])
    assert arrays > 4 * largest or quantization is None
    assert grown - arrays <= 2 * largest, (grown - arrays) / largest
