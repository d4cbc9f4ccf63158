"""The text of a scheduled module, with one kernel of each kind."""

MODULE = """\
HloModule jit_step, is_scheduled=true

%fused_slice (p0: f32[1024,256], p1: f32[256], p2: s32[]) -> f32[16,256] {
  %p0 = f32[1024,256]{1,0} parameter(0)
  %p1 = f32[256]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %rows = f32[16,256]{1,0} dynamic-slice(%p0, %p2, %zero), dynamic_slice_sizes={16,256}
  %wide = f32[16,256]{1,0} broadcast(%p1), dimensions={1}
  ROOT %add = f32[16,256]{1,0} add(%rows, %wide)
}

%fused_put (q0: f32[1024,256], q1: f32[16,256], q2: s32[]) -> f32[1024,256] {
  %q0 = f32[1024,256]{1,0} parameter(0)
  %q1 = f32[16,256]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %put = f32[1024,256]{1,0} dynamic-update-slice(%q0, %q1, %q2, %none)
}

%fused_dot (r0: bf16[64,96], r1: bf16[96,32]) -> bf16[64,32] {
  %r0 = bf16[64,96]{1,0} parameter(0)
  %r1 = bf16[96,32]{1,0} parameter(1)
  ROOT %dot = bf16[64,32]{1,0} dot(%r0, %r1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[1024,256])) -> (s32[], f32[1024,256]) {
  %state = (s32[], f32[1024,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %table = f32[1024,256]{1,0} get-tuple-element(%state), index=1
  %bias = f32[256]{0} constant({...})
  %slice_fusion = f32[16,256]{1,0} fusion(%table, %bias, %i), kind=kLoop, calls=%fused_slice
  %put_fusion = f32[1024,256]{1,0} fusion(%table, %slice_fusion, %i), kind=kLoop, calls=%fused_put
  ROOT %next = (s32[], f32[1024,256]{1,0}) tuple(%i, %put_fusion)
}

%cond (at: (s32[], f32[1024,256])) -> pred[] {
  %at = (s32[], f32[1024,256]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: bf16[64,96], b: bf16[96,32], t: (s32[], f32[1024,256])) -> bf16[64,32] {
  %a = bf16[64,96]{1,0} parameter(0)
  %b = bf16[96,32]{1,0} parameter(1)
  %t = (s32[], f32[1024,256]{1,0}) parameter(2)
  %out-start = (bf16[64,96]{1,0:S(5)}, bf16[64,96]{1,0}, u32[]) copy-start(%a)
  %gemm = bf16[64,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(step)/dot"}
  %out-done = bf16[64,96]{1,0:S(5)} copy-done(%out-start)
  %loop = (s32[], f32[1024,256]{1,0}) while(%t), condition=%cond, body=%body, known={"known_trip_count":{"n":"7"}}
  ROOT %same = bf16[64,32]{1,0} copy(%gemm)
}
"""
