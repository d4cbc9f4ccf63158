"""A recipe leads back to the very variant and plan that it was written of, and to no other program's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import pytest

from jaxtensile.errors import VerifyError
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.passes.verify.check import check
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.undo import undo
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.recipe import Unlike, fingerprint, recipe_of, replay
from loop_programs import PROGRAMS, arguments
from requests_of import opened, there_and_back

X, W = jnp.zeros((1024, 256)), jnp.zeros((256, 256))


def layers(w, x):
    for i in range(8):
        x = jnp.tanh(jnp.sin(x * (i + 1)) @ w)
    return (x * x).sum()


def branches(w, x):
    """A branch whose body is the whole program."""
    return jax.lax.cond(x[0, 0] > 1, lambda: jax.grad(layers)(w, x), lambda: w)


def two_carries(w, x):
    def body(carry, k):
        a, b = carry
        return (jnp.sin(a * k) @ w, jnp.cos(b * k) @ w), None

    a, b = jax.lax.scan(body, (x, x + 1), jnp.arange(1.0, 9.0))[0]
    return (a**2).sum() + (b**2).sum()


def interactions(w, x):
    v = jnp.stack([x @ w, x, jnp.tanh(x)], axis=1)
    return (jnp.einsum("bid,bjd->bij", v, v) ** 3).sum()


@pytest.mark.parametrize("share", [0.9, 0.6, 0.0])
@pytest.mark.parametrize("fun", [jax.grad(layers), jax.grad(two_carries), branches], ids=["straight", "loops", "body"])
def test_there_and_back(fun, share):
    _, start = opened(fun, W, X)
    plain = start.solve(1 << 40).predicted
    variant, plan = Candidates(start).cheapest(int(plain.device - (1 - share) * plain.temp))
    recipe = there_and_back(start, variant, plan)
    changed = recipe.loops or recipe.inside or recipe.taken or not plan.changes_nothing
    assert changed, "nothing was there to find the way back to"


def test_host_copies_and_stacks():
    for fun in (jax.grad(layers), jax.grad(two_carries)):
        _, start = opened(fun, W, X, host_budget=1 << 30)
        found = Candidates(start)
        plain = start.solve(1 << 40).predicted
        asides = []
        for share in (0.8, 0.5, 0.0):
            variant, plan = found.cheapest(int(plain.device - (1 - share) * plain.temp))
            there_and_back(start, variant, plan)
            asides.append(plan.offload_bytes)
        assert any(asides)
        found.forget_host()
        assert not there_and_back(start, *found.cheapest(0)).host


def test_slices_nests_and_bodies():
    _, start = opened(jax.grad(interactions), jnp.zeros((8, 8)), jnp.zeros((64, 8)))
    variant, plan = Candidates(start).cheapest(0)
    assert "slices" in dict(there_and_back(start, variant, plan).taken)

    w, xs, h0 = arguments()
    _, start = opened(jax.grad(PROGRAMS[0]), w, jnp.tile(xs, (30, 1)), h0, device="cpu")
    variant, plan = Candidates(start).cheapest(0)
    recipe = there_and_back(start, variant, plan)
    assert "strip_mine" in dict(recipe.taken) or recipe.inside


def test_without_the_users_checkpoints():
    def fun(w, x):
        for i in range(6):
            x = jax.checkpoint(lambda x, i=i: jnp.tanh(jnp.sin(x * (i + 1)) @ w))(x)
        return (x * x).sum()

    work, start = opened(jax.grad(fun), W, X)
    found = undo(start.base)
    assert found is not None
    lighter = variants.undone(work, found, start.whole, prepare)
    variant, plan = Candidates(lighter).cheapest(0)
    recipe = there_and_back(lighter, variant, plan)
    assert recipe.undone
    with pytest.raises(Unlike, match="checkpoints"):
        replay(recipe, start)


def test_another_program_is_refused():
    """One of another shape, one with other links between its loops, one without loops at all."""
    _, start = opened(jax.grad(two_carries), W, X)
    recipe = recipe_of(*Candidates(start).cheapest(0))
    for fun, args in [
        (jax.grad(two_carries), (W, X[:512])),
        (jax.grad(layers), (W, X)),
        (jax.grad(PROGRAMS[1]), arguments()),
    ]:
        _, other = opened(fun, *args)
        with pytest.raises(Unlike):
            replay(recipe, other)


def test_links_between_loops_are_not_taken_from_a_file():
    _, start = opened(jax.grad(two_carries), W, X)
    recipe = recipe_of(*Candidates(start).cheapest(0))
    assert recipe.loops
    plan = recipe.loops[0]
    links = plan.pair.links
    swapped = tuple((y, x) for (y, _), (_, x) in zip(links, links[::-1], strict=True))
    assert swapped != links
    wrong = replace(plan, pair=replace(plan.pair, links=swapped))
    with pytest.raises(Unlike, match="linked"):
        replay(msgspec.structs.replace(recipe, loops=(wrong, *recipe.loops[1:])), start)


def test_a_wrong_schedule_does_not_pass_the_checker():
    """The way back does not look at the schedule; the checker does."""
    _, start = opened(jax.grad(layers), W, X)
    variant, plan = Candidates(start).cheapest(0)
    recipe = recipe_of(variant, plan)
    schedule = recipe.plan.schedule
    for steps in (schedule.steps[:-1], schedule.steps[::-1], (*schedule.steps[:3], *schedule.steps[4:])):
        bent = msgspec.structs.replace(schedule, steps=steps)
        wrong = msgspec.structs.replace(recipe, plan=msgspec.structs.replace(recipe.plan, schedule=bent))
        again, other = replay(wrong, start)
        with pytest.raises(VerifyError):
            check(again.problem.graph, other.program)


def test_equal_programs_have_equal_fingerprints_and_others_do_not():
    def of(fun, *args):
        return fingerprint(trace_jaxpr(jax.jit(fun).trace(*args).jaxpr).graph)

    assert of(jax.grad(layers), W, X) == of(jax.grad(layers), W, X)
    assert of(jax.grad(layers), W, X) != of(jax.grad(layers), W, X[:512])
    assert of(jax.grad(two_carries), W, X) != of(jax.grad(layers), W, X)
