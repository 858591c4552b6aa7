"""A GPU's programs are compiled with options of our own, a CPU's with none."""

import jax
import jax.numpy as jnp

from headrace.engine import compile_options, program_store
from headrace.layers.models import build_model, param_shapes


def test_options_pin_what_bits_and_waits_depend_on():
    options = compile_options.compiler_options("gpu")
    assert options["xla_gpu_autotune_level"] == 0
    assert options["xla_gpu_experimental_force_split_k"] == 1
    commands = str(options["xla_gpu_enable_command_buffer"]).split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE"} <= set(commands)
    assert compile_options.compiler_options("cpu") == {}


def test_the_engine_compiles_with_them(monkeypatch):
    asked = []

    class Lowered:
        def compile(self, compiler_options=None):
            asked.append(compiler_options)

    program_store.compile_fresh(Lowered())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program_store.compile_fresh(Lowered())
    assert asked == [{}, compile_options.GPU_OPTIONS]


def test_logits_of_bfloat16_weights_are_not_rounded_to_bfloat16(tiny_config):
    config, _ = tiny_config
    model = build_model(config, "bfloat16")
    rng = jax.random.key(0)
    params = jax.tree.map(
        lambda shape: jax.random.normal(rng, shape, jnp.bfloat16),
        param_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    hidden = jax.random.normal(rng, (3, config.model_dim), jnp.bfloat16)
    z_XV = model.apply({"params": params}, hidden, method=model.logits)
    assert z_XV.dtype == jnp.float32
    rounded = z_XV.astype(jnp.bfloat16).astype(jnp.float32)
    assert (z_XV != rounded).mean() > 0.9
