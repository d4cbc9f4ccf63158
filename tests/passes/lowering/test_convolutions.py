"""`passes.lowering.convolutions`: cuDNN's order of operands, and what it does in one call."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from jaxtensile.ir.ir import producers
from jaxtensile.passes.lowering.convolutions import LAST_BEFORE_8, LAST_FROM_8, LAST_FROM_9
from jaxtensile.passes.lowering.lowered import lowered
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.switches import off

IMAGES = jax.ShapeDtypeStruct((16, 32, 32, 64), jnp.float32)
FILTERS = [jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)] * 3
BIAS = jax.ShapeDtypeStruct((64,), jnp.float32)
LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def conv(x, w, order=LAST):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=order)


def network(filters, x):
    for w in filters:
        x = jax.nn.relu(conv(x, w))
    return (x**2).mean()


def graph(f, *args):
    return trace_jaxpr(jax.make_jaxpr(f)(*args)).graph


def transposed(low):
    """Which inputs are transposed, each once."""
    copies = [op.operands[0] for op in low.ops if op.primitive == "transpose"]
    assert len(set(copies)) == len(copies)
    return set(copies)


@pytest.mark.parametrize(
    "order, dtype, channels_last, images, filters",
    [
        (LAST, "float32", LAST_FROM_9, False, True),
        (LAST, "float32", LAST_FROM_8, True, True),
        (LAST, "bfloat16", LAST_FROM_8, False, True),
        (LAST, "bfloat16", LAST_BEFORE_8, True, True),
        (LAST, "float16", LAST_BEFORE_8, False, True),
        (FIRST, "float32", LAST_FROM_9, True, False),
        (FIRST, "float32", LAST_FROM_8, False, False),
        (LAST, "float32", None, False, False),
    ],
)
def test_what_a_program_is_given_is_transposed_once_for_all_its_convolutions(
    order, dtype, channels_last, images, filters
):
    x = jax.ShapeDtypeStruct((16, 64, 64, 64), dtype)
    w = jax.ShapeDtypeStruct((3, 3, 64, 64) if order is LAST else (64, 64, 3, 3), dtype)

    def loss(w, x):
        return ((conv(x, w, order) + conv(x, 2 * w, order)).astype("float32") ** 2).sum()

    expected = [v for v, is_so in enumerate((filters, images)) if is_so]
    assert transposed(lowered(graph(jax.grad(loss, (0, 1)), w, x), channels_last).graph) == set(expected)
    last = graph(jax.grad(lambda w, x: conv(x, w, order).astype("float32").sum()), w, x)
    assert transposed(lowered(last, channels_last).graph) == ({1} if images else set()), "a filter's gradient alone"


def test_gradients_take_the_filter_as_it_is():
    g = graph(jax.grad(network, (0, 1)), FILTERS, IMAGES)
    low = lowered(g).graph
    made = producers(low)
    reversed_ones = [op.results[0] for op in low.ops if op.primitive == "rev"]
    assert len(reversed_ones) == 3
    assert not any(v in op.operands for op in low.ops for v in reversed_ones), "nobody reads them"
    makers = [low.ops[made[op.operands[1]]].primitive for op in low.ops if op.primitive == "conv_general_dilated"]
    assert makers.count("transpose") == 6, "three copies, each read forwards and backwards"


def called(f, *args):
    """What a call does for a function of one convolution, by primitive."""
    g = graph(f, *args)
    low = lowered(g).graph
    assert len(low.ops) == len(g.ops) + 1, "the filter's copy"
    new = [op for op in low.ops if op.primitive != "transpose"]
    (call,) = (op for op in new if op.primitive == "conv_general_dilated")
    return [o.primitive for o, n in zip(g.ops, new, strict=True) if o.primitive != n.primitive], len(call.operands)


def test_biases_one_array_and_a_relu_are_done_in_the_call():
    w = FILTERS[0]
    assert called(lambda x, w: jax.nn.relu(conv(x, w)), IMAGES, w) == (["max"], 2)
    assert called(lambda x, w, b: jax.nn.relu(conv(x, w) + b), IMAGES, w, BIAS) == (["add", "max"], 2)
    assert called(lambda x, w, b: jax.nn.relu(x + conv(x, w) + b) * 2, IMAGES, w, BIAS) == (["add", "add", "max"], 3)
    assert called(lambda x, w: jax.nn.relu(conv(x, w) + x) + x, IMAGES, w) == (["add", "max"], 3)


def test_other_work_is_not():
    w = FILTERS[0]
    assert called(lambda x, w: jnp.tanh(conv(x, w)), IMAGES, w) == ([], 2)
    assert called(lambda x, w: conv(x, w) + jnp.tanh(x), IMAGES, w)[0] == [], "made later than the convolution"
    assert called(lambda x, w: conv(x, w) + x + x, IMAGES, w) == (["add"], 3), "one array only"
    assert called(lambda x, w: (lambda y: (y, jax.nn.relu(y)))(conv(x, w)), IMAGES, w) == ([], 2), "two want it"
    assert called(lambda x, w: (lambda y: jax.nn.relu(y) * y)(conv(x, w)), IMAGES, w) == ([], 2)
    assert called(lambda x, w: jnp.maximum(conv(x, w), x), IMAGES, w) == ([], 2)


def test_both_can_be_turned_off():
    g = graph(lambda x, w: jax.nn.relu(conv(x, w)), IMAGES, FILTERS[0])
    with off("ordered_convolutions", "fused_convolutions"):
        assert lowered(g).graph is g


@pytest.mark.cuda_aot
@pytest.mark.parametrize("target", ["nvidia-h200", "nvidia-a100-40gb"])
def test_a_network_needs_what_was_said(target):
    """Its last gradient is not written over what a convolution made; an A100 transposes the images as well."""
    said, true = (
        jaxtensile.estimate(jax.value_and_grad(network), FILTERS, IMAGES, target=target, exact=exact)
        for exact in (False, True)
    )
    assert said.device == pytest.approx(true.device, rel=0.01)
