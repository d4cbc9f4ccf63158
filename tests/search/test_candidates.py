"""The cheapest candidate for a budget: what was asked before does not make it dearer."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.search.candidates import Candidates
from jaxtensile.search.variant import charge_of
from requests_of import opened

W, XS = jnp.zeros((256, 256)), jnp.zeros((4, 1024, 256))


def accumulated(w, xs):
    """Gradients of a few layers, added up in a scan: all that can be recomputed is in its body."""

    def loss(w, x):
        for i in range(6):
            x = jnp.tanh(jnp.sin(x * (i + 1)) @ w)
        return (x * x).sum()

    return jax.lax.scan(lambda c, x: (c + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)[0]


@pytest.mark.parametrize("low", [0.0, 0.3])
def test_a_body_that_was_planned_for_less_is_planned_again(low):
    _, start = opened(accumulated, W, XS, device="cpu")
    plain = start.solve(1 << 40).predicted

    def budget(share):
        return int(plain.device - (1 - share) * plain.temp)

    asked = Candidates(start)
    asked.cheapest(budget(low))
    for share in (0.9, 0.8):
        again, anew = asked.cheapest(budget(share)), Candidates(start).cheapest(budget(share))
        assert anew[0].inside and again[1].predicted.device <= budget(share)
        assert charge_of(*again) <= charge_of(*anew) < charge_of(*Candidates(start).cheapest(0))
