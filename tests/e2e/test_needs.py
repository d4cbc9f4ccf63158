"""What an error names is met at once, whatever was asked first, and is no more than the program as it is needs."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
import loop_programs
from differential import QUICK, every
from jax_lines import SOAK
from jaxtensile.planner import recall
from random_programs import RULES, programs


def held_to(fun, *args, **options):
    """Of one function: asked for one byte, for what the error names, and for somewhat more."""
    recall.forget()
    options = {"compiler_options": QUICK, **options}
    plain = jaxtensile.jit(fun, budget="1TiB", undo=False, **options).plan(*args)
    with pytest.raises(jaxtensile.BudgetError) as info:
        jaxtensile.jit(fun, budget=1, **options).plan(*args)
    needs = info.value.needs
    assert needs is not None and needs <= plain.compiled.device and "about" not in str(info.value)
    met = jaxtensile.jit(fun, budget=needs, **options).plan(*args)
    assert met.fits and met.compiled.device <= needs and met.rounds <= 1
    more = jaxtensile.jit(fun, budget=needs + (plain.compiled.device - needs) // 3, **options).plan(*args)
    assert more.fits


SMALL = {
    "cond": (lambda x: jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x) * 2, lambda: jnp.cos(x)), (64, 64)),
    "scan": (lambda x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x), (64, 64)),
    "svd": (lambda x: jnp.linalg.svd(x, full_matrices=False), (40, 24)),
    "normal": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (100, 7)),
    "one": (lambda x: x + 1, (3,)),
    "nothing": (lambda x: x, (3,)),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_programs(name):
    fun, shape = SMALL[name]
    held_to(fun, jnp.ones(shape))


@pytest.mark.parametrize("fun", [loop_programs.two_loops, loop_programs.chained])
def test_loops(fun):
    def step(w, xs, h0):
        return jax.value_and_grad(fun)(w, xs, h0)

    held_to(step, *loop_programs.arguments())


def test_random_programs():
    def compare(program, seen):
        held_to(program.step, *program.args(), donate_argnums=(0,) if program.donate else ())
        seen["programs"] += 1

    assert every(programs(RULES, layers=(3, 6)), 200 if SOAK else 4, compare)["programs"]
