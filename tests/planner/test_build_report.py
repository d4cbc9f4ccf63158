"""What is told beside the figures: what no plan touches, and what no figure counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile.errors import Culprit
from jaxtensile.program.trace import trace_jaxpr, why_pinned

W, X = jnp.ones((16, 16)), jnp.ones((64, 16))


def notes(fun, *args):
    return jaxtensile.jit(fun, budget="1GiB").plan(*args).notes


def loud(w, x):
    def body(h, _):
        jax.debug.print("{}", h[0, 0])
        return jnp.tanh(h @ w), None

    h, _ = lax.scan(body, x, length=4)
    for _ in range(2):
        h = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
    return h.sum()


def test_what_is_left_alone_is_named_with_the_reason():
    (told,) = (n for n in notes(loud, W, X) if n.startswith("left alone"))
    assert "scan at" in told and "inside)" in told and "test_build_report.py" in told
    assert "2 x pure_callback" in told or told.count("pure_callback") == 2
    assert "(foreign code)" in told


def test_what_a_loop_needs_inside_is_named():
    def fun(x):
        return lax.scan(lambda c, _: (jnp.cumsum(jnp.cumsum(c, 0), 1) - c[::-1], None), x, length=3)[0].sum()

    with pytest.raises(jaxtensile.BudgetError) as info:
        jaxtensile.jit(fun, budget="1.1MiB").plan(jnp.ones((512, 512)))
    (largest, *_) = info.value.culprits
    assert largest.primitive == "scan" and largest.nbytes >= 1 << 20 and "test_build_report.py" in largest.source


def test_keys_are_not_worth_a_word_and_plain_programs_have_none():
    def fun(w, x):
        return (x @ w * jax.random.normal(jax.random.key(0), (64, 16))).sum()

    assert not any("left alone" in n for n in notes(fun, W, X))


def test_of_many_kinds_the_most_frequent_are_named():
    def fun(x):
        for i in range(7):
            x = jax.pure_callback(lambda a, i=i: np.asarray(a) + i, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            jax.debug.print("{}", x[0, 0]) if i % 2 else None
        x = lax.while_loop(lambda x: x.sum() < 0, lambda x: jax.pure_callback(np.asarray, X, x), x)
        x = lax.cond(x.sum() > 0, lambda x: jax.pure_callback(np.asarray, X, x), lambda x: x, x)
        return lax.map(lambda r: jax.pure_callback(np.asarray, r, r), x).sum()

    (told,) = (n for n in notes(fun, X) if n.startswith("left alone"))
    assert told.count("(") >= 4 and told.endswith("more")


def test_every_pinned_op_has_a_reason_and_no_other_has():
    traced = trace_jaxpr(jax.jit(loud).trace(W, X).jaxpr)
    for op in traced.graph.ops:
        assert bool(why_pinned(traced, op.id)) == op.pinned


def test_large_constants_are_reported():
    table = jnp.ones((600, 600))
    (told,) = (n for n in notes(lambda x: (x @ table[:16, :16]).sum(), X) if "closes over" in n)
    assert "1.37MiB in 1" in told
    assert not any("closes over" in n for n in notes(lambda x: (x @ W).sum(), X))


def test_a_culprit_says_no_line_where_none_is_the_users():
    told = [str(Culprit(primitive="mul", source=s, nbytes=1024)) for s in ("model.py:3 (loss)", "<mul>")]
    assert told == ["mul at model.py:3 (loss) needs 1.00KiB", "mul needs 1.00KiB"]


def test_buffers_of_a_few_bytes_are_no_culprits():
    x = jnp.ones(1 << 16)
    with pytest.raises(jaxtensile.BudgetError) as info:
        jaxtensile.jit(lambda x: jnp.sort(x) + jnp.sum(x), budget="4KiB").plan(x)
    sizes = [c.nbytes for c in info.value.culprits]
    assert sizes and min(sizes) > max(sizes) / 100
