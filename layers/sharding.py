"""Logical axis names of every parameter and pool, and the one table that maps them.

Parameters carry logical names from the start (`nn.with_logical_partitioning`); a mesh
is a matter of this table alone. Without a mesh, everything is on one device.
"""

from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Megatron-style: outputs of qkv and gate_up, inputs of out and down, the vocabulary.
RULES: tuple[tuple[str, str | None], ...] = (
    ("vocab", "model"),
    ("model_dim", None),
    ("kv_heads", "model"),
    ("q_per_kv_plus_2", None),
    ("heads_times_head_dim", "model"),
    ("head_dim", None),
    ("gate_and_up", None),
    ("ffw_dim", "model"),
    ("layers", None),
    ("pages", "data"),
    ("page_tokens", None),
)

KV_POOL_AXES = ("layers", "pages", "kv_heads", "page_tokens", "head_dim")


def partition_spec(logical_axes: tuple[str, ...]) -> PartitionSpec:
    """The mesh axes of an array with these logical axes."""
    return nn.logical_to_mesh_axes(logical_axes, RULES)


def named_sharding(mesh: Mesh, logical_axes: tuple[str, ...]) -> NamedSharding:
    """The sharding of such an array on a mesh with `data` and `model` axes."""
    return NamedSharding(mesh, partition_spec(logical_axes))
