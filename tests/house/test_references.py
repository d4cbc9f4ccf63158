"""Programs that read and write references (``jax.new_ref``), planned: values are those of ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile import _compat
from programs import FAST, close

N = 64
W = jax.random.normal(jax.random.key(0), (N, N)) / 8
X = jax.random.normal(jax.random.key(1), (N, N))


def through_a_loop(ref, w, x):
    """A pair of loops to be rewritten beside a reference argument."""

    def loss(w):
        def iteration(y, _):
            for _ in range(3):
                y = jnp.sin(y @ w)
            return y, None

        return jnp.mean(lax.scan(iteration, x, None, length=8)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    ref[...] += gradient
    return value, ref[...]


def through_branches(ref, w, x):
    def loss(w):
        y = x
        for _ in range(3):
            y = lax.cond(w.sum() > 0, lambda y: jnp.sin(jnp.tanh(jnp.exp(-y)) @ w), lambda y: jnp.cos(y @ w), y)
        return jnp.mean(y**2)

    gradient = jax.grad(loss)(w)
    ref[...] = ref[...] * 2 + gradient
    return gradient


def written_in_a_loop(ref, w, x):
    """The loop itself has an effect, and stays as it is; the network in front of it does not."""

    def network(w):
        y = x
        for _ in range(6):
            y = jnp.sin(y @ w)
        return jnp.mean(y**2)

    gradient = jax.grad(network)(w)

    def iteration(y, i):
        y = jnp.tanh(y @ w)
        ref[i] += y[0]
        return y, y.sum()

    return gradient, lax.scan(iteration, x + gradient, jnp.arange(8))


def behind_a_barrier(ref, w, x):
    def network(w):
        y = x
        for _ in range(6):
            y = jnp.sin(y @ w)
        return jnp.mean(y**2)

    gradient, _ = lax.optimization_barrier((jax.grad(network)(w), ref))
    ref[...] += gradient
    return gradient, ref[...]


def made_inside(ref, w, x):
    """References that live inside the program, one of them read by a loop as a constant."""
    inner = jax.new_ref(jnp.tanh(x @ w))

    def iteration(y, _):
        return jnp.sin(y @ w) + inner[...], jnp.sum(y)

    y, sums = lax.scan(iteration, x, None, length=4)
    inner[...] = y
    ref[...] += inner[...]
    return sums


PROGRAMS = [through_a_loop, through_branches, written_in_a_loop, made_inside]
if _compat.JAX_VERSION >= (0, 11):  # before, barriers took no references
    PROGRAMS.append(behind_a_barrier)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_those_of_jit(program):
    def run(jitted, *options):
        ref = jax.new_ref(jnp.ones((N, N)))
        return jitted(ref, W, X), ref[...]

    wanted = run(jax.jit(program))
    plain = jaxtensile.jit(program, compiler_options=FAST).plan(jax.new_ref(jnp.ones((N, N))), W, X)
    budget = 1
    for _ in range(3):
        planned = jaxtensile.jit(program, budget=budget, compiler_options=FAST)
        try:
            found = run(planned)
            break
        except jaxtensile.BudgetError as error:
            budget = max(error.needs, budget + 1)
    else:
        pytest.fail(f"nothing fits in {budget} bytes, {plain.compiled.device} as it is")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(ours, theirs)
    if program in (through_a_loop, through_branches):
        assert budget < plain.compiled.device
        assert planned.plan(jax.new_ref(jnp.ones((N, N))), W, X).rewritten
    np.testing.assert_array_equal(np.isfinite(found[1]), True)
