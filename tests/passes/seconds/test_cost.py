"""Seconds per op: rooflines by hand for single ops, sane relations for whole programs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from graphs import Builder, graphs
from jaxtensile.devices.profiles import TRAFFIC_WEIGHT, profile
from jaxtensile.ir.ir import WHILE_TRIPS
from jaxtensile.passes.lifetimes.fusion import IN_PLACE
from jaxtensile.passes.seconds import cost
from jaxtensile.passes.seconds.cost import matmul_rate, op_costs, unknown_primitives

DEVICE = profile("nvidia-h200")
BANDWIDTH = DEVICE.memory_bandwidth * cost.COPY_SHARE
LAUNCH = DEVICE.kernel_launch


def only(graph):
    """Seconds and charge of the last op."""
    costs = op_costs(graph, DEVICE)
    assert len(costs.seconds) == len(costs.charge) == len(graph.ops)
    return costs.seconds[-1], costs.charge[-1]


def test_a_large_product_is_bound_by_arithmetic():
    b = Builder()
    x, w = b.input(4096, 8192, dtype="bfloat16"), b.input(8192, 4096, dtype="bfloat16")
    seconds, charge = only(b.graph(b.dot(x, w)))
    compute = 2 * 4096 * 4096 * 8192 / (DEVICE.matmul_flops_bf16 * cost.MATMUL_SHARE)
    traffic = 2 * (2 * 4096 * 8192 + 4096 * 4096) / BANDWIDTH
    assert compute > traffic
    assert seconds == pytest.approx(LAUNCH + compute)
    assert charge == pytest.approx(compute + TRAFFIC_WEIGHT * (LAUNCH + traffic))


def test_at_full_weight_the_seconds_are_what_is_charged():
    b = Builder()
    x, w = b.input(64, 8192, dtype="bfloat16"), b.input(8192, 4096, dtype="bfloat16")
    b.op("tanh", b.dot(x, w))
    graph = b.graph(b.op("cumsum", x))
    costs = op_costs(graph, replace(DEVICE, traffic_weight=1.0))
    assert costs.charge == costs.seconds == op_costs(graph, DEVICE).seconds
    assert costs.per_second == 1.0


def test_a_thin_product_is_bound_by_memory():
    b = Builder()
    x, w = b.input(1, 8192, dtype="bfloat16"), b.input(8192, 8192, dtype="bfloat16")
    seconds, _ = only(b.graph(b.dot(x, w)))
    assert seconds == pytest.approx(LAUNCH + 2 * (8192 + 8192**2 + 8192) / BANDWIDTH)


def test_the_operands_decide_about_the_rate():
    b = Builder()
    narrow, wide = b.input(64, 64, dtype="bfloat16"), b.input(64, 64)
    b.dot(narrow, narrow)
    b.dot(narrow, wide)
    graph = b.graph(wide)
    assert matmul_rate(graph.ops[0], graph, DEVICE) == DEVICE.matmul_flops_bf16 * cost.MATMUL_SHARE
    assert matmul_rate(graph.ops[1], graph, DEVICE) == DEVICE.matmul_flops_f32 * cost.MATMUL_SHARE


def test_a_kernel_streams_what_it_reads_and_writes():
    b = Builder()
    x, y = b.input(10**6), b.input(10**6)
    assert only(b.graph(b.op("add", x, y)))[0] == pytest.approx(LAUNCH + 12e6 / BANDWIDTH)


def test_of_what_it_only_takes_slices_of_a_kernel_reads_the_slices():
    def sums(*more):
        b = Builder()
        x = b.input(10**4, 64)
        rows = [b.op("slice", x, shape=(10, 64)) for _ in range(3)]
        return b.graph(b.op("add", b.op("add", *rows[:2]), rows[2], *(b.op(name, x, shape=(10, 64)) for name in more)))

    rows = 4 * 10 * 64
    assert only(sums())[0] == pytest.approx(LAUNCH + 4 * rows / BANDWIDTH)
    assert only(sums("dynamic_slice"))[0] == pytest.approx(LAUNCH + 5 * rows / BANDWIDTH)
    assert only(sums("pad"))[0] == pytest.approx(LAUNCH + (4 * 64 * 10**4 + rows) / BANDWIDTH), "once, and whole"


def test_a_reduction_reads_what_its_fused_operands_come_from():
    b = Builder()
    x = b.input(10**6)
    total = b.op("reduce_sum", b.op("neg", b.op("abs", x)), shape=())
    assert only(b.graph(total))[0] == pytest.approx(LAUNCH + (4e6 + 4) / BANDWIDTH)


def test_fused_ops_cost_a_share_of_their_traffic_and_no_launch():
    def inside(primitive):
        b = Builder()
        y = b.op(primitive, b.input(10**6))
        return op_costs(b.graph(b.op("reduce_sum", y, shape=())), DEVICE).seconds[0]

    assert inside("neg") == pytest.approx(4e6 * cost.FUSED_SHARE / BANDWIDTH)
    assert inside("neg") < inside("tanh") < 4e6 / BANDWIDTH


def test_drawing_again_is_charged_on_tpus_alone():
    """More than a pass through memory there, next to nothing where the mask's draw fuses into its reader, or is drawn
    when its iteration runs."""

    def drawn(device, **where):
        b = Builder()
        bits = b.op("random_bits", b.input(2, dtype="int32"), shape=(10**6,), dtype="int32")
        return op_costs(b.graph(b.op("sqrt", bits)), device, **where).charge[0]

    tpu = profile("tpu-v5e")
    assert drawn(tpu) > 4e6 / tpu.memory_bandwidth
    assert drawn(tpu, body=True) < 0.01 * 4e6 / tpu.memory_bandwidth
    assert drawn(DEVICE) == drawn(DEVICE, body=True) < 0.01 * 4e6 / DEVICE.memory_bandwidth


@pytest.mark.parametrize("primitive", ["reshape", "optimization_barrier"])
def test_views_and_barriers_are_free(primitive):
    b = Builder()
    assert only(b.graph(b.op(primitive, b.input(1000)))) == (0.0, 0.0)


def test_an_update_in_place_costs_what_it_writes():
    b = Builder()
    table, index, rows = b.input(10**6, 16), b.input(100, 1, dtype="int32"), b.input(100, 16)
    seconds, _ = only(b.graph(b.op("scatter-add", table, index, rows)))
    assert seconds < LAUNCH + 10 * (100 * 16 * 4) / BANDWIDTH


def test_a_gather_reads_what_it_takes():
    b = Builder()
    table, index = b.input(10**6, 16), b.input(100, 1, dtype="int32")
    seconds, _ = only(b.graph(b.op("gather", table, index, shape=(100, 16))))
    assert seconds == pytest.approx(LAUNCH + 2 * 100 * 16 * 4 / BANDWIDTH)


def test_a_loop_costs_its_body_as_often_as_it_runs():
    body = Builder()
    c = body.input(1000, 1000)
    inner = body.graph(body.op("add", body.dot(c, c), c))

    def loop(trips):
        b = Builder()
        fields = {"bodies": (inner,), "trip_count": trips, "flops": inner.flops * trips, "carried": (0, 1)}
        x = b.input(1000, 1000)
        return only(b.graph(b.op("scan", x, slots=(x,), **fields)))

    once = sum(op_costs(inner, DEVICE).seconds)
    assert loop(10)[0] == pytest.approx(LAUNCH + 10 * once, rel=0.01)
    assert loop(20)[1] == pytest.approx(2 * loop(10)[1], rel=0.01)


def test_a_branch_costs_the_dearer_one():
    def branch(n):
        b = Builder()
        y = b.input(10**6)
        for _ in range(n):
            y = b.op("cumsum", y)
        return b.graph(y)

    b = Builder()
    x = b.input(10**6)
    seconds, _ = only(b.graph(b.op("cond", x, bodies=(branch(1), branch(4)), slots=(-1, x))))
    assert seconds == pytest.approx(LAUNCH + sum(op_costs(branch(4), DEVICE).seconds))


@given(graphs())
@settings(max_examples=60)
def test_no_op_is_negative_or_endless(graph):
    costs = op_costs(graph, DEVICE)
    assert all(0 <= s < 1 for s in (*costs.seconds, *costs.charge))


@given(graphs())
@settings(max_examples=40)
def test_larger_values_never_cost_less(graph):
    grown = replace(graph, values=tuple(replace(v, nbytes=3 * v.nbytes) for v in graph.values))
    small, large = op_costs(graph, DEVICE), op_costs(grown, DEVICE)
    assert all(a <= b + 1e-15 for a, b in zip(small.seconds, large.seconds, strict=True))


def test_unknown_primitives_are_named_once_bodies_included():
    body = Builder()
    inner = body.graph(body.op("strange", body.input(4)))
    b = Builder()
    x = b.input(4)
    y = b.op("scan", x, bodies=(inner,), slots=(x,), carried=(0, 1))
    graph = b.graph(b.op("stranger", b.op("exp", b.op("stranger", y))))
    assert unknown_primitives(graph) == ("strange", "stranger")
    assert only(graph)[0] == pytest.approx(LAUNCH + cost.UNKNOWN * 32 / BANDWIDTH)


def test_no_primitive_of_this_jax_is_done_again_for_nothing():
    """But for those that take no time, each is charged its work or its traffic; what has no rule, many times."""
    from jax._src.interpreters import mlir

    found = {p.name for rules in (mlir._lowerings, *mlir._platform_specific_lowerings.values()) for p in rules}
    assert len(found) > 250
    for name in sorted(found - cost.FREE):
        b = Builder()
        graph = b.graph(b.op(name, b.input(4096, 4096)))
        seconds, charge = only(graph)
        traffic = (2 * 4 * 4096**2 if name not in IN_PLACE else 0) / BANDWIDTH
        assert seconds >= LAUNCH + traffic * (1 - 1e-9), name
        assert charge >= TRAFFIC_WEIGHT * seconds * (1 - 1e-9), name
        if name not in cost.KNOWN:
            assert charge >= cost.UNKNOWN * traffic and unknown_primitives(graph) == (name,)


def test_sorts_and_transforms_are_charged_as_work_and_a_while_for_some_iterations():
    b = Builder()
    x = b.input(4096, 4096)
    for name in ("sort", "cumsum", "fft"):
        graph = b.graph(b.op(name, x))
        assert only(graph)[1] >= 2 * 4 * 4096**2 / BANDWIDTH
    body = Builder()
    inner = body.graph(body.op("tanh", body.input(4096, 4096)))
    once = sum(op_costs(inner, DEVICE, body=True).seconds)
    graph = b.graph(b.op("while", x, bodies=(inner,), slots=(x,)))
    assert only(graph)[0] == pytest.approx(LAUNCH + WHILE_TRIPS * once)
