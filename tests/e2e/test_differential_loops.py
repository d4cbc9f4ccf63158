"""Random programs with nested loops, branches and calls under a tight budget compute what ``jax.jit`` computes.

Compiled, results agree within a few units in the last place. Where XLA's fusion makes them differ by more, and in
a share of the programs anyway, both are run step by step in Python, loops and branches too, and give the same
bits: so no difference is put down to rounding that is not. Structure, types, placement, integers, keys and what
donation deletes are always the same.

The planner is believed (``differential.believed``) but in the programs that go the whole way, with XLA's own number.
"""

from collections import Counter
from dataclasses import dataclass

import jax
import pytest
from hypothesis import strategies as st

import jaxtensile
from differential import QUICK, ROUNDINGS, agree, believed, deleted, difference, every, needs, same_bits, tell
from jax_lines import SOAK
from nested_programs import BLOCKS, CONTROL, KINDS, LEAVES, Node, Program, is_jax, programs

CLOSE = 8
"""Units in the last place above which a difference has to be explained."""
SHARES = (0.6, 0.5, 0.7, 0.4, 0.8, 0.9, 0.98, 0.0)
"""Of the model's temporary bytes, down to the smallest that is reached, up to barely less than the plain program's."""


@dataclass(frozen=True)
class Under:
    """What a program is planned for."""

    share: float
    undo: bool = True
    host: bool = False

    def options(self):
        return {"undo": self.undo, "host_budget": "1GiB" if self.host else None}


UNDER = st.builds(Under, st.sampled_from(SHARES), st.sampled_from((True, True, False)), st.booleans())


def compare(given, seen, *, stepwise=False):
    """``jaxtensile.jit`` beside ``jax.jit``."""
    program, under = given
    options = {"donate_argnums": (0,) if program.donate else (), "compiler_options": QUICK}
    args = program.args()
    plain = jax.jit(program.step, **options)
    traced = plain.trace(*args)
    donated = tuple(a.donated for a in jax.tree.leaves(traced.args_info))
    seen["programs"] += 1
    seen["nested 3 deep"] += program.depth >= 3
    with believed():
        budget = needs(traced.jaxpr, donated).share(under.share)
        planned = jaxtensile.jit(program.step, budget=budget, **under.options(), **options)
        try:
            rewritten = planned.trace(*args).jaxpr
        except jaxtensile.BudgetError:
            seen["refused"] += 1
            return
        seen["changed by a plan"] += rewritten is not traced.jaxpr
        ours, theirs = program.args(), program.args()
        apart = difference(planned(*ours), plain(*theirs), program.coarse)
    seen["equal to the bit"] += apart < 0
    assert deleted(ours) == deleted(theirs)
    if stepwise or apart > CLOSE:
        seen["run step by step"] += 1
        same_bits(rewritten, traced.jaxpr, jax.tree.leaves(args))
    assert apart <= ROUNDINGS, f"values differ by {apart:.0f} units in the last place"


CHUNK, FEW = (23, 10) if SOAK else (3, 2)
"""Programs a test: more than five hundred in all for ``make soak``, a ninth of them without."""
SMOOTH = tuple(n for n in LEAVES if n not in ("bfloat16", "dropout", "noise", "attend", "layer_norm"))
"""Leaves that leave the type of the activations alone and have small derivatives."""
COSTLY = ("dropout", "noise", "attend")
"""Leaves of many kernels: most of a test's time is the compiler's, by the kernel."""
FAMILIES = {
    "mixed": (13, programs(3, leaves=tuple(n for n in LEAVES if n not in COSTLY))),
    "deep": (1, programs(4, leaves=("dense", "tanh", "times", "window", "mask"))),
    "scans": (3, programs(3, controls=("scan", "scan_rows", "fori", "map", "checkpoint"), leaves=SMOOTH)),
    "random": (1, programs(3, controls=("scan_keys", "fori", "cond", "vmap"), leaves=("dropout", "noise", "dense"))),
    "half": (1, programs(3, dtypes=("bfloat16", "float16"), leaves=SMOOTH)),
}
CASES = [(family, k) for family, (chunks, _) in FAMILIES.items() for k in range(0, chunks, 1 if SOAK else 5)]


def control(given):
    """Of programs with the same kinds of control flow a test takes one."""
    return frozenset(given[0].names & CONTROL.keys()), given[0].depth


@pytest.mark.parametrize(("family", "number"), CASES, ids=[f"{f}-{k}" for f, k in CASES])
def test_nested_programs(family, number, record_property):
    def one(given, seen):
        compare(given, seen, stepwise=seen["programs"] % 20 == 0)

    chunks, strategy = FAMILIES[family]
    seen = every(st.tuples(strategy, UNDER), CHUNK, one, alike=control if chunks > 3 else None, number=number)
    settled(seen, CHUNK, record_property)


def settled(seen, examples, record_property):
    tell(seen, record_property)
    assert seen["programs"] >= examples
    if SOAK:  # enough of them to tell
        assert seen["refused"] <= examples // 5
        assert seen["changed by a plan"] >= 0.6 * examples, "hardly anything was changed: nothing was tested"


@pytest.mark.parametrize("number", range(2))
def test_64_bits(number, record_property):
    """Where types may have 64 bits: integers and weak types are others there."""
    with jax.enable_x64(True):
        seen = every(
            st.tuples(programs(3, dtypes=("float64", "float32"), leaves=SMOOTH), UNDER), FEW, compare, number=number
        )
    settled(seen, FEW, record_property)


def test_jaxs_own_rules_hold(record_property):
    """JAX's checks of every jaxpr that is made, and of tracers that outlive their trace."""
    with jax.enable_checks(True), jax.checking_leaks():
        seen = every(st.tuples(programs(3, kinds=("update", "steps")), UNDER), FEW, compare, alike=control, number=100)
    settled(seen, FEW, record_property)


@pytest.mark.parametrize("number", range(4 if SOAK else 2))
def test_taking_xla_at_its_word(number, record_property):
    """The whole way: XLA's own number is within the budget, or the budget that the error names is met."""
    strategy = st.tuples(programs(2, rows=256, leaves=SMOOTH), st.sampled_from((0.9, 0.7, 0.5)))
    seen = every(strategy, FEW, whole_way, alike=control, number=number)
    tell(seen, record_property)
    if SOAK:
        assert seen["changed by a plan"] >= 5, "hardly anything was changed: nothing was tested"


def whole_way(given, seen):
    program, share = given
    options = {"donate_argnums": (0,) if program.donate else (), "compiler_options": QUICK}
    plain = jax.jit(program.step, **options)
    use = plain.lower(*program.args()).compile().memory_analysis()
    temp = use.temp_size_in_bytes
    device = use.argument_size_in_bytes + use.output_size_in_bytes + temp - use.alias_size_in_bytes
    seen["programs"] += 1
    seen["taking XLA at its word"] += 1
    planned = jaxtensile.jit(program.step, budget=device - int((1 - share) * temp), **options)
    try:
        report = planned.plan(*program.args())
    except jaxtensile.BudgetError as error:
        if error.needs >= device:
            seen["refused"] += 1
            return
        planned = jaxtensile.jit(program.step, budget=error.needs, **options)
        report = planned.plan(*program.args())
    assert report.compiled.exact and report.compiled.device <= report.budget < report.baseline.device == device
    seen["changed by a plan"] += not report.unchanged
    ours, theirs = program.args(), program.args()
    seen["equal to the bit"] += agree(planned(*ours), plain(*theirs), program.coarse)
    assert deleted(ours) == deleted(theirs)


def test_every_rule_is_used(record_property):
    """None is left to chance: each kind of control flow around two others, each leaf."""
    seen, names, leaves = Counter(), sorted(CONTROL), sorted(LEAVES)
    for i in range(len(names)):
        node = Node(leaves[i % len(leaves)], i)
        for k, name in enumerate((names[i], names[(i + 5) % len(names)], names[(2 * i + 1) % len(names)])):
            leaf = Node(leaves[(3 * i + k) % len(leaves)], i + k)
            node = Node(name, 5 * i + k, ((leaf, node),) * BLOCKS.get(name, 1))
        program = Program((Node("dense", 1), node), kind=KINDS[i % len(KINDS)], raw=i % 2 == 0, donate=i % 3 == 0)
        if is_jax(program):
            compare((program, Under(0.7)), seen)
    tell(seen, record_property)
    assert seen["programs"] >= 10 and seen["changed by a plan"] >= 0.5 * seen["programs"]
