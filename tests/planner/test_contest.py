"""A contest of plans: what is compiled of work in parts and of recomputation."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.planner import contest, trial_compiles
from jaxtensile.planner.page import opened
from jaxtensile.search.made import Made
from jaxtensile.xla.compile import Compiled
from requests_of import ARGS, job


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    return jax.value_and_grad(loss)(weights)


@pytest.mark.cuda_aot
@pytest.mark.xdist_group("contest")
def test_what_adds_several_times_as_much_is_not_compiled_beside_work_in_parts(monkeypatch):
    """Kernels decide between plans that the model finds near each other. Here products made twice add a quarter of a
    step, and two parts some launches."""
    tried = []

    class Telling(trial_compiles.TrialCompiles):
        def _planned(self, variant, *args):
            tried.append(variant.parts)
            return super()._planned(variant, *args)

    monkeypatch.setattr("jaxtensile.planner.page.TrialCompiles", Telling)
    layers, width, rows = 4, 1024, 32768
    args = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers, jax.ShapeDtypeStruct((rows, width), "float32")
    given, temp = 4 * width * (2 * layers * width + rows), 4 * rows * width * (layers + 1)
    report = jaxtensile.jit(step, budget=given + int(0.7 * temp), target="nvidia-h200").plan(*args)
    assert tried and min(tried) > 1, tried
    assert "parts" in report.notes[0]


def test_parts_are_asked_for_by_what_recomputation_missed():
    """By the model it fits, and needs no parts; XLA needs half as much again."""
    whole = opened(job(1 << 40, args=ARGS)).program.predicted
    page = opened(job(whole.device - whole.temp // 4, args=ARGS, chunk="auto"))
    candidates = page.candidates(page.written())
    variant, plan = page.cheapest(candidates)
    assert plan.predicted.device <= page.request.budget and not variant.works_in_parts
    assert contest._in_parts(page, candidates.anew(), None, compiled=True) is None
    use = MemoryUse(argument=0, output=0, temp=3 * page.request.budget // 2, alias=0, exact=True)
    compiled = Compiled(jitted=None, memory=use, options={}, seconds=0.0)
    missed = Made(compiled=compiled, variant=variant, plan=plan, evaluate=None)
    _, found = contest._in_parts(page, candidates.anew(), None, compiled=True, missed=missed)
    assert found[0].works_in_parts and found[1].predicted.device < plan.predicted.device
