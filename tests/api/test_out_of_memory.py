"""A device without room: what lived there, and what helps most."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.api.beside import living
from jaxtensile.api.out_of_memory import Shortage, advice, told
from jaxtensile.units import GIB


def at(asked, arrays, budget=39, **allocator):
    sizes = {name: size * GIB for name, size in allocator.items()}
    return advice(Shortage(asked * GIB, arrays * GIB, 40 * GIB, budget * GIB, **sizes))


@pytest.mark.parametrize(
    ("shortage", "said"),
    [
        (at(41, 1), "one value of 41.00GiB is larger than the device"),
        (at(8, 35), "the arrays take most of the device"),
        (at(8, 10), "--budget 31.00GiB"),
        (at(8, 10, free=6, largest=6), "(what is not planned): --budget 37.00GiB"),
        (at(8, 10, free=9, largest=6), "(the free bytes are in pieces): --budget 36.00GiB"),
        (at(8, 10, budget=12), "make the batch smaller"),
    ],
)
def test_one_thing_helps_most(shortage, said):
    assert said in shortage


def test_arrays_by_kind_and_each_buffer_once():
    device = jax.devices()[0]
    before = {kind.text: kind for kind in living(device)}
    held = [jnp.ones((33, 65), jnp.bfloat16) + i for i in range(3)]
    same = jax.device_put(held[0], device)
    gone = held[1] + 0
    gone.delete()
    (kind,) = (kind for kind in living(device) if kind.text == "bf16[33,65]")
    assert "bf16[33,65]" not in before and (kind.count, kind.nbytes) == (3, 3 * 33 * 65 * 2)
    assert [k.nbytes for k in living(device)] == sorted((k.nbytes for k in living(device)), reverse=True)
    assert (same == held[0]).all()


def test_what_is_no_lack_of_room_is_not_explained():
    assert told(ValueError("RESOURCE_EXHAUSTED: not of JAX"), (), None) == []
    assert told(jax.errors.JaxRuntimeError("INTERNAL: something else"), (), None) == []


def test_the_error_behind_another_one_is_explained():
    """JAX's own error on this machine, for more than it has, as a library hands it on."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jnp.zeros((1 << 44,), jnp.float32).block_until_ready()
    error = RuntimeError("the library's own words")
    error.__cause__ = caught.value
    first, *_, last = told(error, (), None)
    assert first.startswith("out of memory: cpu:0 had no room for 64.00TiB more; ")
    assert last.startswith("what helps most: one value of 64.00TiB is larger than the device")
