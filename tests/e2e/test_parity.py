"""What programs that a plan really changes share with ``jax.jit``: habits, dtypes, stages, contexts, transformations.

``test_api.py`` asks the same of programs as they are and of programs rewritten by force; here XLA's bytes decide.
"""

import copy
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import threading
import typing
import weakref
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import pallas
from jax.experimental import serialize_executable as executables
from jax.sharding import PartitionSpec

import compiled_once
import jaxtensile
from programs import FAST, alike, chain, chain_args, close, squeezed, step

ARGS = chain_args()
OWN, DEEP = 3.2e-6, 16
"""How far gradients of the 12 layers of ``ARGS`` may be from those of the plain program: elementwise, as far as that
itself is from float64; in ``UNITS``, that is 27 off. Ours is 12 from it on a CPU without AVX-512 (jax 0.12)."""
DEVICE = jax.devices()[0]
PLACE = jax.sharding.SingleDeviceSharding(DEVICE)


def pressed(fun, *args, **options):
    """``fun`` planned so that it is another program, and its ``jax.jit``."""
    options = {"compiler_options": FAST, **options}
    found = squeezed(fun, *args, **options)
    assert found is not None, "no plan changes the program: nothing is tested"
    return found[0], jax.jit(fun, **options)


@pytest.fixture(scope="module")
def both():
    return pressed(step, *ARGS)


def outcome(look):
    try:
        return look()
    except Exception as error:
        return type(error), str(error).splitlines()[0]


HABITS = {
    "name": lambda f: (f.__name__, f.__qualname__, f.__module__, f.__doc__, f.__annotations__),
    "wrapped": lambda f: f.__wrapped__ is step,
    "signature": inspect.signature,
    "type hints": typing.get_type_hints,
    "what inspect says": lambda f: (callable(f), inspect.isfunction(f), inspect.isroutine(f), inspect.ismethod(f)),
    "a leaf": lambda f: jax.tree.structure(f),
    "hash": lambda f: (hash(f) == hash(f), f == f, f in {f}, f == 1),
    "weak references": lambda f: weakref.ref(f)() is f,
    "no such attribute": lambda f: hasattr(f, "no_such_attribute_here"),
    "wrong arguments": lambda f: f(),
    "too many": lambda f: f(*ARGS, 1),
    "wrong name": lambda f: f(*ARGS, z=1),
    "wrong shape": lambda f: f(ARGS[0], jnp.ones((256, 7))),
    "a string": lambda f: f("text", ARGS[1]),
}


@pytest.mark.parametrize("name", HABITS)
def test_it_is_held_like_a_jit(both, name):
    ours, theirs = (outcome(lambda f=f: HABITS[name](f)) for f in both)
    assert ours == theirs


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_copies_are_planned_too(both, how):
    ours, theirs = both
    alike(how(ours)(*ARGS), how(theirs)(*ARGS))
    copied = how(ours)
    assert not copied.plan(*ARGS).unchanged and copied.__wrapped__ is step
    assert how({"step": ours})["step"].plan(*ARGS).budget == ours.plan(*ARGS).budget


def public(stage, *but):
    return sorted(name for name in dir(stage) if not name.startswith("_") and name not in but)


def test_the_stages_have_what_jax_stages_have(both):
    traced = [f.trace(*ARGS) for f in both]
    lowered = [f.lower(*ARGS) for f in both]
    compiled = [x.compile() for x in lowered]
    for (ours, theirs), but in [
        (traced, ("jaxpr", "lower", "lojax")),
        (lowered, ("as_text", "compile", "compiler_ir", "cost_analysis")),
        (compiled, "as_text call cost_analysis memory_analysis runtime_executable executable".split()),
    ]:
        assert public(ours) == public(theirs)
        for name in public(theirs, *but):
            shown = [re.sub(r"0x[0-9a-f]+", "", repr(getattr(stage, name))) for stage in (ours, theirs)]
            assert shown[0] == shown[1], name
    for ours, theirs in (lowered, compiled):
        assert type(ours.as_text()) is type(theirs.as_text())
        assert ours.cost_analysis().keys() >= {"flops"} and theirs.cost_analysis().keys() >= {"flops"}
    assert compiled[0].memory_analysis().temp_size_in_bytes < compiled[1].memory_analysis().temp_size_in_bytes
    alike(compiled[0](*ARGS), compiled[1](*ARGS))


def test_a_planned_executable_is_serialized_and_loaded(both, monkeypatch):
    compiled_once.set_aside(monkeypatch)
    compiled = (f.lower(*ARGS).compile() for f in both)
    ours, theirs = (executables.deserialize_and_load(*executables.serialize(x)) for x in compiled)
    for a, b in zip(ours(*ARGS), theirs(*ARGS), strict=True):
        # Not their types: in jax 0.12 those of loaded executables differ from each other.
        close(a, b)
        assert (a.dtype, a.weak_type, a.sharding, a.committed) == (b.dtype, b.weak_type, b.sharding, b.committed)


def test_a_planned_program_is_exported(both):
    exported, plain = (export.export(f)(*ARGS) for f in both)
    assert "optimization_barrier" in exported.mlir_module()
    alike(exported.call(*ARGS), plain.call(*ARGS))
    if find_spec("flatbuffers"):
        alike(export.deserialize(exported.serialize()).call(*ARGS), plain.call(*ARGS))


# ---- dtypes, trees, options -----------------------------------------------------------------------

NARROW = "int2 int4 uint4 int8 bool float4_e2m1fn float8_e4m3fn float8_e5m2 bfloat16 float16 complex64".split()


def test_narrow_and_wide_dtypes_beside_and_inside():
    dtypes = [jnp.dtype(getattr(jnp, name)) for name in NARROW if hasattr(jnp, name)]

    def fun(weights, x, zs):
        for dtype in dtypes:
            weights = [w + jax.lax.stop_gradient(w.astype(dtype).real.astype(w.dtype) - w) for w in weights]
        new = step(weights, x)
        return new, zs, [new[0].astype(dtype) for dtype in dtypes], [z[:3] for z in zs]

    args = (*ARGS, [jnp.asarray(np.arange(8) % 2, dtype) for dtype in dtypes])
    ours, theirs = pressed(fun, *args)
    alike(ours(*args), theirs(*args))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: list
    count: int = dataclasses.field(metadata={"static": True}, default=0)
    nothing: None = None


def test_dataclasses_none_and_empty_results():
    def fun(state, x, key, none):
        return State(step(state.weights, x), state.count + 1), none, (), {}, jnp.zeros((0, 2)), key, jnp.float32(2) * 1

    args = State(ARGS[0], 3), ARGS[1], jax.random.key(0), None
    ours, theirs = pressed(fun, *args)
    alike(ours(*args), theirs(*args))


@pytest.mark.parametrize(
    "options",
    [
        {"inline": True},
        {"keep_unused": True},
        {"backend": "cpu"},
        {"device": DEVICE},
        {"in_shardings": PLACE},
        {"out_shardings": PLACE},
        {"static_argnames": ("unused",)},
    ],
    ids=lambda o: next(iter(o)),
)
@pytest.mark.filterwarnings("ignore:backend and device argument")
def test_options_of_jit(options):
    def fun(weights, x, *, unused=None):
        return step(weights, x)

    ours, theirs = pressed(fun, *ARGS, **options)
    alike(ours(*ARGS), theirs(*ARGS))


# ---- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.check_tracer_leaks(True),
        lambda: jax.enable_checks(True),
        lambda: jax.debug_nans(True),
        lambda: jax.enable_x64(True),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.default_matmul_precision("highest"),
    ],
)
def test_contexts(context):
    with context():
        args = [jnp.asarray(np.asarray(w, float)) for w in ARGS[0]], jnp.asarray(np.asarray(ARGS[1], float))
        ours, theirs = pressed(lambda weights, x: step(weights, x), *args)
        alike(ours(*args), theirs(*args))


@pytest.fixture(scope="module")
def bare():
    """Planned and called, without compiler options: JAX takes those at the top level alone."""
    ours, report = squeezed(step, *ARGS)
    assert not report.unchanged
    alike(ours(*ARGS), jax.jit(step)(*ARGS))
    return ours


# ---- transformations, threads ---------------------------------------------------------------------

UNDER = {
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0))(ARGS[0], ARGS[1][None]),
    "jvp": lambda f: jax.jvp(f, ARGS, ARGS),
    "linearize": lambda f: jax.linearize(f, *ARGS)[1](*ARGS),
    "vjp": lambda f: jax.vjp(f, *ARGS)[1](f(*ARGS)),
    "scan": lambda f: jax.lax.scan(lambda w, _: (f(w, ARGS[1]), None), ARGS[0], None, length=2)[0],
    "jit": lambda f: jax.jit(f)(*ARGS),
    "checkpoint": lambda f: jax.checkpoint(f)(*ARGS),
    "pmap": lambda f: jax.pmap(f, in_axes=(None, 0))(ARGS[0], ARGS[1][None]),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=jax.make_mesh((1,), ("d",)), in_specs=(PartitionSpec(),) * 2, out_specs=PartitionSpec()
    )(*ARGS),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNDER)
def test_under_transformations_a_planned_function_is_jax_jit(name, bare):
    alike(UNDER[name](bare), UNDER[name](jax.jit(step)))


def test_shard_map_and_pallas_inside():
    def kernel(x, y):
        y[...] = jnp.tanh(x[...])

    @jax.custom_vjp
    def tanh(x):
        return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    tanh.defvjp(lambda x: (tanh(x),) * 2, lambda y, g: (g * (1 - y * y),))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("d")
    halve = jax.shard_map(lambda x: jax.lax.pmean(x, "d") / 2, mesh=mesh, in_specs=rows, out_specs=PartitionSpec())

    def fun(weights, x):
        return jax.grad(lambda w: chain(w, tanh(x @ w[0])) + halve(chain(w, x)[None])[0])(weights)

    ours, theirs = pressed(fun, *ARGS)
    for a, b in zip(ours(*ARGS), theirs(*ARGS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checks", [False, True])
def test_loops_inside_of_shard_map_with_and_without_the_checks_of_jax(checks):
    """A body knows its axes from the ``shard_map`` around it, which whoever looks at the body alone is not told."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec()
    )
    def inside(weights, x):
        def body(carry, w):
            return jax.lax.psum(jnp.tanh(carry @ w), "d") + jnp.zeros_like(carry), None

        return jax.lax.psum(jax.lax.scan(body, x, jnp.stack(weights))[0].sum(), "d")

    def fun(weights, x):
        return jax.value_and_grad(inside)(weights, x)

    with jax.enable_checks(checks):
        ours, theirs = jaxtensile.jit(fun, budget="1GiB"), jax.jit(fun)
        alike(ours(*ARGS), theirs(*ARGS))
        with pytest.raises(jaxtensile.BudgetError, match="smallest"):
            jaxtensile.jit(fun, budget=100).plan(*ARGS)


def test_first_calls_from_many_threads_with_several_shapes(both):
    ours = jaxtensile.jit(step, budget=int(1.1 * both[0].plan(*ARGS).budget), compiler_options=FAST)
    start, found = threading.Barrier(9), {}

    def work(i):
        start.wait()
        found[i] = ours(ARGS[0], jnp.ones((256 + 8 * (i % 3), 8)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(9):  # not all plans of these shapes fuse as the plain programs do
        expected = both[1](ARGS[0], jnp.ones((256 + 8 * (i % 3), 8)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=OWN), found[i], expected)
    assert ours._cache_size() == 3
    assert not any(e.fitted.report.unchanged for entries in ours._entries.values() for e in entries.values())


# ---- effects and references -----------------------------------------------------------------------


def test_effects_of_a_planned_program_happen_once_and_in_order():
    seen = []

    def fun(weights, x):
        def loss(weights, x):
            for i, w in enumerate(weights):
                x = jnp.tanh(x @ w)
                if i % 8 == 0:
                    jax.debug.callback(lambda i=i: seen.append(("debug", i)), ordered=True)
                    like = jax.ShapeDtypeStruct((), jnp.float32)
                    zero = lambda a, i=i: (seen.append(("pure", i)), np.zeros_like(a))[1]  # noqa: E731
                    x = x + jax.pure_callback(zero, like, jax.lax.stop_gradient(x[0, 0]))
                    jax.experimental.io_callback(lambda i=i: seen.append(("io", i)), None, ordered=True)
            return (x * x).sum()

        return jax.grad(loss)(weights, x)

    results = []
    for f in pressed(fun, *ARGS):
        seen.clear()
        out = f(*ARGS)
        jax.effects_barrier()
        # Each kind has an order of its own; jax promises none between kinds.
        results.append((out, [[i for kind, i in seen if kind == k] for k in ("debug", "io")], sorted(seen)))
    alike(results[0][0], results[1][0], partial(close, units=DEEP))
    assert results[0][1:] == results[1][1:]


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="no references")
def test_references_inside_and_outside_a_planned_program():
    def run(jit):
        count = jax.new_ref(jnp.zeros(()))

        def fun(weights, x):
            inner = jax.new_ref(jnp.ones(()))
            new = step(weights, x)
            inner[...] += new[0].sum()
            count[...] += 1
            return new, inner[...]

        f = jit(fun)
        return [f(*ARGS) for _ in range(3)], count[...]

    ours = run(lambda fun: pressed(fun, *ARGS)[0])
    alike(ours, run(lambda fun: jax.jit(fun, compiler_options=FAST)))


# ---- other processes ------------------------------------------------------------------------------

AGAIN = """
import hashlib, jax, logging, jaxtensile
from programs import FAST, chain_args, step
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hit" in event else None)
args = chain_args()
planned = jaxtensile.jit(step, budget={budget}, compiler_options=FAST)
planned(*args)
assert "optimization_barrier" in str(planned.trace(*args).jaxpr)
print(hashlib.sha256(planned.lower(*args).as_text().encode()).hexdigest(), len(hits) > 0)
"""


def test_the_same_plan_in_another_process_is_found_in_the_compilation_cache(both, tmp_path):
    program = AGAIN.format(budget=both[0].plan(*ARGS).budget)
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(p for p in sys.path if p),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    said = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        said.append(run.stdout.split())
    assert said[0][0] == said[1][0], "the program depends on the process"
    assert said[1][1] == "True"
