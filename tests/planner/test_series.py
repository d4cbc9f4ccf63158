"""Plans for ever lower aims, on devices that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtensile
from jaxtensile.planner import series
from jaxtensile.xla.target import resolve_all

WIDTH, ROWS, LAYERS, DEVICES = 512, 4096, 6, 4


def step(ws, x):
    def loss(ws):
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return (y * y).mean()

    return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]


@pytest.mark.cuda_aot
def test_an_order_alone_brings_back_products_that_sums_over_devices_put_off():
    """Every layer's gradient is there until then: recomputation is no cheaper way out."""
    mesh = Mesh(np.array(resolve_all("nvidia-h200", DEVICES)), ("data",))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((DEVICES * ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    plain = jaxtensile.jit(step, budget="1GiB").plan([w] * LAYERS, x).compiled.device
    report = jaxtensile.jit(step, budget=plain * 92 // 100).plan([w] * LAYERS, x)
    assert report.fits and not report.recompute_flops
    assert report.solver == "order alone" and report.compiled.device == pytest.approx(report.predicted.device, rel=1e-3)


def test_each_miss_aims_lower_and_by_what_the_last_ones_say():
    assert series._lower([(90, 120)], 100) == 70  # 20 too much, so 20 less
    assert series._lower([(100, 140), (60, 120)], 100) == 20  # 40 less brought 20 less
    assert series._lower([(100, 140), (60, 110)], 100) == 46  # 40 less brought 30 less
    assert series._lower([(100, 120), (80, 125)], 100) == 17  # no trend: as if 1 brought 0.4
    for seen in ([(100, 101)], [(100, 130), (70, 101)], [(80, 200), (80, 200)]):
        assert series._lower(seen, 100) < seen[-1][0]
