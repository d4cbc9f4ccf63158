"""Jits of one function share what JAX knows them by where they ask for the same, and nothing else does."""

import gc
import os
import weakref

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.api import jit as api
from jaxtensile.api.shared_dispatch import stand_in
from jaxtensile.devices import measured
from jaxtensile.devices.measured import Measurement
from jaxtensile.settings.options import Asked
from programs import chain_args, close, squeezed, step


def f(x):
    return x * 2


def run(x):
    return x * 2


def same(a, b, fun=f):
    return stand_in(fun, a, run) is stand_in(fun, b, run)


def test_the_same_question_and_no_other():
    assert same(Asked(), Asked()) and same(Asked(options={"static_argnums": 1}), Asked(options={"static_argnums": 1}))
    others = [{"budget": 1 << 20}, {"objective": "time"}, {"undo": False}, {"chunk": True}, {"solver": "greedy"}]
    others += [{"host_budget": "1MiB"}, {"target": "cpu"}, {"options": {"donate_argnums": 0}}]
    others += [{"undo": True}, {"objective": "flops"}]  # which win over a config that says otherwise
    for other in others:
        assert same(Asked(**other), Asked(**other)) and not same(Asked(), Asked(**other)), other
    assert stand_in(f, Asked(), run) is not stand_in(run, Asked(), run)


def test_what_cannot_be_compared_is_not_shared():
    assert not same(Asked(options={"donate_argnums": [0]}), Asked(options={"donate_argnums": [0]}))
    assert not same(Asked(config={}), Asked(config={})) and not same(Asked(job=1), Asked(job=1))

    class Callable:
        def __call__(self, x):
            return x

        def method(self, x):
            return x

    made = Callable()
    assert not same(Asked(), Asked(), made) and not same(Asked(), Asked(), made.method)


def test_another_config_is_another_question(tmp_path, monkeypatch):
    file, text = tmp_path / "jaxtensile.toml", '[functions.f]\nbudget = "%dMiB"\n'
    before = stand_in(f, Asked(), run)
    monkeypatch.chdir(tmp_path)
    assert stand_in(f, Asked(), run) is before
    file.write_text(text % 1)
    written = stand_in(f, Asked(), run)
    assert written is not before and stand_in(f, Asked(config=str(file)), run) is not before
    file.write_text(text % 2)
    assert stand_in(f, Asked(), run) not in (before, written)
    file.unlink()
    assert stand_in(f, Asked(), run) is before
    monkeypatch.setenv("JAXTENSILE_CONFIG", str(file))  # which is not there
    assert not same(Asked(), Asked())


def misses(monkeypatch):
    """How often a call of a planned function came to Python."""
    seen = []
    chosen = api.Planned._chosen
    monkeypatch.setattr(api.Planned, "_chosen", lambda self, *a: seen.append(self) or chosen(self, *a))
    return seen


def test_other_rates_are_another_question(tmp_path, monkeypatch):
    """A jit made after a calibration plans by what that measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, rates = stand_in(f, Asked(), run), {"memory_bandwidth": 1e10}
    assert stand_in(f, Asked(), run) is before
    how, now = dict.fromkeys(rates, "somehow"), "2026-01-31"
    found = Measurement(kind="k", jaxlib=measured.jaxlib_version(), date=now, took=1.0, numbers=rates, how=how)
    measured.keep(found, "k")
    assert stand_in(f, Asked(), run) is not before


def test_again_and_again_is_planned_once(monkeypatch):
    seen = misses(monkeypatch)
    for fun in (f, lambda x: x + 1):
        for _ in range(3):
            assert (jaxtensile.jit(fun)(jnp.arange(3.0)) == fun(jnp.arange(3.0))).all()
    assert len(seen) == 2


def test_a_plan_is_found_again_and_is_not_that_of_another_budget():
    args, options = chain_args(), {"keep_unused": True}
    found = squeezed(step, *args, **options)
    assert found is not None
    planned, plain = found[0](*args), jax.jit(step)(*args)
    again = jaxtensile.jit(step, budget=found[1].budget, **options)
    assert again._cache_size() == found[0]._cache_size() == 1
    assert jaxtensile.jit(step, budget="1GiB", **options)._cache_size() == 0
    for a, b, c in zip(again(*args), planned, plain, strict=True):
        assert (a == b).all()
        close(a, c)


def test_clearing_one_is_clearing_all(monkeypatch):
    def g(x):
        return x - 1

    seen = misses(monkeypatch)
    one, other = jaxtensile.jit(g), jaxtensile.jit(g)
    one(1.0), other(1.0)
    assert seen == [one]
    one.clear_cache()
    other(1.0)
    assert seen == [one, other]


@pytest.mark.parametrize("first", [0, 1])
def test_without_jit_whoever_lives_runs(first):
    def g(x):
        return [x, 1]

    both = [jaxtensile.jit(g), jaxtensile.jit(g)]
    del both[first]
    gc.collect()
    with jax.disable_jit():
        assert both[0](2.0) == [2.0, 1]


def test_nothing_is_kept():
    def g(x):
        return x * 3

    planned = jaxtensile.jit(g, donate_argnums=())
    planned(jnp.ones(4))
    there, made = weakref.ref(g), weakref.ref(planned)
    del planned
    gc.collect()
    assert made() is None and there() is g
    del g
    gc.collect()
    assert there() is None


def test_a_folder_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    before = stand_in(f, Asked(), run)
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    assert stand_in(f, Asked(), run) is before
