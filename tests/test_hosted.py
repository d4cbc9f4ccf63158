"""A loop on the very device says whether stacks in host memory come back right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtensile.hosted import stacks_come_back, with_hosted_stacks


@pytest.fixture(autouse=True)
def forget():
    stacks_come_back.cache_clear()
    yield
    stacks_come_back.cache_clear()


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


def test_a_device_that_refuses_has_shown_nothing(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory")

    monkeypatch.setattr("jaxtensile.hosted.with_hosted_stacks", refuse)
    assert not stacks_come_back(jax.devices()[0], load_index=False)


def test_everything_that_can_be_there_is():
    def loss(x):
        return (lax.scan(lambda h, k: (jnp.sin(k * h), None), x, jnp.arange(3.0))[0] ** 2).sum()

    x = np.ones((512, 512), np.float32)
    changed, moved = with_hosted_stacks(jax.grad(loss), (x,), load_index=False)
    assert moved >= 3 << 20
    np.testing.assert_allclose(jax.jit(changed)(x)[0], jax.grad(loss)(x), rtol=1e-6)
