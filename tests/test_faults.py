"""A fault of ours never ends a user's program: planted everywhere in turn, values are right, and one warning tells it.

What is planted is an error that nobody expects, in the place of a function of the planner.
"""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from jax_lines import SOAK
from jaxtensile import faults
from jaxtensile.api import jit as api
from jaxtensile.errors import VerifyError
from jaxtensile.estimation import estimate as estimation
from jaxtensile.passes.solvers import trials
from jaxtensile.planner import page, plan_cache, trial_compiles
from jaxtensile.rewrites import merge_branches, microbatch, rewrite, split
from jaxtensile.rewrites.loops import sink, sink_invariants, strip_mine
from jaxtensile.rewrites.loops.loops import RECOMPUTATION
from jaxtensile.rewrites.loops.sink import SINK
from jaxtensile.rewrites.loops.sink_invariants import SINK_INVARIANTS
from jaxtensile.rewrites.loops.strip_mine import STRIP_MINE
from jaxtensile.rewrites.merge_branches import MERGE_BRANCHES
from jaxtensile.rewrites.microbatch import PARTS
from jaxtensile.rewrites.rows import chunk
from jaxtensile.rewrites.split import SLICES
from jaxtensile.search import candidates, loop_variants, modelled, parts, variant, variants
from programs import FAST, close

N, BATCH = 16, 64
W = jax.random.normal(jax.random.key(0), (N, N)) / 4
X = jax.random.normal(jax.random.key(1), (BATCH, N))


def layers(w, x, count=3):
    for _ in range(count):
        x = jnp.tanh(jnp.sin(x @ w))
    return x


def checkpointed(w, x):
    for _ in range(3):
        x = jax.checkpoint(lambda x: layers(w, x, 1))(x)
    return x


def looped(w, x):
    return lax.scan(lambda x, _: (layers(w, x), None), x, None, length=9)[0]


def branching(w, x):
    return lax.cond(w.sum() > 0, lambda x: layers(w, x), jnp.cos, x)


@pytest.fixture
def program(request):
    """Another function for each test: what was told of one is not told again."""
    network = {
        variant.UNDONE: checkpointed,
        RECOMPUTATION: looped,
        STRIP_MINE.title: looped,
        variant.BODIES: looped,
        MERGE_BRANCHES.title: branching,
    }.get(getattr(request, "param", ""), layers)

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(network(w, x) ** 2))(w)
        return w - 0.1 * gradient, value

    step.__name__ = step.__qualname__ = f"step_{abs(hash(request.node.nodeid))}"
    return step


@pytest.fixture
def in_use(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "0")


class Planted(Exception):
    """What nobody expects."""


def plant(monkeypatch, place, name, error=Planted):
    def fails(*_, **__):
        raise error("planted")

    monkeypatch.setattr(place, name, fails)


REWRITES = {
    variant.UNDONE: [(page, "undo"), (variants, "undone")],
    SINK.title: [(sink, "sink")],
    SLICES.title: [(split, "sliced_products")],
    PARTS.title: [(parts, "find_region"), (microbatch, "in_chunks"), (chunk, "retrace")],
    MERGE_BRANCHES.title: [(merge_branches, "find_cond_pairs"), (merge_branches, "merge_branches")],
    SINK_INVARIANTS.title: [(sink_invariants, "find_invariants")],
    STRIP_MINE.title: [(strip_mine, "strip_mine")],
    RECOMPUTATION: [(variant, "rewrite_loops"), (loop_variants, "looping")],
    variant.BODIES: [(variant, "with_bodies"), (candidates, "bodies_of"), (candidates, "body_alone")],
    variant.STATE: [(page, "with_state")],
    page.MERGING: [(page, "cse")],
    "the lower bound": [(modelled, "lower_bound")],
}
"""Where a fault is one of which rewrite. Updates behind their gradients and copies to the host need other devices."""
PLANTED = [(rewrite, *at) for rewrite, places in REWRITES.items() for at in (places if SOAK else places[:1])]


def alike(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        close(a, b)


def warned(call, *args):
    """What a call returns, or the budget that it says to be enough, and what was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = call(*args)
        except jaxtensile.BudgetError as error:
            found = error.needs
    return found, [str(w.message) for w in caught if w.category is jaxtensile.InternalErrorWarning]


def planned(program, budget, **options):
    return jaxtensile.jit(program, budget=budget, compiler_options=FAST, **options)


IDS = [f"{place.__name__.rpartition('.')[2]}.{name}" for _, place, name in PLANTED]


@pytest.mark.parametrize(
    ("program", "what", "place", "name"), [(r, r, p, n) for r, p, n in PLANTED], ids=IDS, indirect=["program"]
)
def test_a_rewrite_that_fails_is_left_out(program, what, place, name, monkeypatch, in_use):
    wanted = jax.jit(program, compiler_options=FAST)(W, X)
    options = {"chunk": what == PARTS.title, "offload_state": what == variant.STATE}
    plant(monkeypatch, place, name)
    found, messages = warned(planned(program, 1, **options).plan, W, X)
    for _ in range(3):
        assert isinstance(found, int)
        budget = found
        found, more = warned(planned(program, found, **options), W, X)
        messages += more
        if not isinstance(found, int):
            break
    (message,) = messages  # once for each rewrite and function
    assert what in message and "Planted: planted" in message and program.__name__ in message
    assert "report" in message and faults.VARIABLE in message
    alike(found, wanted)
    monkeypatch.setenv(faults.VARIABLE, "1")
    with pytest.raises(Planted):
        planned(program, 1 if name != "undone" else budget, **options).plan(W, X)


STAGES = {
    "trace": (rewrite, "trace_jaxpr"),
    "liveness": (modelled, "live_ranges"),
    "costs": (page, "op_costs"),
    "candidates": (page, "Candidates"),
    "solver": (trials, "live_ranges"),
    "check": (trial_compiles, "check"),
    "emit": (trial_compiles, "emit"),
    "options": (trial_compiles, "planned_options"),
    "place": (api, "location"),
    "question": (api, "best_known"),
}
"""Without which there is no plan."""
SPARED = {"recipe": (page, "recipe_of"), "key": (page, "key_of"), "report": (page, "report")}
"""Without which there is one all the same."""


@pytest.fixture
def needs(program):
    """What XLA allocates for the program as it was written."""
    return planned(program, None).plan(W, X).compiled.device


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_plan_the_program_runs_as_it_was_written(stage, program, needs, monkeypatch, in_use):
    wanted = jax.jit(program, compiler_options=FAST)(W, X)
    plant(monkeypatch, *STAGES[stage], VerifyError if stage == "check" else Planted)
    with pytest.raises(jaxtensile.PlanningError) as caught:
        planned(program, needs - 1)(W, X)
    error = caught.value
    assert isinstance(error, jaxtensile.BudgetError | jaxtensile.InternalError)
    assert (error.needs, error.has) == (needs, needs - 1)
    assert "planted" in str(error) and "report" in str(error) and program.__name__ in str(error)
    if stage in ("place", "question"):
        with pytest.raises(jaxtensile.InternalError, match="planted"):
            planned(program, needs).plan(W, X)
    found, messages = warned(planned(program, needs), W, X)
    alike(found, wanted)
    asked = stage not in ("costs", "solver", "check", "emit", "candidates")
    assert len(messages) == asked  # it fits, and nothing else is asked
    assert all("it runs as it was written" in message and "planted" in message for message in messages)
    lowered, messages = warned(planned(program, needs).lower, W, X)
    assert not messages and lowered.compile().memory_analysis().temp_size_in_bytes > 0
    monkeypatch.setenv(faults.VARIABLE, "1")
    with pytest.raises((Planted, VerifyError)):
        planned(program, needs - 1)(W, X)


@pytest.mark.parametrize("stage", SPARED)
def test_a_plan_is_kept_where_something_beside_it_fails(stage, program, needs, monkeypatch, tmp_path, in_use):
    wanted = jax.jit(program, compiler_options=FAST)(W, X)
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path))
    plant(monkeypatch, *SPARED[stage])
    jitted = planned(program, needs - 1)
    found, messages = warned(jitted, W, X)
    (message,) = messages
    assert "was left out of its plan" in message
    alike(found, wanted)
    report = jitted.plan(W, X)
    assert report.compiled.device < needs
    assert any("left out by a fault" in note for note in report.notes) and str(report)


def test_errors_of_the_user_and_of_jax_pass(program, monkeypatch, in_use):
    def mistaken(w, x):
        raise KeyError("of the user")

    jitted = planned(mistaken, 1)
    for ask in (jitted, jitted.plan, jitted.trace, jitted.lower):
        with pytest.raises(KeyError, match="of the user"):
            ask(W, X)
    with pytest.raises(jaxtensile.BudgetError) as caught:
        planned(program, 1)(W, X)
    assert not isinstance(caught.value, jaxtensile.InternalError)
    jitted = jaxtensile.jit(program, budget="1GiB", compiler_options={"no_such_flag": True})
    for ask in (jitted, jitted.plan):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_flag"):
            ask(W, X)


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_program_that_jax_cannot_lower_may_be_looked_at(strict, monkeypatch):
    """And says what ``jax.jit`` says when it is lowered, planned or called."""
    monkeypatch.setenv(faults.VARIABLE, strict)
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    linear = jax.linearize(sine, 1.0)[1]
    with pytest.raises(TypeError, match="forward-mode") as wanted:
        jax.jit(linear).lower(1.0)
    jitted = planned(linear, "1MiB")
    assert str(jitted.trace(1.0).jaxpr) == str(jax.jit(linear).trace(1.0).jaxpr)
    for ask in (jitted, jitted.plan, jitted.lower):
        with pytest.raises(TypeError) as found:
            ask(1.0)
        assert str(found.value) == str(wanted.value)


def test_estimates_that_fail_say_so(program, monkeypatch, in_use):
    plant(monkeypatch, estimation, "heap")
    with pytest.raises(jaxtensile.InternalError, match=r"estimating step.*planted.*report"):
        jaxtensile.estimate(program, W, X)


def test_the_tests_are_strict(program):
    """Also those that start a process."""
    assert faults.strict()
