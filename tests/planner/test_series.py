"""Plans for ever lower aims, on devices that are not here."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtensile
from jaxtensile import switches
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


class Drawn:
    """A variant and its plan, of a series that is drawn up here: what the model says, and what XLA would."""

    def __init__(self, predicted, needs, charge=0.0, deep=False, as_it_is=False):
        self.predicted = SimpleNamespace(device=predicted)
        self.needs, self.charge, self.deep = needs, charge, deep
        self.as_it_is = self.changes_nothing = as_it_is
        self.undone, self.parts, self.solver = None, 1, "drawn"


def drawn(monkeypatch, plans, order, shallow=None):
    """What is compiled for a budget of 100 of a program that needs 120 as it is, and what comes of it."""
    compiled = []

    def planned(_, variant, plan, aim):
        compiled.append(plan)
        found = SimpleNamespace(device=plan.needs, memory=plan.needs, time=None)
        fits = plan.needs <= 100
        return SimpleNamespace(variant=variant, plan=plan, compiled=found, fits=fits, misplaced=False), 1

    monkeypatch.setattr(series, "charge_of", lambda variant, plan: plan.charge)
    monkeypatch.setattr(series, "program_key", lambda variant, plan: id(plan))
    monkeypatch.setattr(series, "_tried", lambda *_: set())
    monkeypatch.setattr(series.variants, "held_in_order", lambda variant, plan: order)
    backend = SimpleNamespace(own_memory=True)
    rounds = SimpleNamespace(
        request=SimpleNamespace(budget=100, device=SimpleNamespace(backend=backend)),
        compiles=SimpleNamespace(known=lambda _: SimpleNamespace(device=120, memory=120), plain=None),
        scale=1.0,
        worth=lambda *_: True,
        doubted=False,
        at_hand=lambda _, aim: any(p.predicted.device <= aim and not p.deep for p in plans),
        cheapest=lambda _, aim: next(((p, p) for p in plans if p.predicted.device <= aim), (plans[-1], plans[-1])),
        planned=planned,
        shallow=lambda *_: planned(None, shallow, shallow, 0) if shallow else (None, 0),
        lifted=lambda _, made, *more: (made, 0),
    )
    written = SimpleNamespace(plain=SimpleNamespace(device=1000))
    candidates = SimpleNamespace(written=written, hold=lambda *_: False, release=None, forget_host=None)
    candidates.forget_early_updates = None
    best, _ = series.closest(rounds, candidates, None)
    return best.plan, compiled


def test_an_order_that_misses_takes_no_round_from_the_plans(monkeypatch):
    plain, order = Drawn(95, 120, as_it_is=True), Drawn(95, 118, 0.5)
    plans = [Drawn(78, 112, 1.0), Drawn(66, 112, 2.0), Drawn(36, 111, 3.0), Drawn(8, 99, 4.0)]
    assert drawn(monkeypatch, [plain, *plans], order) == (plans[-1], [order, *plans])


def test_a_dearer_order_is_compiled_after_the_plan(monkeypatch):
    plain, order = Drawn(95, 120, as_it_is=True), Drawn(95, 99, 1.5)
    plans = [Drawn(78, 112, 1.0), Drawn(66, 90, 2.0)]
    assert drawn(monkeypatch, [plain, *plans], order) == (order, [plans[0], order])


def test_after_an_order_that_misses_the_shallow_plan_still_comes_before_deep_ones(monkeypatch):
    plain, order = Drawn(95, 120, as_it_is=True), Drawn(95, 115, 1.0)
    shallow = Drawn(85, 98, 2.0)
    assert drawn(monkeypatch, [plain, Drawn(80, 150, 3.0, deep=True)], order, shallow) == (shallow, [order, shallow])


def test_an_aim_that_nothing_at_hand_meets_is_raised(monkeypatch):
    """Rather than to search for the least: 120 of 95 as it is do not say that a plan needs as much more."""
    plain, middle, least = Drawn(95, 120, as_it_is=True), Drawn(85, 98, 1.0), Drawn(20, 60, 9.0, deep=True)
    for off, found in (([], middle), (["within_reach"], least)):
        with switches.off(*off):
            assert drawn(monkeypatch, [plain, middle, least], plain) == (found, [found])
