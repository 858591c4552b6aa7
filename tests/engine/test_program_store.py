"""What is kept between starts: whole programs, in folders of the owner's alone."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from headrace.configs import load_config, parse_config
from headrace.engine.model_runner import ModelRunner
from headrace.engine.program_store import ProgramStore, program_key

MODEL, CONFIG = parse_config(load_config("tiny"))
CONFIG = dataclasses.replace(
    CONFIG, param_dtype="float32", kv_dtype="float32", num_slots=8,
    decode_batch_sizes=(8,), prefill_shapes=((1, 32),),
)  # fmt: skip


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's own compilation cache, on and eager to keep everything."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _start(folder, params):
    """Starts a runner and calls its programs; returns where they came from."""
    jax.clear_caches()
    store = ProgramStore(folder, program_key(MODEL, CONFIG))
    runner = ModelRunner(MODEL, CONFIG, params, store=store)
    runner.compile_all()
    store.save_facts({"memory": runner.ledger.memory_facts(), "classes": {}})
    packed = jnp.asarray(runner.layout.unchanged(does_decode=True))
    runner.forward(("decode", 8), packed)
    runner.forward(("prefill", (1, 32)), packed)
    for variant in ("greedy", "sampled", "full"):
        runner.read(runner.sample(("sample", variant, 8), packed))
    return {entry.source for entry in runner.ledger.entries.values()}


def test_programs_stored_beside_jax_own_cache_load_whole(
    jax_cache, tmp_path, tiny_checkpoint
):
    """Regression: what JAX's cache gave was stored, and failed when called."""
    params = tiny_checkpoint.params
    assert _start(tmp_path / "a", params) == {"compiled"}
    assert _start(tmp_path / "b", params) == {"compiled"}
    assert _start(tmp_path / "b", params) == {"stored"}


def test_jax_own_cache_still_serves_others_after_a_start(
    jax_cache, tmp_path, tiny_checkpoint
):
    _start(tmp_path / "a", tiny_checkpoint.params)
    assert jax.config.jax_enable_compilation_cache
    assert not list(jax_cache.glob("*decode_forward*"))
    jax.jit(lambda x: jnp.sin(x) * 3)(jnp.ones(7)).block_until_ready()
    assert list(jax_cache.glob("*lambda*"))


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_folders_of_stored_code_are_the_owners_alone_from_the_first_one_made(tmp_path):
    """Regression: the parents that were made had the umask's mode."""
    before = os.umask(0o002)
    try:
        store = ProgramStore(tmp_path / "cache" / "programs", "k" * 32)
        store.save_facts({"memory": {}})
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 3
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_cache_keeps_the_sets_of_programs_used_last_and_nothing_else_is_touched(
    tmp_path,
):
    for i in range(20):
        store = ProgramStore(tmp_path, f"{i:032x}")
        store.save_facts({"i": i})
        os.utime(tmp_path / f"{i:032x}", (1000 + i, 1000 + i))
    (tmp_path / "notes").mkdir()
    first = ProgramStore(tmp_path, f"{4:032x}")
    assert first.load_facts() == {"i": 4}  # marks it as used now
    ProgramStore(tmp_path, f"{99:032x}").save_facts({})
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == sorted(["notes", *(f"{i:032x}" for i in (4, *range(6, 20), 99))])


def test_key_changes_with_what_programs_depend_on_only():
    key = program_key(MODEL, CONFIG)
    same = dataclasses.replace(CONFIG, policy="fair", prefill_calls_per_decode=3)
    other = dataclasses.replace(CONFIG, page_size=32)
    assert program_key(MODEL, same) == key != program_key(MODEL, other)
