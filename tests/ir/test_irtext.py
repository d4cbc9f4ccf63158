"""Graphs as text: every graph reads back as it was; two of them stand in tests/golden to be looked at."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, train_steps
from jaxtensile.errors import JaxtensileError
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Program
from jaxtensile.ir.text import TextError, format_graph, parse_graph
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.clones import with_clones
from jaxtensile.passes.recompute.stages import boundary_at
from jaxtensile.passes.verify.check import check
from jaxtensile.units import format_bytes
from paths import TESTS

GOLDEN = TESTS / "golden"


@given(graphs())
@settings(max_examples=80)
def test_a_graph_reads_back(graph):
    assert parse_graph(format_graph(graph)) == graph
    assert parse_graph(format_graph(graph, note=lambda op: f"{op.primitive} = (%0) # {{")) == graph


@given(train_steps(pinned=True))
@settings(max_examples=20)
def test_a_train_step_reads_back(graph):
    assert parse_graph(format_graph(graph)) == graph


@given(
    st.sampled_from("float32 bfloat16 float8_e4m3fn bool int4 uint8 complex64 key<fry> AbstractToken".split()),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 10**12),
    st.sampled_from(["device", "host"]),
)
@settings(max_examples=60)
def test_a_value_reads_back(dtype, shape, nbytes, space):
    b = Builder()
    x = b.input(1)
    value = replace(b.values[x], dtype=dtype, shape=tuple(shape), nbytes=nbytes, space=space)
    graph = Graph(
        values=(value,), ops=(), inputs=(x,), outputs=(x, x), donated=frozenset([x]), output_slots=(x, None, x)
    )
    assert parse_graph(format_graph(graph)) == graph


def test_the_form():
    b = Builder()
    x, w = b.input(8, 64), b.input(64, 64, dtype="bfloat16")
    body = Builder()
    c, i = body.input(8, 64), body.input(dtype="int32")
    inner = body.graph(body.op("neg", c), i)
    y = b.op("dot_general", x, w, flops=65536.0)
    fields = {"bodies": (inner,), "trip_count": 3, "slots": (y, -1), "carried": (0, 2)}
    carry, _ = b.op("scan", y, results=[(8, 64), (3, 8)], **fields)
    b.op("debug_callback", carry, results=[], pinned=True)
    graph = b.graph(carry, y, donated=[w])
    text = """
        graph(%0:f32[8,64], %1:bf16[64,64] donated)
          %2:f32[8,64] = dot_general(%0, %1) flops=65536.0
          %3:f32[8,64], %4:f32[3,8] = scan(%2) trips=3 slots=%2,_ carried=0,2 {
            graph(%0:f32[8,64], %1:i32[])
              %2:f32[8,64] = neg(%0)
            return %2, %1
          }
          debug_callback(%3) pinned=yes
        return %3, %2
    """
    assert format_graph(graph).split() == text.split()
    assert parse_graph(text) == graph


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'the end'|the end"),
        ("grph()\nreturn", r"expected graph\(inputs\)"),
        ("graph(%0:f32[2])\n %1:f32[2] = exp %0\nreturn %1", "expected an op or return"),
        ("graph(%0:f32[2])\n %2:f32[2] = exp(%0)\nreturn %2", "values without a gap"),
        ("graph(%0:f32[2])\n %1:f32[2] = exp(%0)", "expected an op or return"),
        ("graph()\nreturn\nreturn", "nothing after"),
        ("graph()\n scan() {\n graph()\n return\n", "expected"),
    ],
)
def test_what_is_no_graph_is_named(text, says):
    with pytest.raises(TextError, match=says) as caught:
        parse_graph(text)
    assert isinstance(caught.value, JaxtensileError)


# ---- goldens: regenerate by deleting the file and running the test ------------------------------


def two_layers():
    """Loss and SGD update of x @ w1 → gelu-like → @ w2 → gelu-like, batch 1024, as a hand-written graph."""
    b = Builder()
    x, w1, w2 = b.input(1024, 64), b.input(64, 256), b.input(256, 64)
    z1 = b.dot(x, w1)
    y1 = b.op("mul", z1, b.op("logistic", z1))
    z2 = b.dot(y1, w2)
    y2 = b.op("mul", z2, b.op("logistic", z2))
    turn = len(b.ops)
    loss = b.op("reduce_sum", y2, shape=())
    g2 = b.op("mul", b.op("neg", y2), z2)
    d2 = b.dot(b.op("transpose", y1, shape=(256, 1024)), g2)
    g1 = b.op("mul", b.dot(g2, b.op("transpose", w2, shape=(64, 256))), z1)
    d1 = b.dot(b.op("transpose", x, shape=(64, 1024)), g1)
    return b.graph(loss, b.op("sub", w1, d1), b.op("sub", w2, d2), donated=[w1, w2]), turn


def compare(name, text):
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


def test_golden_graph():
    """Each op with what it launches and the bytes live while it runs."""
    graph, _ = two_layers()
    live = live_ranges(graph)

    def note(op):
        return f"{format_bytes(live.profile[op.id])} live" if live.kernels.is_root[op.id] else "fused"

    text = format_graph(graph, note)
    assert parse_graph(text) == graph
    compare("two_layers.txt", text)


def test_golden_program():
    """The same step when only the results of products wait for the backward pass."""
    graph, turn = two_layers()
    boundary = boundary_at(graph, turn)
    kept = frozenset(r for op in graph.ops[:turn] for r in op.results if op.primitive == "dot_general")
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, [])
    check(graph, program)
    live = live_ranges(program.graph)

    def note(op):
        origin = program.origin[op.id]
        seen = origin in program.origin[: op.id]
        what = "barrier" if origin < 0 else f"op {origin} again" if seen else f"op {origin}"
        return f"{what}, {format_bytes(live.profile[op.id])} live" if live.kernels.is_root[op.id] else f"{what}, fused"

    text = format_graph(program.graph, note)
    assert parse_graph(text) == program.graph
    compare("two_layers_planned.txt", text)
