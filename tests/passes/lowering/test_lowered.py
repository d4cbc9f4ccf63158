"""`passes.lowered`: padding and pools as XLA writes them out, and the bytes that this costs."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from jaxtensile.ir.ir import producers
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.lowering.lowered import lowered
from jaxtensile.program.trace import trace_jaxpr
from programs import descent

H200 = "nvidia-h200"
IMAGES = jax.ShapeDtypeStruct((8, 56, 56, 64), jnp.float32)
FILTER = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)


def graph(f, *args):
    return trace_jaxpr(jax.make_jaxpr(f)(*args)).graph


def conv(x, w, stride=1, padding="SAME", dilation=None):
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, lhs_dilation=dilation, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(x, padding="VALID"):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), padding)


def count(g, primitive):
    return sum(op.primitive == primitive for op in g.ops)


def test_programs_without_such_ops_stay_as_they_are():
    g = graph(lambda x, w: conv(jnp.tanh(x), jnp.tanh(w)).sum(), IMAGES, FILTER)
    assert lowered(g).graph is g


def test_the_convolutions_of_one_gradient_share_a_padded_copy():
    g = graph(jax.value_and_grad(lambda w, x: conv(jnp.tanh(x), w, 2).sum()), FILTER, IMAGES)
    low = lowered(g)
    pads = [op for op in low.graph.ops if op.primitive == "pad"]
    assert len(pads) == 1 + count(g, "pad")
    copy = low.graph.values[pads[0].results[0]]
    assert copy.nbytes == 8 * 57 * 57 * 64 * 4, "one row and one column more: stride 2 pads (0, 1)"
    assert sum(copy.id in op.operands for op in low.graph.ops) == 2
    assert [g.ops[i].primitive for i in low.origin] == [
        "conv_general_dilated" if op.primitive in ("pad", "transpose") else op.primitive for op in low.graph.ops
    ]


def test_the_gradient_of_a_strided_filter_of_one_pads_nothing():
    """Its last windows end before the input does: as much behind as before, none, is as good."""
    one = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32)
    g = graph(jax.grad(lambda w, x: conv(jnp.tanh(x), w, 2).sum()), one, IMAGES)
    assert not any(op.padded for op in g.ops if op.primitive == "conv_general_dilated")
    assert not count(lowered(g).graph, "pad")


def test_a_transposed_convolution_writes_its_dilated_input_a_gradient_does_not():
    g = graph(lambda x, w: conv(x, w, padding=((2, 2), (2, 2)), dilation=(2, 2)), IMAGES, FILTER)
    (pad,) = (op for op in lowered(g).graph.ops if op.primitive == "pad")
    assert lowered(g).graph.values[pad.results[0]].nbytes == 8 * 115 * 115 * 64 * 4
    gradient = graph(jax.grad(lambda x, w: conv(x, w, 2, "VALID").sum()), IMAGES, FILTER)
    assert count(gradient, "rev") and not count(lowered(gradient).graph, "pad")


def padded(x, by):
    return jnp.pad(x, ((0, 0), (by, 1), (1, 1), (0, 0)))


def test_convolutions_pad_what_is_padded_with_zeros_alike_on_both_sides():
    def loss(w, x, by, stride=1):
        return conv(padded(jnp.tanh(x), by), w, stride, "VALID").sum()

    folded = lowered(graph(jax.grad(lambda w, x: loss(w, x, 1)), FILTER, IMAGES)).graph
    assert not count(folded, "pad"), "both the convolution and its gradient pad"
    largest = max(r.nbytes for r in live_ranges(folded).ranges)
    assert largest == 8 * 56 * 56 * 64 * 4
    assert count(lowered(graph(lambda w, x: loss(w, x, 0), FILTER, IMAGES)).graph, "pad") == 1, "one side only"
    both = graph(lambda w, x: (loss(w, x, 1), padded(x, 1)), FILTER, IMAGES)
    assert count(lowered(both).graph, "pad") == 1, "what is returned exists"
    ones = graph(lambda w, x: conv(jnp.pad(x, 1, constant_values=1)[1:-1, :, :, 1:-1], w, 1, "VALID"), FILTER, IMAGES)
    assert count(lowered(ones).graph, "pad") == 1


def test_what_makes_nothing_stays():
    def loss(w, x):
        jax.debug.print("{}", w[0, 0, 0, 0])
        return conv(x, w, 2).sum()

    g = graph(loss, FILTER, IMAGES)
    assert any(not op.results for op in g.ops)
    assert len(lowered(g).graph.ops) == len(g.ops) + 2, "the padded copy and the transposed filter"


@pytest.mark.parametrize("size, dilated", [(4, 56), (3, 111)], ids=["alike on both sides", "otherwise"])
def test_the_filters_gradient_of_a_transposed_convolution_transposes_both_operands(size, dilated):
    w = jax.ShapeDtypeStruct((size, size, 64, 64), jnp.float32)
    g = graph(jax.grad(lambda w, x: (lax.conv_transpose(jnp.tanh(x), w, (2, 2), "SAME") ** 2).sum()), w, IMAGES)
    low = lowered(g).graph
    made = producers(low)
    (gradient,) = (op for op in low.ops if op.turned)
    assert [low.ops[made[v]].primitive for v in gradient.operands] == ["transpose", "transpose"]
    assert [low.values[v].nbytes for v in gradient.operands] == [8 * dilated**2 * 64 * 4, 8 * 112 * 112 * 64 * 4]
    assert not any(op.turned for op in graph(jax.grad(lambda w, x: conv(x, w, 2).sum()), FILTER, IMAGES).ops)


def decoder(size):
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = jax.nn.leaky_relu(lax.conv_transpose(h, w, (2, 2), "SAME"), 0.2)
            return (h * h).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    widths = (256, 128, 64, 32, 16)
    weights = [jax.ShapeDtypeStruct((size, size, a, b), jnp.float32) for a, b in pairwise(widths)]
    return step, weights, jax.ShapeDtypeStruct((64, 8, 8, 256), jnp.float32)


@pytest.mark.cuda_aot
@pytest.mark.parametrize("size, within", [(4, 0.04), (5, 0.07)])
def test_a_decoder_needs_what_was_said(size, within):
    """A filter of odd size is padded by different numbers on both sides."""
    step, *args = decoder(size)
    said = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0)
    true = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=True)
    assert said.device == pytest.approx(true.device, rel=within)


def test_the_zeros_of_a_pools_gradient_are_those_of_the_relu():
    g = graph(jax.grad(lambda x: pool(jax.nn.relu(x * 2)).sum()), IMAGES)
    low = lowered(g).graph
    made = producers(low)
    (scatter,) = (op for op in low.ops if op.primitive == "scatter-add")
    (relu,) = (op for op in low.ops if op.primitive == "max")
    copy = low.ops[made[scatter.operands[0]]]
    zeros = low.ops[made[copy.operands[0]]]
    assert (zeros.primitive, zeros.operands) == ("broadcast_in_dim", ()) and zeros.id == relu.id - 1
    assert zeros.results[0] in relu.operands
    places = scatter.operands[2:]
    assert [low.values[v].nbytes for v in places] == 4 * [8 * 28 * 28 * 64 * 4], "an s32 for each of four axes"
    (pools,) = (op for op in low.ops if places[0] in op.results)
    assert low.values[pools.results[-1]].nbytes == 8 * 28 * 28 * 64 * 4, "and the pool, which nobody reads"
    alive = [r for r in live_ranges(low).ranges if r.value == zeros.results[0]]
    assert alive and alive[0].start == zeros.id and alive[0].stop > scatter.id


def test_padded_pools_scatter_into_zeros_of_their_own():
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    g = graph(jax.grad(lambda x: pool(jax.nn.relu(x), padding).sum()), IMAGES)
    low = lowered(g).graph
    (scatter,) = (op for op in low.ops if op.primitive == "scatter-add")
    assert low.values[scatter.results[0]].nbytes == 8 * 58 * 58 * 64 * 4
    assert low.ops[producers(low)[scatter.operands[0]]].primitive == "broadcast_in_dim"
    assert low.ops[-1].results == g.ops[-1].results


def vgg(weights, x):
    for w in weights:
        x = pool(jax.nn.relu(conv(jax.nn.relu(conv(x, w)), w)))
    return (x * x).mean()


@pytest.mark.cuda_aot
def test_a_network_of_pools_needs_what_was_said():
    step = descent(vgg)

    args = [FILTER] * 3, jax.ShapeDtypeStruct((16, 112, 112, 64), jnp.float32)
    static, exact = (jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=e) for e in (False, True))
    assert abs(static.device / exact.device - 1) < 0.1


def separable(weights, x):
    """Depthwise and pointwise convolutions, batch norm, pools of overlapping windows beside strided convolutions."""

    def norm(x, p):
        mean, variance = x.mean((0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
        scale = lax.rsqrt(variance + 1e-3) * p[0]
        return x * scale + (p[1] - mean * scale)

    for w in weights:
        rest = norm(conv(x, w["rest"], 2), w["norm"][0])
        x = jax.nn.relu(x)
        x = lax.conv_general_dilated(
            x, w["deep"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
        )
        x = norm(conv(x, w["point"]), w["norm"][1])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") + rest
    return (x * x).mean()


@pytest.mark.cuda_aot
@pytest.mark.parametrize("pixels", [112, 75])
def test_a_network_of_separable_convolutions_and_pools_needs_what_was_said(pixels):
    step = descent(separable)

    def layer(a, b):
        shapes = {"rest": (1, 1, a, b), "deep": (3, 3, 1, a), "point": (1, 1, a, b), "norm": (2, 2, b)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    args = (
        [layer(64, 128), layer(128, 256), layer(256, 512)],
        jax.ShapeDtypeStruct((16, pixels, pixels, 64), jnp.float32),
    )
    static, exact = (jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=e) for e in (False, True))
    assert static.device == pytest.approx(exact.device, rel=0.02)


def controlled(rows, batch):
    """A train step of a table that is read by rows and as a matrix, as embeddings with tied weights are."""

    def step(weights, tokens):
        def loss(weights):
            table, layers = weights
            x = table[tokens]
            for a, b in layers:
                x = x + jax.nn.gelu(x @ a) @ b
            scores = jax.nn.log_softmax(x[:, :-1] @ table.T)
            return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    def weight(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = [(weight(512, 2048), weight(2048, 512))] * 4
    return step, (weight(rows, 512), layers), jax.ShapeDtypeStruct((batch, 256), jnp.int32)


def test_rows_are_added_to_the_product_that_is_a_tables_other_gradient():
    step, *args = controlled(1024, 2)
    g = trace_jaxpr(jax.make_jaxpr(step)(*args)).graph
    low = lowered(g).graph
    (added,) = (
        op for op in low.ops if op.primitive == "scatter-add" and low.values[op.results[0]].shape == (1024, 512)
    )
    first = low.ops[producers(low)[added.operands[0]]]
    assert first.primitive in ("dot_general", "transpose") and len(low.ops) == len(g.ops) - 1


@pytest.mark.cuda_aot
@pytest.mark.parametrize("batch", [2, 4])
def test_a_network_with_tied_weights_needs_what_was_said(batch):
    step, *args = controlled(65536, batch)
    static, exact = (jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=e) for e in (False, True))
    assert static.device == pytest.approx(exact.device, rel=0.05)
