"""A fault of ours never ends a user's program: planted everywhere in turn, values are right, and one warning tells it.

What is planted is an error that nobody expects, in the place of a function of the planner.
"""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from jaxtensile import attempts, candidates, chunk, faults, merge, outcome, pipeline, plan_cache, subject, variants
from jaxtensile.errors import VerifyError
from jaxtensile.passes import greedy, solvers
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
        variants.UNDONE: checkpointed,
        variants.LOOPS: looped,
        variants.NESTED: looped,
        variants.BODIES: looped,
        variants.JOINED: branching,
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
    variants.UNDONE: [(pipeline, "undo"), (variants, "undone")],
    variants.SUNK: [(variants, "sink")],
    variants.SLICED: [(variants, "sliced_products")],
    variants.PARTS: [(variants, "find_stretch"), (variants, "in_chunks"), (chunk, "retrace")],
    variants.JOINED: [(variants, "find_cond_pairs"), (variants, "join_conds")],
    variants.INWARD: [(variants, "find_moved")],
    variants.NESTED: [(variants, "nest_loops")],
    variants.LOOPS: [(variants, "rewrite_loops"), (variants, "looping")],
    variants.BODIES: [(variants, "with_bodies"), (candidates, "bodies_of"), (candidates, "body_alone")],
    pipeline.MERGING: [(pipeline, "merged")],
    "the lower bound": [(subject, "lower_bound")],
}
"""Where a fault is one of which rewrite. Updates behind their gradients and copies to the host need other devices."""
PLANTED = [(rewrite, *at) for rewrite, places in REWRITES.items() for at in places]


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
    ("program", "rewrite", "place", "name"), [(r, r, p, n) for r, p, n in PLANTED], ids=IDS, indirect=["program"]
)
def test_a_rewrite_that_fails_is_left_out(program, rewrite, place, name, monkeypatch, in_use):
    wanted = jax.jit(program, compiler_options=FAST)(W, X)
    options = {"chunk": rewrite == variants.PARTS}
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
    assert rewrite in message and "Planted: planted" in message and program.__name__ in message
    assert "report" in message and faults.VARIABLE in message
    alike(found, wanted)
    monkeypatch.setenv(faults.VARIABLE, "1")
    with pytest.raises(Planted):
        planned(program, 1 if name != "undone" else budget, **options).plan(W, X)


def without_children(monkeypatch, place, name):
    """Fails for programs of ours only: the user's own is compiled as ever."""
    real = getattr(place, name)

    def fails(make, *args):
        if make(args[2]).__wrapped__.__code__.co_name == "run":
            raise Planted("planted")
        return real(make, *args)

    monkeypatch.setattr(place, name, fails)


STAGES = [(pipeline, "trace_jaxpr"), (pipeline, "op_costs"), (subject, "live_ranges"), (pipeline, "Candidates")]
STAGES += [(pipeline, "location"), (solvers, "live_ranges")][:0]
PLANS = [(attempts, "rewrite"), (attempts, "check"), (attempts, "planned_options")]
