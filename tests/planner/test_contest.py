"""A contest of plans: what is compiled of work in parts and of recomputation."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.planner import trial_compiles


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
