"""A compiled step, small enough to plant faults in."""

from headrace.scripts.hlo_text import parse_module

# A decode step of two layers as XLA writes it, shortened: D 8, F 16, 4 rows, 100 ids.
STEP = """\
HloModule jit_decode, is_scheduled=true

%dots (p: bf16[4,8], q: bf16[32,8]) -> bf16[4,32] {
  %p = bf16[4,8]{1,0} parameter(0)
  %q = bf16[32,8]{1,0} parameter(1)
  ROOT %d = bf16[4,32]{1,0} dot(%p, %q), lhs_contracting_dims={1}
}

%rows (t: bf16[100,8], i: s32[4]) -> bf16[4,8] {
  %t = bf16[100,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %g = bf16[4,8]{1,0} gather(%t, %i), slice_sizes={1,8}
}

%writes (k: bf16[2,5,2,16,4], u: bf16[4,32]) -> bf16[2,5,2,16,4] {
  %k = bf16[2,5,2,16,4]{4,3,2,1,0} parameter(0)
  %u = bf16[4,32]{1,0} parameter(1)
  %b = bf16[4,2,4]{2,1,0} bitcast(%u)
  ROOT %s = bf16[2,5,2,16,4]{4,3,2,1,0} scatter(%k, %b, %b), to_apply=%add
}

%cond (c: (s32[], bf16[32,8])) -> pred[] {
  %c = (s32[], bf16[32,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%n, %n), direction=LT
}

%body (c: (s32[], bf16[32,8])) -> (s32[], bf16[32,8]) {
  %c = (s32[], bf16[32,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %w = bf16[32,8]{1,0} get-tuple-element(%c), index=1
  %sum = f32[8]{0} reduce(%w, %n), dimensions={0}, to_apply=%add
  ROOT %again = (s32[], bf16[32,8]{1,0}) tuple(%n, %w)
}

ENTRY %main (a: bf16[100,8], b: bf16[32,8]) -> (bf16[4,32], bf16[2,5,2,16,4]) {
  %table = bf16[100,8]{1,0} parameter(0), metadata={op_name="params['embedding']"}
  %w0 = bf16[2,16,8]{2,1,0} parameter(1), metadata={op_name="params['layer_0']['w']"}
  %pool = bf16[2,5,2,16,4]{4,3,2,1,0} parameter(2), metadata={op_name="kv_cache[0][0]"}
  %ids = s32[4]{0} parameter(3), metadata={op_name="packed"}
  %x = bf16[4,8]{1,0} fusion(%table, %ids), kind=kLoop, calls=%rows, metadata={op_name="jit(f)/gather"}
  %flat = bf16[32,8]{1,0} bitcast(%w0)
  %y0 = bf16[4,32]{1,0} fusion(%x, %flat), kind=kCustom, calls=%dots, metadata={op_name="jit(f)/layer_0/dot"}
  %pool1 = bf16[2,5,2,16,4]{4,3,2,1,0} fusion(%pool, %y0), kind=kInput, calls=%writes, metadata={op_name="jit(f)/layer_1/scatter"}
  %o = (bf16[4,32]{1,0}, /*index=1*/bf16[2,5,2,16,4]{4,3,2,1,0}) custom-call(%y0, %pool1), custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{1}: (1, {})}, metadata={op_name="jit(f)/layer_1/paged_decode/mpmd_map"}, backend_config={kernel_hash = "\\\\A1\\\\22", module = "calls=%none ("}
  %out = bf16[4,32]{1,0} get-tuple-element(%o), index=0
PLANTED
  %pool2 = bf16[2,5,2,16,4]{4,3,2,1,0} get-tuple-element(%o), index=1
  ROOT %end = (bf16[4,32]{1,0}, bf16[2,5,2,16,4]{4,3,2,1,0}) tuple(%out, %pool2)
}
"""  # noqa: E501
W0_BYTES, LIVE_ELEMENTS, LAYER = 2 * 16 * 8 * 2, 2 * 64 * 4, "metadata={op_name="


def module(*planted):
    """The step with further lines in its entry computation."""
    return parse_module(STEP.replace("PLANTED", "\n".join(f"  {p}" for p in planted)))
