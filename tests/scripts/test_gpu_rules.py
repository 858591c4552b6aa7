"""Each rule of the compile gate sees what was planted for it, and nothing else."""

import pytest
from hlo_step import LAYER, LIVE_ELEMENTS, STEP, W0_BYTES, module

from headrace.scripts import gpu_compile, gpu_rules
from headrace.scripts.hlo_flow import kernels, uses
from headrace.scripts.hlo_text import parse_instruction, parse_module

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_decode_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 96 registers, used 2 barriers
ptxas info    : Compiling entry function 'broken_mosaic_gpu_kernel' for 'sm_90a'
"""


def whats(faults):
    return [fault.what for fault in faults]


def test_a_sound_step_has_no_fault():
    step = module()
    assert gpu_rules.weight_copies(step) == []
    assert gpu_rules.kv_copies(step, LIVE_ELEMENTS) == []
    assert gpu_rules.repeated_weights(step, 0) == gpu_rules.wide_sorts(step) == []
    assert gpu_rules.lost_arguments(step, {"params": 2, "kv_cache": 1}) == []


def test_weights_count_once_per_reader_and_tables_by_the_rows_taken():
    assert gpu_rules.bytes_read(module(), "params") == W0_BYTES + 4 * 8 * 2
    again = "%y1 = bf16[4,32]{1,0} fusion(%x, %flat), kind=kCustom, calls=%dots"
    assert gpu_rules.bytes_read(module(again), "params") == 2 * W0_BYTES + 64
    copied = "%c0 = bf16[32,8]{0,1} copy(%flat)"
    read = "%y1 = bf16[4,32]{1,0} fusion(%x, %c0), kind=kCustom, calls=%dots"
    assert gpu_rules.bytes_read(module(copied, read), "params") == 4 * W0_BYTES + 64


def test_a_weight_that_a_loop_carries_counts_once_per_turn():
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    loop = (
        "%zero = s32[] constant(0)",
        "%t = (s32[], bf16[32,8]{1,0}) tuple(%zero, %flat)",
        "%loop = (s32[], bf16[32,8]{1,0}) while(%t), condition=%cond, body=%body, "
        + trips,
        "%after = bf16[32,8]{1,0} get-tuple-element(%loop), index=1",
        "%last = f32[8]{0} reduce(%after, %zero), dimensions={0}, to_apply=%add",
    )
    assert gpu_rules.bytes_read(module(*loop), "params") == 5 * W0_BYTES + 64
    names = [(i.name, n) for i, n in kernels(module(*loop)) if n > 1]
    assert names == [("less", 3), ("sum", 3)]


@pytest.mark.parametrize(
    "line, what",
    [
        ("%z = bf16[32,8]{0,1} copy(%flat)", "copied by z"),
        ("%z = bf16[8,32]{1,0} transpose(%flat), dimensions={1,0}", "copied by z"),
        ("%z = f32[32,8]{1,0} convert(%flat)", "in memory as f32 by z"),
        # A dequantized weight: as many numbers, of another type, with its scales.
        ("%z = f32[2,16,8]{2,1,0} multiply(%w0, %x)", "in memory as f32 by z"),
        # Half of a packed weight.
        ("%z = bf16[16,8]{1,0} slice(%flat), slice={[0:16], [0:8]}", "copied by z"),
    ],
)
def test_a_weight_that_lies_in_memory_twice_is_found(line, what):
    faults = gpu_rules.weight_copies(module(line))
    assert whats(faults) == [f"bytes of params['layer_0']['w'] {what}"]


def test_scales_of_outputs_multiply_sums_that_are_no_copies():
    scales = STEP.replace("bf16[2,16,8]", "f32[4,8,1]").replace("bf16[32,8]", "f32[32]")
    line = "  %z = bf16[4,32]{1,0} multiply(%y0, %flat)"
    assert gpu_rules.weight_copies(parse_module(scales.replace("PLANTED", line))) == []


def test_a_packed_weight_is_nowhere_as_large_in_more_bits():
    packed = STEP.replace("bf16[2,16,8]", "s4[2,16,8]").replace(
        "bf16[32,8]", "s4[32,8]"
    )
    line = "  %z = bf16[8,32]{1,0} add(%x, %x)"  # whatever it was made of
    step = parse_module(packed.replace("PLANTED", line))
    (fault,) = gpu_rules.wide_weights(step)
    assert fault.what == "bytes as large as params['layer_0']['w'] made wide: z"
    assert fault.value == 8 * 32 * 2
    assert gpu_rules.wide_weights(parse_module(packed.replace("PLANTED", ""))) == []
    assert gpu_rules.wide_weights(module(line)) == []  # no weight is packed


def test_weights_take_the_memory_that_their_scheme_says():
    assert gpu_rules.odd_arguments(1150, 100, wanted=1000) == []
    for found in (1151, 1049):
        (fault,) = gpu_rules.odd_arguments(found, 100, wanted=1000)
        assert fault == (
            "bytes of weights among the arguments", found - 100, "near 1000"
        )  # fmt: skip


def test_what_a_kernel_makes_of_a_weight_is_no_copy_however_large():
    line = '%z = bf16[64,32]{1,0} custom-call(%x, %flat), custom_call_target="gemm"'
    assert gpu_rules.weight_copies(module(line)) == []


def test_a_copy_of_a_copied_weight_is_found_too():
    lines = "%z = bf16[32,8]{0,1} copy(%flat)", "%zz = f32[32,8]{0,1} convert(%z)"
    assert len(gpu_rules.weight_copies(module(*lines))) == 2


def test_pools_that_are_copied_or_gathered_whole_are_found_after_writes_in_place():
    lines = (
        "%z = bf16[2,5,2,16,4]{4,3,2,1,0} copy(%pool1)",
        "%live = bf16[4,16,2,4,4]{4,3,2,1,0} gather(%pool2, %ids), slice_sizes={1,1}",
        "%block = bf16[4,2,2,4,4]{4,3,2,1,0} gather(%pool2, %ids), slice_sizes={1,1}",
    )
    faults = gpu_rules.kv_copies(module(*lines), LIVE_ELEMENTS)
    assert sorted(whats(faults)) == [
        "bytes of kv_cache[0][0] copied by live",
        "bytes of kv_cache[0][0] copied by z",
    ]


def test_arguments_that_the_program_has_lost_are_told():
    faults = gpu_rules.lost_arguments(module(), {"params": 3, "kv_cache": 1})
    assert faults == [("arrays of params in the program", 2, "exactly 3")]


def test_a_step_that_the_host_starts_in_pieces_is_found():
    graph = "000: kCommandBuffer [source | sink]\n    001: kWhile [next=002]\n"
    assert gpu_rules.host_returns(graph) == []
    loop = "001: kWhile [source]\ncondition:\n        002: kCopy [source | sink]\n"
    for thunks, value in (
        (graph + loop, "CommandBuffer, While"),
        (graph * 2, "CommandBuffer, CommandBuffer"),
        ("", "none seen"),
    ):
        faults = gpu_rules.host_returns(thunks)
        assert faults == [("starts by the host", value, "1 graph")]


def test_sorts_of_the_vocabulary_are_found_and_small_ones_allowed():
    sort = "%z = (f32[32,128256]{1,0}, s32[32,128256]{1,0}) sort(%p, %i)"
    top_k = '%z = (f32[32,5]) custom-call(%z), custom_call_target="__gpu$TopK"'
    narrow = "%z = s32[32,64]{1,0} sort(%p), dimensions={1}"
    assert len(gpu_rules.wide_sorts(module(sort))) == 1
    assert len(gpu_rules.wide_sorts(module(top_k))) == 1
    assert gpu_rules.wide_sorts(module(narrow)) == []


def test_kernels_per_layer_leave_out_what_the_first_layer_does_for_all():
    first = [
        f'%z{n} = f32[4]{{0}} sine(%x), {LAYER}"f/layer_0/sin"}}' for n in range(4)
    ]
    assert gpu_rules.kernels_per_layer(module(*first), 2) == 2
    assert gpu_rules.kernels_per_layer(module(*first), 1) == 5
    nameless = "%z0 = f32[4]{0} copy(%x)", "%z1 = f32[4]{0} copy(%x)"
    assert gpu_rules.kernels_per_layer(module(nameless[0]), 2) == 2
    assert gpu_rules.kernels_per_layer(module(*nameless), 2) == 3
    assert gpu_rules.many_kernels(14) == []
    assert gpu_rules.many_kernels(15) == [("kernels per layer", 15, 14)]


def test_spills_are_read_from_what_ptxas_prints():
    seen = gpu_compile.ptxas_kernels(LOG)
    assert seen == [gpu_compile.PtxasKernel("paged_decode", 96, 20, 16)]
    assert gpu_rules.spills(seen) == [("bytes that paged_decode spills", 20, 0)]
    clean = LOG.replace("8 bytes spill", "0 bytes spill").replace("12 bytes", "0 bytes")
    assert gpu_rules.spills(gpu_compile.ptxas_kernels(clean)) == []


def test_waits_that_ptxas_puts_between_wgmma_are_found():
    said = "ptxas info : (C7510) Potential Performance Loss: wgmma serialized\n"
    assert len(gpu_rules.serialized(LOG + said)) == 1
    assert gpu_rules.serialized(LOG) == []


def test_a_kernel_without_a_register_line_is_found_by_its_name_and_hash():
    calls, seen = gpu_rules.mosaic_kernels(module()), gpu_compile.ptxas_kernels(LOG)
    assert {name: len(c) for name, c in calls.items()} == {"paged_decode": 1}
    assert gpu_rules.without_registers(calls, seen) == []
    assert gpu_rules.without_registers({"broken": calls["paged_decode"]}, seen)
    # Of two kernels with one name ptxas must have seen both.
    other = parse_module(STEP.replace("\\A1", "\\A2").replace("PLANTED", ""))
    both = calls["paged_decode"] + gpu_rules.mosaic_kernels(other)["paged_decode"]
    faults = gpu_rules.without_registers({"paged_decode": both}, seen)
    assert faults == [("register lines of paged_decode", 1, "at least 2")]


def test_an_expected_kernel_must_be_called_in_every_layer_of_one_program():
    counts = [{"paged_decode": 4}, {"paged_prefill": 3}]
    assert gpu_rules.missing_kernels(counts, ["paged_decode"], 4) == []
    faults = gpu_rules.missing_kernels(counts, ["paged_prefill", "other"], 4)
    assert [fault.value for fault in faults] == [3, 0]


def test_temporary_memory_and_reused_bytes_have_limits():
    limits = {"a layer": 100, "the gathered cache": 50}
    assert gpu_rules.large_temporary(49, limits) == []
    assert len(gpu_rules.large_temporary(50, limits)) == 1
    assert len(gpu_rules.large_temporary(100, limits)) == 2
    assert gpu_rules.small_alias(100, 100) == []
    assert len(gpu_rules.small_alias(99, 100)) == 1


def test_shapes_have_their_size_in_memory():
    step = module("%z = (s4[3,4]{1,0:E(4)}, pred[5]{0}, f8e4m3fn[6]{0}, f32[]) tuple()")
    sizes = [leaf.num_bytes for leaf in step.entry.instructions["z"].leaves]
    assert sizes == [6, 5, 6, 4]


def test_what_stands_in_the_byte_code_of_a_kernel_is_not_read():
    code = "output_to_operand_aliasing={{0}: (0, {})}"
    call = f'f32[4]{{0}} custom-call(%x), backend_config={{module = "{code}"}}'
    assert parse_instruction("z", call).aliases == ()
    assert parse_instruction("z", f"f32[4]{{0}} custom-call(%x), {code}").aliases == (
        (0, 0),
    )


def test_a_fault_is_one_line():
    fault = gpu_rules.Fault("bytes that k spills", 8)
    assert fault.line("decode[64]") == (
        "FAIL decode[64]: bytes that k spills: 8, limit 0"
    )


def test_uses_name_the_reader_of_a_pool_behind_a_kernel_that_changes_it():
    step = module("%z = bf16[4]{0} reduce(%pool2, %ids), to_apply=%add")
    pool = gpu_rules.program_arguments(step, "kv_cache")[0]
    readers = {use.instruction.name for use in uses(step, pool, LIVE_ELEMENTS)}
    assert readers == {"pool1", "o", "z"}
