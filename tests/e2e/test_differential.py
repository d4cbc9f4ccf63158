"""Random programs under a tight budget compute what ``jax.jit`` computes.

Op by op, with nothing fused, the planned program gives the same bits as the plain one: whatever
was recomputed was recomputed from the right values. Compiled, results agree within the rounding of the
coarsest dtype in the program: XLA fuses the two programs differently; how many agree to the bit
is counted. Keys, integers, structure, dtypes, weak types, placement and what donation deletes are
always the same.

The planner is believed (``differential.believed``) but in the last test, which takes XLA's word. Programs whose
control flow is nested are in test_differential_loops.
"""

from collections import Counter

import jax
import pytest

import jaxtensile
from differential import QUICK, agree, believed, deleted, every, needs, same_bits, tell
from jax_lines import SOAK
from programs import FAST, squeezed
from random_programs import DENSE, LOOPS, SHAPES, Layer, Program, programs

SHARES = (0.55, 0.7, 0.85)
"""Of the model's temporary bytes: the first that the solver reaches."""


def under_pressure(step, args, donated, **options):
    """``step`` planned for the first budget that has a plan, and its traced program."""
    model = needs(jax.jit(step).trace(*args).jaxpr, donated)
    for share in SHARES:
        planned = jaxtensile.jit(step, budget=model.device - int((1 - share) * model.temp), **options)
        try:
            return planned, planned.trace(*args).jaxpr
        except jaxtensile.BudgetError:
            continue
    return None


def coarsest(program):
    return "bfloat16" if any(layer.name == "cast" for layer in program.layers) else program.dtype


def compare(program, seen):
    options = {"donate_argnums": (0,) if program.donate else (), "compiler_options": QUICK}
    args = program.args()
    donated = tuple(program.donate and leaf is not args[1] and leaf is not args[2] for leaf in jax.tree.leaves(args))
    seen["programs"] += 1
    with believed():
        found = under_pressure(program.step, args, donated, **options)
        if found is None:
            seen["refused"] += 1
            return
        (planned, rewritten), plain = found, jax.jit(program.step, **options)
        original = plain.trace(*args).jaxpr
        seen["changed by a plan"] += rewritten is not original
        flat = jax.tree.leaves(args)
        same_bits(rewritten, original, flat)
        ours, theirs = program.args(), program.args()
        seen["equal to the bit"] += agree(planned(*ours), plain(*theirs), coarsest(program))
    assert deleted(ours) == deleted(theirs)


FAMILIES = {
    "chains and graphs of dense layers": (5, programs(DENSE)),
    "convolutions, gathers, scatters and random numbers": (5, programs(SHAPES)),
    "loops, branches and calls": (4, programs(LOOPS, layers=(4, 9))),
    "half precision": (6, programs(DENSE, layers=(5, 10), dtypes=("bfloat16", "float16"))),
}


@pytest.mark.parametrize("number", range(2 if SOAK else 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_programs(family, number, record_property):
    examples, strategy = FAMILIES[family]
    examples *= 3 if SOAK else 1
    seen = every(strategy, examples, compare, number=number)
    tell(seen, record_property)
    assert seen["programs"] >= examples // 2
    changed = seen["changed by a plan"]
    assert changed >= 0.8 * seen["programs"], "the planner changed hardly anything: nothing was tested"


@pytest.mark.parametrize("rules", [DENSE, SHAPES, LOOPS], ids=["dense", "shapes", "loops"])
def test_every_rule_is_used(rules, record_property):
    """None is left to chance: all of a family in programs of six."""
    seen, names = Counter(), sorted(rules)
    for i in range(0, len(names), 6):
        layers = tuple(Layer(name, 3 * i + 1) for name in names[i : i + 6])
        compare(Program(layers, "float32", donate=bool(i)), seen)
    tell(seen, record_property)
    assert seen["changed by a plan"] >= seen["programs"] - 1


@pytest.mark.parametrize(
    "layers",
    ["tanh dense_bias skip gelu dense tanh layer_norm sin_square", "attend gelu relu dropout gather"],
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
    agree(planned(*ours), jax.jit(program.step, **options)(*theirs), program.dtype)
    assert deleted(ours) == deleted(theirs)
