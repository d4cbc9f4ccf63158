"""Graphs for tests: a builder for hand-made ones, Hypothesis strategies for random ones."""

import math

from hypothesis import strategies as st

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId

ITEM = {"float32": 4, "bfloat16": 2, "bool": 1, "int32": 4}


class Builder:
    """Writes a graph like a program: ``x = b.input(8, 4); y = b.op("exp", x)``."""

    def __init__(self):
        self.values, self.ops, self.inputs = [], [], []

    def value(self, shape, dtype="float32"):
        shape = tuple(shape)
        size = math.prod(shape) * ITEM[dtype]
        self.values.append(Value(id=ValueId(len(self.values)), nbytes=size, shape=shape, dtype=dtype))
        return self.values[-1].id

    def input(self, *shape, dtype="float32"):
        self.inputs.append(self.value(shape, dtype))
        return self.inputs[-1]

    def op(self, primitive, *operands, shape=None, dtype=None, results=None, **fields):
        """One op; its result looks like the first operand unless said otherwise. ``results``: several shapes."""
        like = self.values[operands[0]] if operands else None
        shapes = [tuple(like.shape if shape is None else shape)] if results is None else results
        made = tuple(self.value(s, dtype or (like.dtype if like else "float32")) for s in shapes)
        self.ops.append(
            Op(id=OpId(len(self.ops)), primitive=primitive, operands=tuple(operands), results=made, **fields)
        )
        return made[0] if results is None else made

    def dot(self, left, right, **fields):
        """A product of two matrices, FLOPs counted."""
        (m, k), (_, n) = self.values[left].shape, self.values[right].shape
        return self.op("dot_general", left, right, shape=(m, n), flops=2.0 * m * n * k, **fields)

    def graph(self, *outputs, donated=()):
        return Graph(
            values=tuple(self.values),
            ops=tuple(self.ops),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            donated=frozenset(donated),
        )


SAME_BYTES = ("reshape", "squeeze", "bitcast_convert_type")
IN_PLACE = ("scatter-add", "dynamic_update_slice")
SOLID = ("dot_general", "cumsum", "conv_general_dilated", "ragged_dot")
"""Neither fused, nor in place, nor views: every result is a buffer of its own."""
ANY = ("add", "exp", "mul", "broadcast_in_dim", "transpose", "reduce_sum", *SOLID, *SAME_BYTES, *IN_PLACE)
STRUCTURE = ("split", "debug_callback", "optimization_barrier", "scan")


def loop_body(width):
    """A body with a solid op inside: carry and slice in, carry and slice out."""
    b = Builder()
    carry, x = b.input(width), b.input(width)
    y = b.op("tanh", b.op("cumsum", b.op("add", carry, x)))
    return b.graph(y, b.op("exp", y))


@st.composite
def graphs(draw, primitives=ANY, most_ops=20, structure=True):
    """Any schedule: ops read earlier values at random; with ``structure`` also effects, loops and barriers."""
    b = Builder()
    width = st.integers(1, 16)
    for _ in range(draw(st.integers(1, 4))):
        b.input(draw(width))
    kinds = [*primitives, *(STRUCTURE if structure else ())]
    # Mostly recent values, sometimes old ones: chains with residuals.
    reads = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=3)
    for _ in range(draw(st.integers(1, most_ops))):
        kind, n = draw(st.sampled_from(kinds)), draw(width)
        operands = tuple(ValueId(max(len(b.values) - k, 0)) for k in draw(reads))
        if kind in SAME_BYTES:
            b.op(kind, operands[0])
        elif kind in IN_PLACE:
            b.op(kind, *operands)
        elif kind == "split":
            b.op(kind, operands[0], results=[(n,), (17 - n,)])
        elif kind == "debug_callback":
            b.op(kind, *operands, results=[(n,)] * (n % 2), pinned=True)
        elif kind == "optimization_barrier":
            operands = tuple(dict.fromkeys(operands))
            b.op(kind, *operands, results=[b.values[v].shape for v in operands])
        elif kind == "scan":
            fields = {"bodies": (loop_body(n),), "trip_count": 3, "slots": (*operands[:2], -1), "carried": (0, 1)}
            b.op(kind, *operands[:2], results=[(n,), (3, n)], **fields)
        else:
            b.op(kind, *operands, shape=(n,), flops=float(n) if kind in SOLID else 0.0)
    made = [v for op in b.ops for v in op.results] or b.inputs
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
    donated = draw(st.lists(st.sampled_from(b.inputs), max_size=2)) if structure else ()
    return b.graph(*outputs, donated=donated)


@st.composite
def train_steps(draw, most_layers=8, pinned=False):
    """Forward layers that leave residuals, a backward pass that reads them in reverse, an update."""
    b = Builder()
    size = st.sampled_from([8, 16, 32, 64])
    batch, widths = draw(size), [draw(size)]
    x = b.input(batch, widths[0])
    layers = []
    for _ in range(draw(st.integers(2, most_layers))):
        kind = draw(st.sampled_from(["dense", "residual", "norm"]))
        if kind == "dense":
            widths.append(draw(size))
            w = b.input(widths[-2], widths[-1])
            z = b.dot(x, w)
            y = b.op("tanh", z)
        elif kind == "residual":
            w = b.input(widths[-1], widths[-1])
            z = b.op("logistic", b.dot(x, w))
            y = b.op("add", x, z)
        else:
            w = None
            z = b.op("rsqrt", b.op("reduce_sum", b.op("mul", x, x), shape=(batch,)))
            y = b.op("mul", x, b.op("broadcast_in_dim", z, shape=(batch, widths[-1])))
        layers.append((kind, w, x, z, y))
        x = y
        if pinned and draw(st.integers(0, 4)) == 0:
            b.op("debug_callback", x, results=[], pinned=True)
    loss = b.op("reduce_sum", b.op("exp", x), shape=())
    g = b.op("exp", x)
    updated, donated = [], []
    for kind, w, x, z, y in reversed(layers):
        if kind == "norm":
            n = b.op("broadcast_in_dim", b.op("mul", z, z), shape=b.values[g].shape)
            g = b.op("mul", g, b.op("mul", n, y))
            continue
        g_in = g
        g = b.op("mul", g, b.op("sub", z, y) if kind == "residual" else b.op("mul", y, y))
        dw = b.dot(b.op("transpose", x, shape=b.values[x].shape[::-1]), g)
        updated.append(b.op("sub", w, dw))
        donated.append(w)
        g = b.dot(g, b.op("transpose", w, shape=b.values[w].shape[::-1]))
        if kind == "residual":
            g = b.op("add", g, g_in)
    return b.graph(loss, g, *updated, donated=donated)


def network(layers, gated, batch=512, width=64):
    """A train step of dense layers with its whole backward pass and plain SGD.

    ``gated``: z * logistic(z) behind each product, which the backward pass recomputes from z;
    otherwise tanh, where all that waits is one value per layer, each as wide as the next.
    """
    b = Builder()
    x = b.input(batch, width)
    ws = [b.input(width, width) for _ in range(layers)]
    ys, zs = [x], []
    for w in ws:
        zs.append(b.dot(ys[-1], w))
        ys.append(b.op("mul", zs[-1], b.op("logistic", zs[-1])) if gated else b.op("tanh", zs[-1]))
    turn = len(b.ops)
    g = b.op("sub", ys[-1], x)
    updated = []
    for k in reversed(range(layers)):
        g = b.op("mul", g, b.op("neg", zs[k]) if gated else b.op("integer_pow", ys[k + 1]))
        updated.append(b.op("sub", ws[k], b.dot(b.op("transpose", ys[k], shape=(width, batch)), g)))
        g = b.dot(g, b.op("transpose", ws[k]))
    return b.graph(*reversed(updated), donated=ws), turn, batch * width * 4


def solid_chain(sizes, work, top=4, skips=()):
    """x -> v1 -> … -> vn of ``sizes`` elements and ``work`` FLOPs each, and a descent that reads them in reverse.

    Nothing fuses, so every value is a buffer. ``skips``: (i, j) makes v_j read v_i too. ``top``: ops at the turn.
    """
    b = Builder()
    vs = [b.input(1)]
    for j, (size, flops) in enumerate(zip(sizes, work, strict=True), 1):
        reads = [vs[i] for i, k in skips if k == j and i < j - 1]
        vs.append(b.op("cumsum", vs[-1], *reads, shape=(size,), flops=flops))
    g = vs[-1]
    for _ in range(top):
        g = b.op("cumsum", g, shape=(1,))
    for v in reversed(vs[1:]):
        g = b.op("cumsum", g, v, shape=(1,))
    return b.graph(g)
