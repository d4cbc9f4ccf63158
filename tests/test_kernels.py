"""`kernels`: what XLA's text of a scheduled module says of each kernel, and in which order they run."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.xla.hlo import hlo_flops
from jaxtensile.xla.kernels import Copied, Copying, Loop, schedule_of
from jaxtensile.xla.target import compiler_options, resolve

CARD = "nvidia-h100-80gb"
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


def test_what_is_run_and_in_which_order():
    copying, gemm, copied, loop, last = schedule_of(MODULE)
    assert copying == Copying("out-start", 64 * 96 * 2, True) and copied == Copied("out-start")
    assert isinstance(loop, Loop) and loop.trips == 7 and [k.name for k in loop.body] == ["slice_fusion", "put_fusion"]
    assert (gemm.kind, gemm.source, last.kind) == ("product", "jit(step)/dot", "copy")


def test_a_product_has_its_sizes():
    gemm = schedule_of(MODULE)[1]
    (product,) = gemm.products
    assert (product.batch, product.rows, product.columns, product.depth, product.wide) == (1, 64, 32, 96, False)
    assert gemm.flops == product.flops == 2 * 64 * 32 * 96 and product.aligned
    assert gemm.reads == {"a": 64 * 96 * 2, "b": 96 * 32 * 2} and gemm.written == 64 * 32 * 2


def test_of_what_is_sliced_and_put_the_slices_move():
    taken, put = schedule_of(MODULE)[3].body
    rows = 16 * 256 * 4
    assert taken.reads == {"table": rows, "bias": 256 * 4, "i": 0} and taken.written == rows
    assert put.reads == {"table": 0, "slice_fusion": rows, "i": 0} and put.written == rows


@pytest.mark.cuda_aot
def test_of_what_is_compiled_the_products_are_the_programs():
    """On a real text: all products of a step in its kernels, and a loop's as often as it turns."""

    def step(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, w)[0].sum()

    where = jax.sharding.SingleDeviceSharding(resolve(CARD))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in ((8, 512, 512), (256, 512))]
    lowered = jax.jit(jax.grad(step)).lower(*args)
    text = lowered.compile(compiler_options=dict(compiler_options(CARD))).as_text()

    def flops(schedule):
        return sum(s.trips * flops(s.body) if isinstance(s, Loop) else getattr(s, "flops", 0.0) for s in schedule)

    assert flops(schedule_of(text)) == hlo_flops(text) == pytest.approx(3 * 8 * 2 * 256 * 512 * 512, rel=0.2)
