"""Whose fusion rules a plan is made by: the target's own while XLA agrees with them, else those of an H200."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile import clock, switches
from jaxtensile.ir.fuser import CPU, H200
from jaxtensile.ir.ir import fused_by
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.planner import by_rules, recall
from jaxtensile.program.trace import trace_jaxpr, with_rules_of
from programs import FAST

LAYERS, WIDTH, ROWS = 6, 64, 2048


@pytest.fixture(autouse=True)
def nothing_remembered():
    recall.forget()


def loss(weights, x):
    """Centred and divided in every layer: a CPU computes quotients once and stores them, a GPU computes them again."""
    for up, down in weights:
        y = x - x.mean(-1, keepdims=True)
        y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
        h = y @ up
        x = x + (h / (1 + jnp.exp(-h))) @ down
    return jnp.mean(x**2)


def step(weights, x):
    slopes = jax.grad(loss)(weights, x)
    return jax.tree.map(lambda w, d: w - 0.1 * d, weights, slopes)


@pytest.fixture(scope="module")
def args():
    rng = np.random.default_rng(0)
    weights = [tuple(rng.normal(size=s) / 8 for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))) for _ in range(LAYERS)]
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (weights, rng.normal(size=(ROWS, WIDTH))))


@pytest.fixture(scope="module")
def budget(args):
    use = jax.jit(step).lower(*args).compile().memory_analysis()
    fixed = use.argument_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes
    return fixed + use.temp_size_in_bytes // 2


def planned(args, budget, *off):
    with switches.off(*off):
        return jaxtensile.jit(step, budget=budget, chunk=False).plan(*args)


def off_by(report):
    return abs(report.compiled.temp / report.predicted.temp - 1)


def test_a_graph_says_whose_rules_it_is_told_by(args):
    closed = jax.jit(step).trace(*args).jaxpr
    with with_rules_of(CPU):
        own = trace_jaxpr(closed).graph
    other = trace_jaxpr(closed).graph
    assert (own.fuser, other.fuser) == (CPU, H200)
    assert fused_by(own, H200) == other and fused_by(other, CPU) == own
    assert fuse(own).home == fuse(other, by=CPU).home != fuse(other).home
    assert live_ranges(own).temp != live_ranges(other).temp


def test_bodies_are_told_by_the_same_rules(args):
    closed = jax.jit(lambda w, x: jax.lax.scan(lambda c, _: (step(c, x), None), w, None, length=3)).trace(*args).jaxpr
    with with_rules_of(CPU):
        graph = trace_jaxpr(closed).graph
    bodies = [body for op in graph.ops for body in op.bodies]
    assert bodies and all(body.fuser == CPU for body in bodies)
    assert fused_by(fused_by(graph, H200), CPU) == graph


def test_a_cpu_is_planned_by_its_own_rules_where_they_hold(args, budget):
    own, other = planned(args, budget), planned(args, budget, "own_rules")
    assert own.fits and other.fits and own.rounds < other.rounds
    assert off_by(own) < 0.05 < off_by(other)


def test_rules_that_xla_contradicts_are_given_up(args, budget, monkeypatch):
    """Then the plan is that of the others."""
    monkeypatch.setattr(by_rules, "DOUBTED", 0.0)
    monkeypatch.setattr(by_rules, "ROOMY", np.inf)
    both, other = planned(args, budget), planned(args, budget, "own_rules")
    assert both.fits and both.compiled.device <= budget
    assert both.overhead <= other.overhead, "of two that fit it is the one that adds less"


def test_where_the_others_refuse_what_fits_is_taken(args, budget, monkeypatch):
    monkeypatch.setattr(by_rules, "ROOMY", np.inf)

    def refuses(_):
        raise jaxtensile.BudgetError("no", needs=budget + 1, has=budget)

    monkeypatch.setattr(by_rules, "as_written", refuses)
    assert planned(args, budget).fits
    monkeypatch.setattr(by_rules, "_own_rules", lambda _: None)
    with pytest.raises(jaxtensile.BudgetError):
        planned(args, budget)


def normed(params, x):
    """What a CPU stores of a batch norm an H200 computes again: its rules see half of the bytes."""
    for f, scale in params:
        x = jax.lax.conv_general_dilated(x, f, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = x.mean((0, 1, 2))
        x = jax.nn.relu(scale * (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5))
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return jnp.mean(x**2)


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_rules_that_are_nearer_for_the_plain_program_are_held_on_to(share, monkeypatch):
    """XLA needs 1.2 times what they say of it and of its plans; the others think that it fits as it is."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        (jax.random.normal(keys[k], (3, 3, n, 32 * (k + 1))), jnp.ones(32 * (k + 1))) for k, n in enumerate((1, 32))
    ]
    args = params, jax.random.normal(keys[2], (64, 28, 28, 1))
    use = jax.jit(jax.grad(normed), compiler_options=FAST).lower(*args).compile().memory_analysis()
    budget = use.argument_size_in_bytes + use.output_size_in_bytes + int(share * use.temp_size_in_bytes)
    assert jaxtensile.jit(jax.grad(normed), budget=budget, compiler_options=FAST).plan(*args).fits
    monkeypatch.setattr(by_rules, "NEARER", np.inf)
    recall.forget()
    with pytest.raises(jaxtensile.BudgetError):
        jaxtensile.jit(jax.grad(normed), budget=budget, compiler_options=FAST).plan(*args)


def test_what_was_given_up_counts_in_the_seconds(args, budget, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    once = planned(args, budget).seconds["graph"]
    monkeypatch.setattr(by_rules, "ROOMY", np.inf)  # the others are asked too
    recall.forget()
    assert planned(args, budget).seconds["graph"] == 2 * once


@pytest.mark.parametrize("how", ["its own", "the others", "its own after both"])
def test_a_plan_that_was_kept_is_found_by_whichever_rules_made_it(args, budget, monkeypatch, tmp_path, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXTENSILE_PLAN_CACHE", raising=False)
    if how != "its own":
        monkeypatch.setattr(by_rules, "ROOMY", np.inf)
    if how == "the others":
        monkeypatch.setattr(by_rules, "DOUBTED", 0.0)
    if how == "its own after both":
        monkeypatch.setattr(by_rules, "_quicker", lambda first, _: first)
    first = planned(args, budget)
    again = planned(args, budget)
    assert again.compiled == first.compiled and again.rounds == 1
    assert any("earlier process" in note for note in again.notes)


def crossed(a, b, w):
    """Two loops over donated stacks, the second over what the first made of one."""

    def body(h, slices):
        x, y = slices
        h = jnp.tanh(h @ w + x)
        return h, (y + h, x * h)

    h, (c, d) = jax.lax.scan(body, jnp.ones((128, 128)), (a, b))
    h, (e, f) = jax.lax.scan(body, h, (b, c), reverse=True)
    return c, d, h, e + f


def test_an_error_names_what_was_found_by_either_rules():
    """The others find none, and the plain program is not the smallest."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 128, 128), (12, 128, 128), (128, 128))]
    use = jax.jit(crossed, donate_argnums=(0, 1)).lower(*args).compile().memory_analysis()
    fixed = use.argument_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes

    def plan(budget):
        return jaxtensile.jit(crossed, budget=budget, donate_argnums=(0, 1)).plan(*args)

    larger = plan(fixed + 6 * use.temp_size_in_bytes // 10)
    recall.forget()
    with pytest.raises(jaxtensile.BudgetError) as refused:
        plan(fixed + use.temp_size_in_bytes // 2)
    assert refused.value.needs <= larger.compiled.device < larger.baseline.device
    for forget in (False, True):
        if forget:
            recall.forget()
        assert plan(refused.value.needs).compiled.device <= refused.value.needs


NOTHING = {
    "no argument": (lambda: 2.0, ()),
    "a number": (lambda x: x, (3.0,)),
    "no element": (lambda x: x * 2, (jnp.ones((0, 4)),)),
    "no result": (lambda x: None, (jnp.ones(4),)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_programs_of_no_bytes_are_told_what_they_need(name):
    fun, args = NOTHING[name]
    try:
        found = jaxtensile.jit(fun, budget=1)(*args)
    except jaxtensile.BudgetError as error:
        found = jaxtensile.jit(fun, budget=error.needs)(*args)
    assert str(found) == str(fun(*args))
