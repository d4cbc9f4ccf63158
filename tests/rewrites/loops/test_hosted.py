"""A loop on the very device says whether stacks in host memory come back right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtensile.rewrites.loops.hosted import (
    copies_come_back,
    stacks_come_back,
    state_comes_back,
    with_hosted_copies,
    with_hosted_stacks,
    with_hosted_state,
)


@pytest.fixture(autouse=True)
def forget():
    for asked in (stacks_come_back, copies_come_back, state_comes_back):
        asked.cache_clear()
    yield
    for asked in (stacks_come_back, copies_come_back, state_comes_back):
        asked.cache_clear()


@pytest.mark.parametrize("load_index", [False, True])
def test_this_device_gives_them_back(load_index):
    assert stacks_come_back(jax.devices()[0], load_index=load_index)


def test_it_does_so_with_64_bits_too():
    with jax.enable_x64(True):
        assert stacks_come_back(jax.devices()[0], load_index=True)


def test_a_stack_that_is_read_forwards_is_found_out(monkeypatch):
    right = lax.dynamic_index_in_dim
    monkeypatch.setattr(lax, "dynamic_index_in_dim", lambda s, i, **how: right(s, s.shape[0] - 1 - i, **how))
    assert not stacks_come_back(jax.devices()[0], load_index=True)


@pytest.mark.parametrize(
    "change, asked",
    [
        ("with_hosted_stacks", functools.partial(stacks_come_back, load_index=False)),
        ("with_hosted_copies", copies_come_back),
        ("with_hosted_state", state_comes_back),
    ],
)
def test_a_device_that_refuses_has_shown_nothing(monkeypatch, change, asked):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory")

    monkeypatch.setattr(f"jaxtensile.rewrites.loops.hosted.{change}", refuse)
    assert not asked(jax.devices()[0])


def test_everything_that_can_be_there_is():
    def loss(x):
        return (lax.scan(lambda h, k: (jnp.sin(k * h), None), x, jnp.arange(3.0))[0] ** 2).sum()

    x = np.ones((512, 512), np.float32)
    changed, moved = with_hosted_stacks(jax.grad(loss), (x,), load_index=False)
    assert moved >= 3 << 20
    np.testing.assert_allclose(jax.jit(changed)(x)[0], jax.grad(loss)(x), rtol=1e-6)


def test_so_does_straight_line_code():
    assert copies_come_back(jax.devices()[0])


def test_a_slice_of_another_slot_is_found_out(monkeypatch):
    right = lax.dynamic_slice_in_dim
    monkeypatch.setattr(lax, "dynamic_slice_in_dim", lambda s, i, *how: right(s, s.shape[0] - 1 - i, *how))
    assert not copies_come_back(jax.devices()[0])


def test_all_that_waits_in_straight_line_code_is_there():
    def loss(x, w):
        for _ in range(6):
            x = jnp.sin(x @ w) @ w
        return (x**2).sum()

    x, w = (np.random.default_rng(n).normal(0, 512**-0.5, (512, 512)).astype(np.float32) for n in range(2))
    changed, moved = with_hosted_copies(jax.grad(loss), (x, w))
    assert moved >= 4 << 20
    np.testing.assert_allclose(jax.jit(changed)(x, w)[0], jax.grad(loss)(x, w), rtol=1e-4, atol=1e-4)


def test_so_does_state():
    assert state_comes_back(jax.devices()[0])


def test_state_of_another_leaf_is_found_out(monkeypatch):
    def swapped(fun, args):
        changed, moved = with_hosted_state(fun, args)

        def run(*flat):
            *weights, first, second, third = changed(*flat)
            return [*weights, second, first, third]

        return run, moved

    monkeypatch.setattr("jaxtensile.rewrites.loops.hosted.with_hosted_state", swapped)
    assert not state_comes_back(jax.devices()[0])


def test_state_that_does_not_stay_there_has_shown_nothing(monkeypatch):
    def nowhere(fun, args):
        changed, moved = with_hosted_state(fun, args)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return (lambda *flat: jax.device_put(changed(*flat), here)), moved

    monkeypatch.setattr("jaxtensile.rewrites.loops.hosted.with_hosted_state", nowhere)
    assert not state_comes_back(jax.devices()[0])
