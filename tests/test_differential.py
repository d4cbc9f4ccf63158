"""Random programs under a tight budget compute what ``jax.jit`` computes.

Op by op, with nothing fused, the planned program gives the same bits as the plain one: whatever
was recomputed was recomputed from the right values. (Bodies of loops are compiled whole, so with
loops it is the same numbers within rounding.) Compiled, results agree within the rounding of the
coarsest dtype in the program: XLA fuses the two programs differently; how many agree to the bit
is counted. Keys, integers, structure, dtypes, weak types, placement and what donation deletes are
always the same.

The planner gets its budget from the model and is believed at once: XLA's own number only decides
whether a plan is taken, and here every plan is to be run. The last test takes XLA's word.
"""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import jaxtensile
from jaxtensile import attempts, pipeline
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.plan import MemoryUse
from jaxtensile.plan import Program as Schedule
from jaxtensile.rewrite import rewrite
from jaxtensile.trace import trace_jaxpr
from programs import FAST, bits, squeezed
from random_programs import DENSE, LOOPS, SHAPES, Layer, Program, programs

SHARES = (0.55, 0.7, 0.85)
"""Of the model's temporary bytes: the first that the solver reaches."""
ROUNDINGS = 64
"""Units in the last place, of an array's largest value, by which a compiled result may differ."""
SMALL = 1e-4
"""Gradients below it are differences of larger numbers, and have their rounding."""


@pytest.fixture
def believed(monkeypatch):
    """A pipeline that takes the solver's plan whatever XLA allocates for it, and compiles no plain program."""
    real = attempts.compile_program
    nothing = MemoryUse(argument=0, output=0, temp=0, alias=0)
    monkeypatch.setattr(attempts, "compile_program", lambda *args: replace(real(*args), memory=nothing))
    monkeypatch.setattr(pipeline, "SURELY_OVER", 0.0)
    monkeypatch.setattr(pipeline, "SURELY_OVER_WITH_LOOPS", 0.0)


def under_pressure(step, args, donated, **options):
    """``step`` planned for the first budget that has a plan, and its traced program."""
    live = live_ranges(trace_jaxpr(jax.jit(step).trace(*args).jaxpr, donated, keep_unused=False).graph)
    for share in SHARES:
        planned = jaxtensile.jit(step, budget=live.device - int((1 - share) * live.temp), **options)
        try:
            return planned, planned.trace(*args).jaxpr
        except jaxtensile.BudgetError:
            continue
    return None


def deleted(args):
    return [x.is_deleted() for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]


def agree(ours, theirs, program, *, to_the_bit=False):
    """Whether all bits agree; an error when a value differs by more than rounding explains."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    coarse = "bfloat16" if any(layer.name == "cast" for layer in program.layers) else program.dtype
    tolerance = ROUNDINGS * float(jnp.finfo(coarse).eps)
    exact = True
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and (a.sharding, a.committed) == (b.sharding, b.committed)
        if to_the_bit or not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(bits(a), bits(b))
            continue
        exact = exact and np.array_equal(bits(a), bits(b))
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), SMALL))
    return exact


def compare(program, seen):
    options = {"donate_argnums": (0,) if program.donate else (), "compiler_options": FAST}
    args = program.args()
    donated = tuple(program.donate and leaf is not args[1] and leaf is not args[2] for leaf in jax.tree.leaves(args))
    seen["programs"] += 1
    found = under_pressure(program.step, args, donated, **options)
    if found is None:
        seen["refused"] += 1
        return
    (planned, rewritten), plain = found, jax.jit(program.step, **options)
    original = plain.trace(*args).jaxpr
    seen["changed"] += rewritten is not original
    flat = jax.tree.leaves(args)
    loops = any(layer.name in LOOPS for layer in program.layers)
    agree(op_by_op(rewritten, flat), op_by_op(original, flat), program, to_the_bit=not loops)
    ours, theirs = program.args(), program.args()
    seen["same bits"] += agree(planned(*ours), plain(*theirs), program)
    assert deleted(ours) == deleted(theirs)


def op_by_op(closed, flat):
    """Results of a program whose calls are inlined, every primitive compiled alone."""
    traced = trace_jaxpr(closed)
    return rewrite(traced, Schedule.unchanged(traced.graph))([jnp.asarray(x) for x in flat])


def run(strategy, examples):
    seen = Counter()

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def every(program):
        compare(program, seen)

    every()
    print(dict(seen))
    assert seen["programs"] >= examples // 2
    assert seen["changed"] >= 0.8 * seen["programs"], "the planner changed hardly anything: nothing was tested"


def test_chains_and_graphs_of_dense_layers(believed):
    run(programs(DENSE), 14)


def test_convolutions_gathers_scatters_and_random_numbers(believed):
    run(programs(SHAPES), 14)


def test_loops_branches_and_calls(believed):
    run(programs(LOOPS, layers=(4, 9)), 10)


def test_half_precision(believed):
    run(programs(DENSE, layers=(5, 10), dtypes=("bfloat16", "float16")), 6)


@pytest.mark.parametrize("rules", [DENSE, SHAPES, LOOPS], ids=["dense", "shapes", "loops"])
def test_every_rule_is_used(believed, rules):
    """None is left to chance: all of a family in programs of six."""
    seen, names = Counter(), sorted(rules)
    for i in range(0, len(names), 6):
        layers = tuple(Layer(name, 3 * i + 1) for name in names[i : i + 6])
        compare(Program(layers, "float32", donate=bool(i)), seen)
    assert seen["changed"] >= seen["programs"] - 1


@pytest.mark.parametrize(
    "layers", ["tanh dense_bias skip gelu dense tanh layer_norm sin_square", "attend gelu relu dropout gather"]
)
def test_taking_xla_at_its_word(layers):
    """The whole way: within 70 % of what XLA needs above the arguments, or refused."""
    program = Program(tuple(Layer(name, 1) for name in 2 * layers.split()), "float32", donate=True)
    options = {"donate_argnums": (0,), "compiler_options": FAST}
    found = squeezed(program.step, *program.args(), **options)
    assert found is not None, "no share of the plain program's bytes has a plan"
    planned, report = found
    assert report.compiled.exact and report.baseline.exact
    assert report.compiled.device <= report.budget < report.baseline.device
    ours, theirs = program.args(), program.args()
    agree(planned(*ours), jax.jit(program.step, **options)(*theirs), program)
    assert deleted(ours) == deleted(theirs)
