"""`passes.ties`: barriers before what makes something large, so that what frees something large goes first."""

import importlib
import os
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings

from graphs import Builder, graphs, train_steps
from jax_lines import SOAK
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.control import controlled, with_weights_late
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.passes.verify.check import check
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.xla.target import compiler_options
from ordered import barriers, same_kernels

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
FEWER = settings(QUICK, max_examples=60 if SOAK else 15)
"""For what plans each example first."""


@QUICK
@given(graphs())
def test_it_computes_what_the_program_computes(graph):
    before = Program.unchanged(graph)
    program = controlled(before)
    check(graph, program)
    same_kernels(before, program)


@FEWER
@given(train_steps())
def test_plans_are_tied_too(graph):
    live = live_ranges(graph)
    solve = prepare(Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=live.device))
    for share in (0.6, 0.0):
        plan = solve(live.device - live.temp + int(share * live.temp))
        program = controlled(plan.program)
        check(graph, program)
        same_kernels(plan.program, program)


def attention(waits):
    """Two large products, what is made of one, and a third large one that may wait for that."""
    b = Builder()
    x, w = b.input(4096, 64), b.input(64, 4096)
    scores, soft = b.dot(x, w), b.dot(x, w)
    first, last = b.dot(soft, x), b.dot(soft, x)
    gradient = b.dot(last if waits else first, w)
    return b.graph(last, b.dot(b.op("mul", gradient, scores, shape=(4096, 4096)), x)), first, last


def test_what_reads_a_large_buffer_last_comes_before_the_next_large_one():
    graph, first, last = attention(waits=False)
    before = Program.unchanged(graph)
    program = controlled(before)
    (tie,) = barriers(before, program)
    assert {program.version_of[v] for v in tie.operands} == {first, last}
    behind = [op for op in program.graph.ops[tie.id :] if op.primitive == "dot_general"]
    assert behind[0].operands[0] in tie.results, "the next large one waits"


def test_what_waits_by_itself_is_not_tied():
    program = Program.unchanged(attention(waits=True)[0])
    assert controlled(program) is program


def sums(copied):
    """A large gradient that a sum, and behind a barrier a product reads; something small may wait on the host."""
    b = Builder()
    x, w = b.input(4096, 64), b.input(64, 4096)
    gradient = b.dot(x, w)
    total = b.op("reduce_sum", gradient, shape=(4096,))
    small = b.dot(gradient, x)
    away = b.op("to_host", small, shape=(4096, 64)) if copied else small
    held, other = b.op("optimization_barrier", gradient, small, results=[(4096, 4096), (4096, 64)])
    return b.graph(total, away, b.dot(held, other)), total


@pytest.mark.parametrize("copied", [True, False])
def test_a_sum_that_only_an_update_reads_comes_before_the_next_barrier_of_copies(copied):
    graph, total = sums(copied)
    before = Program.unchanged(graph)
    program = controlled(before)
    check(graph, program)
    added = barriers(before, program)
    assert [total in (program.version_of[v] for v in tie.operands) for tie in added] == [True] * copied
    if copied:
        (old,) = (op for op in program.graph.ops if op.primitive == "optimization_barrier" and op.id > added[0].id)
        assert set(old.operands) & set(added[0].results), "the barrier that was there waits for it"


def convolutions():
    """A stem and a convolution; and the gradient of its filter, which reads no argument."""
    b = Builder()
    x, stem, kernel = b.input(4096, 64), b.input(64, 64), b.input(64, 64)
    first = b.op("conv_general_dilated", x, stem, flops=1.0)
    second = b.op("conv_general_dilated", first, kernel, flops=1.0)
    gradient = b.op("conv_general_dilated", first, second, shape=(64, 64), flops=1.0)
    return b.graph(second, gradient), kernel, first, second


def test_weights_are_transposed_no_sooner_than_a_convolution_reads_them():
    graph, kernel, first, second = convolutions()
    before = Program.unchanged(graph)
    program = with_weights_late(before, 1)
    check(graph, program)
    (tie,) = barriers(before, program)
    assert tie.operands == (kernel, first)
    made = {r: op for op in program.graph.ops for r in op.results}
    assert made[second].operands == (tie.results[1], tie.results[0])
    others = {v for op in program.graph.ops if op.results != (second,) for v in op.operands}
    assert others.isdisjoint(tie.results), "nobody else has to wait"
    assert with_weights_late(before, 1 << 20) is before, "small ones may be there"


@pytest.mark.cuda_aot
@pytest.mark.xdist_group("deviceless")
def test_xla_puts_nothing_off_behind_the_gradient_of_the_scores():
    """A Llama whose plan needs 25 MB less with ties: the softmax that the gradient of the values reads."""
    load, machine = (
        importlib.import_module("benchmarks.workloads").workload,
        importlib.import_module("benchmarks.machine"),
    )
    w = load("llama", seq=1024, layers=3, vocab=512, dim=512, heads=8, kv_heads=1, ffn=1024)
    traced = trace_jaxpr(jax.make_jaxpr(w.fun)(*w.args))
    live, costs = live_ranges(traced.graph), op_costs(traced.graph, profile("nvidia-h200"))
    plan = prepare(Problem(graph=traced.graph, costs=costs, budget=live.device))(live.device - live.temp // 2)
    args = tuple(machine.placed(jax.tree.leaves(w.args), "nvidia-h200"))
    options = compiler_options("nvidia-h200") | machine.kernel_cache(Path(os.environ["XDG_CACHE_HOME"], "kernels"))

    def needed(program):
        evaluate = emit(traced, program)
        compiled = jax.jit(lambda *flat: evaluate(flat), compiler_options=options).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours, loose = needed(controlled(plan.program)), needed(plan.program)
    assert ours < loose - 20_000_000
