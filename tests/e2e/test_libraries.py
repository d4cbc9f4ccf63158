"""Programs of public libraries under a tight budget return what they return under ``jax.jit``.

XLA's own bytes decide: each program is compiled plain, then planned for a share of what it needs above its arguments
and results, or, where nothing reaches that, for the least that the error says can be reached. How many programs a plan
changed is counted, and said at the end of the run.
"""

import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from library_programs import PROGRAMS
from programs import FAST

TOLERANCE = 2e-4
"""Of an array's largest value: float32 sums in another order, behind solvers that iterate."""

SMALL = 1e-3
"""Of values around 1: what is smaller everywhere is what rounding left of a zero, as in gradients of keys' biases."""


@pytest.fixture(scope="module")
def seen():
    return Counter()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_of_a_public_library_is_the_same_under_pressure(name, seen, record_property):
    make, share = PROGRAMS[name]
    step, args = make()
    (expected, use), said = heard(lambda: plain_step(step, args))
    (got, outcome), ours = heard(lambda: planned_step(step, args, use, share))
    assert ours == said, "warnings differ"
    agree(got, expected)
    seen[outcome] += 1
    record_property("counted", f"programs of public libraries: {outcome}")


def test_plans_changed_most_of_them(seen):
    """Where this process ran enough of them to tell."""
    assert seen["changed"] >= 0.5 * seen.total() or seen.total() < 5, dict(seen)


def plain_step(step, args):
    """Results under ``jax.jit``, and XLA's bytes."""
    compiled = jax.jit(step, compiler_options=FAST).lower(*args).compile()
    return jax.block_until_ready(compiled(*args)), compiled.memory_analysis()


def planned_step(step, args, use, share):
    """Results under a budget, and whether a plan changed the program."""
    needs = use.argument_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes
    plain, budget = needs + use.temp_size_in_bytes, needs + int(share * use.temp_size_in_bytes)
    for _ in range(2):
        planned = jaxtensile.jit(step, budget=budget, compiler_options=FAST)
        try:
            got = jax.block_until_ready(planned(*args))
        except jaxtensile.BudgetError as error:
            assert error.needs is not None
            assert budget < error.needs, "what an error names as reachable is met"
            budget = error.needs
            continue
        changed = planned.trace(*args).jaxpr is not planned._plain.trace(*args).jaxpr
        return got, "changed" if changed and budget < plain else "as they are, nothing reaches less"
    raise AssertionError("a budget that an error named was not met")


def heard(call):
    """What a call returns, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = call()
    return result, sorted({str(w.message) for w in said})


def agree(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and (a.sharding, a.committed) == (b.sharding, b.committed)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        where = jax.tree_util.keystr(path)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        scale = max(float(np.abs(b).max(initial=0, where=np.isfinite(b))), SMALL)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale, err_msg=where)
