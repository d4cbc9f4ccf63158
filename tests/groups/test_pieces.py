"""A step in groups gives what it gives whole: values, types, structure, what it takes over and what it leaves."""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
import job_programs as programs
from four_devices import on_four_devices
from jaxtensile.groups.grouped import grouped
from jaxtensile.groups.step import leaves
from jaxtensile.spmd.location import profile_of
from jaxtensile.xla.compile import memory_of

workloads = importlib.import_module("benchmarks.workloads")
OPTIONS = {"xla_backend_optimization_level": 0}  # a CPU compiles several times faster
DEVICE = profile_of(jax.devices()[0])


ELSEWHERE = """
import jax, jax.numpy as jnp
from jaxtensile.groups.grouped import grouped
from jaxtensile.spmd.location import profile_of

device = jax.devices()[-1]
assert device != jax.devices()[0]

def fun(x, w):
    y = jnp.sin(w @ w)  # reads nothing that is placed
    z = jnp.sin(y @ w)
    return jnp.tanh(z @ x), z

jitted, args = jax.jit(fun), (jax.device_put(jnp.eye(8), device), jnp.eye(8) / 2)
found = grouped(jitted, args, {}, device=profile_of(device), options={}, count=3, needs=1 << 20, most=1 << 20)
assert found.pieces is not None, found.said
whole, parts = jitted(*args), found.pieces(args)
assert all((a == b).all() for a, b in zip(whole, parts))
assert [x.devices() for x in whole] == [x.devices() for x in parts] == [{device}] * 2
"""


def in_groups(jitted, *args, count=4, factor=2.0, options=None, **kwargs):
    needs = memory_of(jitted.lower(*args, **kwargs).compile()).device
    return grouped(
        jitted, args, kwargs, device=DEVICE, options=options or {}, count=count, needs=needs, most=int(factor * needs)
    )


def both(fun, *args, count=4, **options):
    """The results whole and in groups, each of its own copy of the arguments; and the groups."""
    jitted = jax.jit(fun, **options)
    found = in_groups(jitted, *args, count=count)
    assert found.pieces is not None, found.said
    assert len(found.pieces.pieces) > 1
    whole = jitted(*jax.tree.map(jnp.copy, args))
    mine = jax.tree.map(jnp.copy, args)
    return whole, found.pieces(leaves(jitted, mine, {}), lambda: None), found.pieces, mine


def numbers(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x, np.float64)


def alike(whole, parts, rtol=0.0, atol=0.0):
    assert jax.tree.structure(whole) == jax.tree.structure(parts)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert (a.dtype, a.shape, getattr(a, "weak_type", None)) == (b.dtype, b.shape, getattr(b, "weak_type", None))
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=rtol, atol=atol)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_training_step_is_the_same_bit_for_bit(count):
    """In f32 without multiplications and additions that a kernel contracts, nothing rounds differently."""
    args = programs.start(), programs.X, programs.Y
    whole, parts, pieces, mine = both(programs.step, *args, count=count, donate_argnums=0)
    alike(whole, parts)
    assert len(pieces.pieces) <= count
    assert all(w.is_deleted() for w in mine[0]) and not mine[1].is_deleted()


@pytest.mark.parametrize("name", ["gpt2_small", "lstm"])
def test_real_models(name):
    """bf16 inside: a value that crosses a cut is rounded where a kernel would have kept it in f32."""
    module = workloads.load(name)
    config = module.Config.tiny()
    args = module.init_args(config, jax.random.key(0))
    jitted = jax.jit(module.step(config), donate_argnums=0, compiler_options=OPTIONS)
    found = in_groups(jitted, *args, options=OPTIONS, count=3)
    assert found.pieces is not None and len(found.pieces.pieces) > 1
    whole = jitted(*jax.tree.map(jnp.copy, args))
    parts = found.pieces(leaves(jitted, args, {}))
    close = []
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        close.append(np.isclose(numbers(a), numbers(b), rtol=2e-2, atol=2e-3).ravel())
    assert np.concatenate(close).mean() > 0.99
    np.testing.assert_allclose(np.float64(whole[1]), np.float64(parts[1]), rtol=2e-3)


def test_loops_branches_keys_and_dtypes():
    def fun(state, x):
        key, other = jax.random.split(state["key"])
        x = x + jax.random.normal(key, x.shape)
        x, ys = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, state["w"])
        x = jax.lax.cond(ys[0] > 0, lambda v: v * 2, lambda v: v - 1, x)
        mask = jnp.tril(jnp.ones(x.shape, bool))
        x = jnp.where(mask, x.astype(jnp.bfloat16), jnp.bfloat16(0)) @ x.astype(jnp.bfloat16)
        return {"key": other, "w": state["w"] + x.astype(jnp.float32).mean()}, jnp.argmax(x, -1), ys

    state = {"key": jax.random.key(3), "w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 16)), jnp.float32)}
    whole, parts, _, mine = both(fun, state, jnp.ones((16, 16)), donate_argnums=0)
    alike(whole, parts, rtol=1e-6)
    assert mine[0]["w"].is_deleted()


def test_of_what_the_caller_gives_as_much_is_taken_as_whole():
    """A result is written over one argument of its type; the others stay the caller's."""

    def fun(a, b, c):
        for _ in range(4):
            a = jnp.sin(a @ b) + c
        return a

    jitted = jax.jit(fun, donate_argnums=(0, 1, 2))
    args = [jnp.eye(8) + k for k in range(3)]
    with warnings.catch_warnings(action="ignore"):  # that not all donated buffers are used
        found = in_groups(jitted, *args, count=2)
        whole, mine = ([jnp.copy(x) for x in args] for _ in range(2))
        alike(jitted(*whole), found.pieces(leaves(jitted, mine, {}), lambda: None))
    assert [x.is_deleted() for x in mine] == [x.is_deleted() for x in whole]
    assert sum(x.is_deleted() for x in mine) == 1


def test_results_that_repeat_hand_on_or_are_constants():
    def fun(x, n, unread):
        y = jnp.sin(x @ x)
        z = jnp.cos(y @ x)
        return y, y, x, 2.0, n, {"z": z, "again": z}, jnp.zeros(3)

    args = jnp.eye(8), 3, jnp.ones(2)
    jitted = jax.jit(fun)
    found = in_groups(jitted, *args, count=2)
    assert found.pieces is not None
    whole, parts = jitted(*args), found.pieces(leaves(jitted, args, {}))
    alike(whole, parts)
    pointers = [x.unsafe_buffer_pointer() for x in (*parts[:3], *parts[5].values(), args[0])]
    assert len({*pointers}) == len(pointers)  # each a buffer of its own: a caller may donate one of them


def test_static_and_named_arguments():
    def fun(x, power, *, scale, flip=False):
        y = jnp.tanh(x @ x) * scale["by"]
        for _ in range(power):
            y = jnp.sin(y @ x)
        return -y if flip else y

    jitted = jax.jit(fun, static_argnums=1, static_argnames="flip")
    x, scale = jnp.eye(8) / 2, {"by": np.float32(3)}
    found = in_groups(jitted, x, 3, count=3, scale=scale, flip=True)
    assert found.pieces is not None and len(found.pieces.pieces) == 3
    alike(jitted(x, 3, scale=scale, flip=True), found.pieces(leaves(jitted, (x, 3), {"scale": scale, "flip": True})))


def test_constants_are_on_the_device_once():
    large = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    small = jnp.arange(8.0)

    def fun(x):
        y = jnp.tanh(x @ large)  # 2 MiB
        y = jnp.tanh(y @ large.T)
        return (y @ large).sum() * small

    x = jnp.ones((64, 512))
    jitted = jax.jit(fun)
    found = in_groups(jitted, x, count=3, factor=9.0)
    assert found.pieces is not None
    alike(jitted(x), found.pieces((x,)), rtol=1e-5)
    takes = [piece.constants for piece in found.pieces.pieces]
    assert sum(takes) >= 2 * large.nbytes and all(t % large.nbytes == 0 for t in takes)
    assert all(piece.device < large.nbytes for piece in found.pieces.pieces)  # which XLA does not count either


def test_64_bits_inside_of_a_step_of_32():
    def fun(x):
        with jax.enable_x64(True):
            y = jnp.cumsum(x.astype(jnp.float64) @ x.astype(jnp.float64), 0)
            z = jnp.sin(y @ y) / 3
            return z.astype(jnp.float32)

    x = jnp.eye(16, dtype=jnp.float32) / 3
    whole, parts, _, _ = both(fun, x, count=3)
    alike(whole, parts, rtol=1e-6)


def test_a_planned_step_is_cut_as_it_is_planned():
    """Recomputation and its barriers stay: the plan's program is cut, not the user's."""
    args = programs.start(), programs.X, programs.Y
    plain = memory_of(jax.jit(programs.step).lower(*args).compile()).device
    step = jaxtensile.jit(programs.step, budget=int(0.8 * plain))
    report = step.plan(*args)
    assert not report.unchanged
    fitted = step._entry_of(step._trace_plain(args, {}), args, {}).fitted
    found = grouped(
        fitted.jitted, args, {}, device=DEVICE, options=fitted.options, count=4,
        needs=report.compiled.device, most=plain,
    )  # fmt: skip
    assert found.pieces is not None, found.said
    assert found.pieces.device <= plain
    alike(fitted.jitted(*args), found.pieces(leaves(fitted.jitted, args, {})), rtol=1e-6)


def test_unordered_effects_happen_once():
    seen = []

    def fun(x):
        y = jnp.sin(x @ x)
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.cos(y @ x)

    x = jnp.eye(8)
    jitted = jax.jit(fun)
    found = in_groups(jitted, x, count=2)
    assert found.pieces is not None
    found.pieces((x,), lambda: None)
    jax.effects_barrier()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("why", "fun"),
    [
        ("its effects keep their order", lambda x: (jax.debug.print("{}", x[0, 0], ordered=True), jnp.sin(x @ x))[1]),
        ("its effects keep their order", lambda x: jax.new_ref(x)[...] @ x),
        ("1 operations", lambda x: x @ x),
    ],
)
def test_what_cannot_be_cut_says_why(why, fun):
    found = in_groups(jax.jit(fun), jnp.eye(4))
    assert found.pieces is None
    assert why in found.said and "not in 4 groups" in found.said


def test_groups_never_take_more_than_they_may():
    args = programs.start(), programs.X, programs.Y
    jitted = jax.jit(programs.step, donate_argnums=0)
    needs = memory_of(jitted.lower(*args).compile()).device
    for factor in (1.0, 1.1):
        found = in_groups(jitted, *args, count=8, factor=factor)
        if found.pieces is not None:
            assert found.pieces.device <= factor * needs
        else:
            assert "may take" in found.said


def test_each_group_is_compiled_once():
    """What was measured is what runs."""
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
    )
    args = programs.start(), programs.X, programs.Y
    jitted = jax.jit(programs.step, donate_argnums=0)
    found = in_groups(jitted, *args)
    assert found.pieces is not None
    copies = [leaves(jitted, jax.tree.map(jnp.copy, args), {}) for _ in range(2)]
    compiles.clear()
    for given in copies:
        found.pieces(given)
    assert not compiles
    device = jax.devices()[0]
    placed = jax.device_put(args, device)
    found = in_groups(jitted, *placed)
    assert found.pieces is not None
    compiles.clear()
    found.pieces(leaves(jitted, jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), args), {}))
    assert not compiles


def test_what_is_not_placed_runs_where_the_arguments_are(tmp_path):
    """As in one executable: a group that reads nothing placed is on no other device than the rest."""
    done = on_four_devices(ELSEWHERE, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
