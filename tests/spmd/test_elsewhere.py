"""A program that names a mesh of other devices, or of none, is planned for a target's devices as if it named those."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtensile
from jaxtensile import _compat
from jaxtensile.spmd.elsewhere import carried, in_force
from jaxtensile.units import MIB
from jaxtensile.xla.target import resolve_all

TARGET, HERE, COUNT, LAYERS = "tpu-v5e", "tpu-v6e", 4, 3
WAYS = ("plain", "constraint", "in force", "manual", "scan", "checkpoint", "inner jit", "options", "explicit")


def meshes(kind=AxisType.Auto):
    """The target's own, one of other devices in another order, and one without devices."""
    there, here = (np.array(resolve_all(name, COUNT)) for name in (TARGET, HERE))
    return (
        Mesh(there, ("d",), axis_types=(kind,)),
        Mesh(here, ("d",), axis_types=(kind,)),
        AbstractMesh((COUNT,), ("d",), axis_types=(kind,)),
    )


def program(mesh, way):
    """A step that says how it is divided in one of the ways, its options, and arguments."""
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))

    def layer(h, w):
        h = jnp.tanh(h @ w)
        if way in ("plain", "explicit"):
            return h
        if way == "manual":
            return jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(h)
        return jax.lax.with_sharding_constraint(h, P("d") if way == "in force" else rows)

    each = {"checkpoint": jax.checkpoint(layer), "inner jit": jax.jit(layer, out_shardings=rows)}.get(way, layer)

    def loss(weights, h):
        if way == "scan":
            h, _ = jax.lax.scan(lambda h, w: (each(h, w), None), h, weights)
        else:
            for k in range(LAYERS):
                h = each(h, weights[k])
        return (h * h).mean()

    def step(weights, x, rate):
        value, slopes = jax.value_and_grad(loss)(weights, x)
        return weights - rate * slopes, {"loss": value, "nothing": None}

    options = {"donate_argnums": 0, "static_argnums": 2}
    if way == "options":
        options |= {"in_shardings": (whole, rows), "out_shardings": (whole, {"loss": whole, "nothing": None})}
    at = (None, None) if way == "options" else (whole, rows)
    return step, options, (shape(LAYERS, 64, 64, at=at[0]), shape(COUNT * 256, 64, at=at[1]), 0.5)


def shape(*sizes, at=None):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=at)


def given(mesh, way):
    """What puts the mesh in force."""
    if way not in ("in force", "explicit"):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)


def lowered(mesh, way, target):
    step, options, args = program(mesh, way)
    with given(mesh, way):
        plain = jax.jit(step, **options)
        found = carried(target, lambda: plain.trace(*args), plain, step, options, args, {})
        with in_force(target):
            return jax.jit(found.fun, **found.options).lower(*found.args).as_text()


def divisions(text):
    """What a module says of devices, without the numbers of its values, each once: functions may be there twice."""
    lines = (re.sub(r"%\w+(#\d+)?|@\w+", "%", line).strip() for line in text.splitlines())
    return sorted({line for line in lines if "sharding" in line or "sdy.mesh" in line})


@pytest.mark.tpu_aot
@pytest.mark.parametrize("way", WAYS)
def test_it_is_divided_as_over_the_targets_own_mesh(way):
    there, *others = meshes(AxisType.Explicit if way == "explicit" else AxisType.Auto)
    step, options, args = program(there, way)
    with given(there, way):
        wanted = divisions(jax.jit(step, **options).lower(*args).as_text())
    assert len(wanted) > 1
    for mesh in (there, *others):
        assert divisions(lowered(mesh, way, TARGET)) == wanted


@pytest.mark.tpu_aot
@pytest.mark.parametrize("way", ["manual", "in force", "options"])
def test_it_is_planned_and_compiled(way):
    reports = []
    for mesh, target in zip(meshes(), (None, TARGET, f"{TARGET}:2x2"), strict=True):
        step, options, args = program(mesh, way)
        with given(mesh, way):
            planned = jaxtensile.jit(step, budget=MIB, target=target, **options)
            reports.append(planned.plan(*args))
            assert planned.lower(*args).compile().memory_analysis().temp_size_in_bytes == reports[-1].compiled.temp
            exact = jaxtensile.estimate(step, *args, target=target, exact=True, **options)
            assert exact.use == reports[-1].baseline == reports[0].baseline
    assert len({r.compiled for r in reports}) == 1


def test_a_mesh_without_devices_is_estimated_for_a_target_that_needs_no_compiler():
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    step, options, args = program(mesh, "constraint")
    found = jaxtensile.estimate(step, *args, target="nvidia-h200:8", **options)
    assert found.use.argument == LAYERS * 64 * 64 * 4 + COUNT * 256 * 64 * 4 // 8
    assert "sharded over 8 devices; bytes are per device" in str(found) and "ratio" not in str(found)
    with pytest.raises(jaxtensile.TargetError, match=r"mesh without devices.* give a target="):
        jaxtensile.estimate(step, *args, **options)


def test_without_devices_named_nothing_is_traced():
    def never(*_):
        raise AssertionError

    found = carried("cpu", never, jax.jit(never), never, {}, (shape(4),), {})
    assert found.fun is never and found.args[0].sharding.device_set == {*resolve_all("cpu", 1)}
    assert _compat.mesh_in_force() is None
