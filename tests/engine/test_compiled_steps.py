"""What the compiled programs do with memory, read from the programs themselves."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import EngineConfig, ModelConfig
from headrace.engine.model_runner import ModelRunner
from headrace.engine.program_store import ProgramStore, program_key
from headrace.engine.programs import program_name

# Long context over a narrow model: a gather of the maximum context would be the
# largest temporary by far.
MODEL = ModelConfig(
    num_layers=4,
    model_dim=128,
    ffw_dim=1024,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=256,
    context_len=8192,
    tie_embeddings=True,
)
CONFIG = EngineConfig(
    max_context_len=8192,
    page_size=64,
    num_pages=1100,
    num_slots=8,
    decode_batch_sizes=(8,),
    prefill_shapes=((1, 32),),
    param_dtype="float32",
    kv_dtype="float32",
)


def _runner(store=None):
    params = synthetic_checkpoint(MODEL).params
    runner = ModelRunner(MODEL, CONFIG, params, store=store)
    runner.compile_all()
    return runner


@pytest.fixture(scope="module")
def runner():
    return _runner()


def _bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("key", [("decode", 8), ("prefill", (1, 32))])
def test_forward_updates_pool_and_logits_in_place(runner, key):
    memory = runner.program(key).memory_analysis()
    pool_and_logits = _bytes((runner.kv_cache, runner.logits_BQV))
    assert memory.alias_size_in_bytes == pool_and_logits


@pytest.mark.parametrize("key", [("decode", 8), ("prefill", (1, 32))])
def test_forward_holds_no_temporary_as_large_as_a_layer_or_the_context(runner, key):
    layer_bytes = _bytes(runner.params["layer_0"])
    row = 2 * MODEL.num_kv_heads * MODEL.head_dim * 4
    context_bytes = CONFIG.num_slots * CONFIG.max_context_len * row
    temporary = runner.program(key).memory_analysis().temp_size_in_bytes
    assert temporary < layer_bytes
    assert temporary < context_bytes / 8


@pytest.mark.parametrize("key", [("decode", 8), ("prefill", (1, 32))])
def test_forward_gathers_no_more_than_a_block_of_keys(runner, key):
    rows = 8 if key[0] == "decode" else 1
    block = rows * 128 * MODEL.num_kv_heads * MODEL.head_dim
    embedding = 32 * MODEL.model_dim
    text = runner.program(key).as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\][^=\n]* gather\(", text)
    assert shapes
    for shape in shapes:
        assert np.prod([int(n) for n in shape.split(",")]) <= max(block, embedding)
    pool = ",".join(str(n) for n in runner.kv_cache[0][0].shape)
    assert not re.search(rf"= f32\[{pool}\][^=\n]* copy\(", text)


@pytest.mark.parametrize("variant", ["greedy", "sampled", "full"])
def test_sample_updates_the_slot_state_in_place(runner, variant):
    memory = runner.program(("sample", variant, 8)).memory_analysis()
    # XLA rounds small buffers up, so the state is a lower bound.
    donated = (runner.slots, runner.extras if variant == "full" else None)
    assert memory.alias_size_in_bytes >= _bytes(donated)


def test_stored_programs_give_the_same_bits_and_compile_nothing(tmp_path, runner):
    store = ProgramStore(tmp_path, program_key(MODEL, CONFIG))
    cold = _runner(store)
    assert {e.source for e in cold.ledger.entries.values()} == {"compiled"}
    store.save_facts({"memory": cold.ledger.memory_facts(), "classes": {}})
    warm = _runner(store)
    assert {e.source for e in warm.ledger.entries.values()} == {"stored"}
    for key in cold.program_keys():
        cold_entry = cold.ledger.entries[program_name(key)]
        warm_entry = warm.ledger.entries[program_name(key)]
        assert warm_entry.temp_bytes == cold_entry.temp_bytes
    packed = np.zeros(cold.layout.size, np.int32)
    rows = cold.layout.rows(packed)
    rows[0, :4] = (0, 0, 5, 1)
    cold.layout.page_table(rows)[0, 0] = 1
    cold.layout.tokens(packed, 1, 32)[0, :5] = (1, 2, 3, 4, 5)
    logits = []
    for one in (cold, warm):
        one.forward(("prefill", (1, 32)), jnp.array(packed))
        logits.append(one.read(one.logits_BQV))
    assert np.abs(logits[0][0]).max() > 0
    assert np.array_equal(*logits)


def test_a_damaged_stored_program_is_compiled_anew(tmp_path):
    store = ProgramStore(tmp_path, program_key(MODEL, CONFIG))
    cold = _runner(store)
    store.save_facts({"memory": cold.ledger.memory_facts(), "classes": {}})
    (victim,) = tmp_path.rglob("decode_8.xla")
    blob = bytearray(victim.read_bytes())
    blob[len(blob) // 2] ^= 1
    victim.write_bytes(bytes(blob))
    warm = _runner(store)
    assert warm.ledger.entries["decode[8]"].source == "compiled"
    assert warm.ledger.entries["prefill[1x32]"].source == "stored"


def test_the_key_changes_with_config_and_model():
    keys = {
        program_key(MODEL, CONFIG),
        program_key(MODEL, dataclasses.replace(CONFIG, num_pages=1101)),
        program_key(dataclasses.replace(MODEL, norm_eps=1e-6), CONFIG),
    }
    assert len(keys) == 3
