"""A rewrite is a value: whoever adds one tells the registry, and everything else knows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.program.trace import retrace
from jaxtensile.rewrites.rewrite import Rewrite, changed
from jaxtensile.search import registry
from programs import FAST


def wide(x):
    """Its second product is a hundred times as large as what comes of it, and nothing but another program helps."""
    return (x @ jnp.ones((8, 800))) @ jnp.ones((800, 8))


def narrow(x):
    return x @ jnp.full((8, 8), 800.0)


NARROW = Rewrite(
    key="narrow",
    title="the narrowing of products",
    form=tuple[int, ...],
    find=lambda start: [(o.id,) for o in start.base.graph.ops if o.primitive == "dot_general"][1:],
    apply=lambda start, _: changed(start, lambda: retrace(lambda x: [narrow(x)], start.request.jaxpr)),
    describe=lambda sites: f"product {sites[0]} is narrow",
    last=True,
)


def test_a_rewrite_that_is_added_is_planned_cached_told_and_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "REWRITES", [*registry.REWRITES, NARROW])
    monkeypatch.setenv("JAXTENSILE_PLAN_CACHE", str(tmp_path))
    x = np.ones((1024, 8), np.float32)
    notes = []
    for _ in range(2):
        step = jaxtensile.jit(wide, budget="1MiB", chunk=False, compiler_options=FAST)
        np.testing.assert_allclose(step(x), jax.jit(wide)(x))
        notes.append(step.plan(x).notes)
    assert all(any(note.endswith("is narrow") for note in told) for told in notes), notes
    assert not any("earlier process" in note for note in notes[0]) and any(
        "earlier process" in note for note in notes[1]
    )
    monkeypatch.setattr(registry, "REWRITES", registry.REWRITES[:-1])
    with pytest.raises(jaxtensile.BudgetError), pytest.warns(RuntimeWarning, match="no rewrite is called 'narrow'"):
        jaxtensile.jit(wide, budget="1MiB", chunk=False, compiler_options=FAST).plan(x)


def test_keys_say_which():
    keys = [rewrite.key for rewrite in registry.REWRITES]
    assert len({*keys}) == len(keys) and registry.named("sink").key == "sink"
    with pytest.raises(LookupError, match="'sunk'"):
        registry.named("sunk")
