"""Random nests of checkpoints, of either kind that JAX has: undone they are the program without them, and every plan of
them computes what ``jax.jit`` computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtensile
from checkpoints import CHECKPOINTS, checkpoints_are
from jax_lines import SOAK
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.undo import undo
from programs import FAST

P = jax.checkpoint_policies
X = jax.random.normal(jax.random.key(0), (6, 8)) / 4
W = jax.random.normal(jax.random.key(1), (8, 8)) / 4
POLICIES = {
    "default": None,
    "nothing": P.nothing_saveable,
    "everything": P.everything_saveable,
    "dots": P.dots_saveable,
    "dots without batch": P.dots_with_no_batch_dims_saveable,
    "named": P.save_only_these_names("mid"),
    "other names": P.save_only_these_names("none of them"),
    "any name but": P.save_any_names_but_these("mid"),
    "either": P.save_from_both_policies(P.dots_saveable, P.save_only_these_names("mid")),
}


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (jnp.clip(g, -1, 1) * c,))


@jax.custom_jvp
def doubled(x):
    return jnp.tanh(x)


doubled.defjvp(lambda x, t: (jnp.tanh(x[0]), t[0] * (1 - jnp.tanh(x[0]) ** 2)))

LEAVES: dict[str, Callable[..., jax.Array]] = {
    "product": lambda w, x: jnp.tanh(x @ w),
    "gelu": lambda w, x: jax.nn.gelu(x @ w) + x,
    "named": lambda w, x: jnp.sin(checkpoint_name(x @ w, "mid")),
    "own vjp": lambda w, x: clipped(x @ w),
    "own jvp": lambda w, x: doubled(x @ w) * x,
    "dropped": lambda w, x: jnp.where(jax.random.bernoulli(jax.random.key(5), 0.8, x.shape), x @ w, 0),
    "apart": lambda w, x: lax.optimization_barrier(jnp.sin(x)) @ w,
}


@dataclass(frozen=True)
class Nest:
    """One of ``LEAVES``, ``scan`` or ``cond`` or ``jit`` or ``chain`` of what is inside, or a checkpoint around it."""

    name: str
    inside: tuple["Nest", ...] = ()
    policy: str = ""
    prevent_cse: bool = True
    static: bool = False

    @property
    def names(self):
        return {self.name}.union(*(n.names for n in self.inside))

    def run(self, w, x, *, checkpoints=True):
        run = partial(_run, self.inside, checkpoints=checkpoints)
        if self.name in LEAVES:
            return LEAVES[self.name](w, x)
        if self.name == "checkpoint" and checkpoints:
            options = {"policy": POLICIES[self.policy], "prevent_cse": self.prevent_cse}
            if not self.static:
                return jax.checkpoint(run, **options)(w, x)
            return jax.checkpoint(lambda w, x, double: run(w, 2 * x if double else x), static_argnums=2, **options)(
                w, x, False
            )
        if self.name == "scan":
            return lax.scan(lambda x, _: (run(w, x), None), x, None, length=2)[0]
        if self.name == "cond":
            return lax.cond(x[0, 0] > 0, lambda x: run(w, x), lambda x: x / 2, x)
        if self.name == "jit":
            return jax.jit(run)(w, x)
        return run(w, x)


def _run(inside, w, x, *, checkpoints):
    for nest in inside:
        x = nest.run(w, x, checkpoints=checkpoints)
    return x


def nests(controls=("chain", "jit")):
    leaf = st.builds(Nest, st.sampled_from(sorted(LEAVES)))

    def around(inner):
        inside = st.lists(inner, min_size=1, max_size=2).map(tuple)
        checkpoint = st.builds(
            Nest, st.just("checkpoint"), inside, st.sampled_from(sorted(POLICIES)), st.booleans(), st.booleans()
        )
        return st.one_of(checkpoint, checkpoint, st.builds(Nest, st.sampled_from(controls), inside))

    return st.builds(
        Nest, st.just("chain"), st.lists(st.recursive(leaf, around, max_leaves=5), min_size=1, max_size=2).map(tuple)
    )


def gradient(nest, **options):
    return jax.value_and_grad(lambda w, x: (nest.run(w, x, **options) ** 2).sum(), argnums=(0, 1))


def traced(fun):
    return trace_jaxpr(jax.jit(fun).trace(W, X).jaxpr)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_undone_there_is_nothing_left_of_them(kind):
    """No more matrix work than without them, if the user keeps nothing apart, and none of their barriers."""
    seen = {"undone": 0, "spared": 0}

    @settings(max_examples=200 if SOAK else 25)
    @given(nests())
    def check(nest):
        with checkpoints_are(kind):
            written = traced(gradient(nest))
            without = traced(gradient(nest, checkpoints=False)).graph.flops
            undone = undo(written)
            left = written if undone is None else undone.traced
            assert without <= written.graph.flops == jaxpr_flops(jax.jit(gradient(nest)).trace(W, X).jaxpr)
            assert undone is None or not any(e.eqn is None for e in left.equations)
            if "apart" not in nest.names:
                assert left.graph.flops == without
            assert without <= left.graph.flops <= written.graph.flops
            seen["undone"] += undone is not None
            seen["spared"] += left.graph.flops < written.graph.flops

    check()
    assert min(seen.values()) >= 8


@pytest.mark.parametrize("kind", CHECKPOINTS[-1:])
def test_they_compute_what_jit_computes(kind):
    """Where there is room for everything, undone and as written, and where there is not."""
    seen = {"undone": 0, "planned": 0}

    def agree(fun, expected, **options):
        step = jaxtensile.jit(fun, compiler_options=FAST, **options)
        report = step.plan(W, X)
        for ours, theirs in zip(jax.tree.leaves(step(W, X)), jax.tree.leaves(expected), strict=True):
            scale = float(np.abs(theirs).max())
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=64 * float(jnp.finfo(theirs.dtype).eps) * scale)
        return report

    @settings(max_examples=100 if SOAK else 4)
    @given(nests(("chain", "jit", "scan", "cond")))
    def check(nest):
        with checkpoints_are(kind):
            fun = gradient(nest)
            expected = jax.jit(fun, compiler_options=FAST)(W, X)
            seen["undone"] += agree(fun, expected, budget="1GiB").undone
            plain = agree(fun, expected, budget="1GiB", undo=False)
            try:
                tight = agree(fun, expected, budget=plain.compiled.device - plain.compiled.temp // 4)
            except jaxtensile.BudgetError:
                return
            seen["planned"] += not tight.unchanged

    check()
    assert seen["undone"] >= 1
