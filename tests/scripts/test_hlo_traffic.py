"""Bytes that a compiled step moves, and how often it reads a weight, by hand."""

from hlo_step import W0_BYTES, module

from headrace.scripts import gpu_rules, hlo_traffic
from headrace.scripts.hlo_text import parse_module


def moved_bytes(step, **options):
    return sum(hlo_traffic.traffic(step, **options))


def test_bytes_moved_are_what_kernels_read_and_write():
    step = module()
    (pool,) = gpu_rules.program_arguments(step, "kv_cache")
    # Gather: rows and ids, out; product; scatter: the changes alone; kernel.
    base = (64 + 16 + 64) + (64 + W0_BYTES + 256) + (256 + 64) + (256 + 256)
    assert moved_bytes(step, elsewhere=[pool.leaves[0]]) == base
    pool_bytes = pool.leaves[0].num_bytes
    assert moved_bytes(step) == base + pool_bytes
    added = "%z = bf16[4,32]{1,0} add(%y0, %out)"
    twice = moved_bytes(module(added), elsewhere=[pool.leaves[0]])
    assert twice == base + 3 * 256


def test_a_weight_counts_once_for_each_tile_of_rows():
    tiles = '"fusion_backend_config":{"output_tiles":[{"sizes":["2","16"]}]}'
    product = (
        "%gemm = bf16[4,32]{1,0} fusion(%x, %flat), kind=kCustom, calls=%dots, "
        f"backend_config={{{tiles}}}"
    )
    one = product.replace('"2","16"', '"4","16"')
    assert gpu_rules.repeated_weights(module(one), 0) == []
    faults = gpu_rules.repeated_weights(module(product), 3)
    assert faults == [("times gemm reads its weight", 2, 1)]
    moved = [moved_bytes(module(line)) for line in (one, product)]
    assert moved[1] - moved[0] == W0_BYTES
    assert hlo_traffic.most_passes(module(product)) == 2
    # All four tiles at a time share what the first of them reads.
    assert gpu_rules.repeated_weights(module(product), 4) == []
    assert moved_bytes(module(product), resident=4) == moved[0]
    # Partial sums of three parts of K are no passes; without tiles nothing is known.
    parts = product.replace("bf16[4,32]", "f32[3,4,32]").replace('"2"', '"1","4"')
    assert hlo_traffic.most_passes(module(parts)) == 1
    assert hlo_traffic.most_passes(module()) == 1


def test_of_partial_sums_a_later_slice_takes_its_own_part():
    """As XLA fuses the sum of a product's parts into each of its readers."""
    sums = """
%sums (p: f32[2,4,32]) -> bf16[4,8] {
  %p = f32[2,4,32]{2,1,0} parameter(0)
  %p0 = f32[1,4,32]{2,1,0} slice(%p), slice={[0:1], [0:4], [0:32]}
  %p1 = f32[1,4,32]{2,1,0} slice(%p), slice={[1:2], [0:4], [0:32]}
  %both = f32[1,4,32]{2,1,0} add(%p0, %p1)
  %flat = f32[4,32]{1,0} bitcast(%both)
  %own = f32[4,8]{1,0} slice(%flat), slice={[0:4], [8:16]}
  ROOT %half = bf16[4,8]{1,0} convert(%own)
}

ENTRY %main (p: f32[2,4,32]) -> bf16[4,8] {
  %p = f32[2,4,32]{2,1,0} parameter(0)
  ROOT %y = bf16[4,8]{1,0} fusion(%p), kind=kLoop, calls=%sums
}
"""
    found = hlo_traffic.traffic(parse_module(sums))
    assert found == (2 * 4 * 8 * 4, 4 * 8 * 2)
    # A reduction looks at all.
    whole = sums.replace("slice(%flat), slice={[0:4], [8:16]}", "reduce(%flat)")
    assert hlo_traffic.traffic(parse_module(whole)).read == 2 * 4 * 32 * 4


def test_traffic_has_a_limit():
    assert gpu_rules.heavy_traffic(105, 100) == []
    assert gpu_rules.heavy_traffic(106, 100) == [
        ("bytes moved over the floor", 1.06, 1.05)
    ]
    assert gpu_rules.heavy_reads(110, 100) == []
    assert gpu_rules.heavy_reads(111, 100) == [("bytes read over the floor", 1.11, 1.1)]
