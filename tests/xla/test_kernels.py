"""`kernels`: what XLA's text of a scheduled module says of each kernel, and in which order they run."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.xla.hlo import hlo_flops
from jaxtensile.xla.kernels import Copied, Copying, Loop, schedule_of
from jaxtensile.xla.target import compiler_options, resolve
from scheduled_hlo import MODULE

CARD = "nvidia-h100-80gb"


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
