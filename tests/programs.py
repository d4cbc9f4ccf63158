"""What the tests of the edge share: comparing two calls, programs rewritten by force, budgets that bite."""

from dataclasses import replace

import jax
import numpy as np

import jaxtensile
from jaxtensile.ir.ir import OpId, ValueId
from jaxtensile.ir.plan import Program
from jaxtensile.planner import pipeline
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.xla.compile import compile_program

FAST = {"xla_backend_optimization_level": 0}
"""LLVM's part of a CPU compile is most of it, and no part of what is tested."""


UNITS = 8
"""Units in the last place of an array's largest value by which floats may differ: XLA's products and fusions round in
another order on some CPUs (jax 0.12 on an AMD EPYC), where on others the same programs agree to the bit."""


def same(ours, theirs):
    """Equal to the bit: structure, dtypes, weak types, placement, values."""
    alike(ours, theirs, lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)))


def alike(ours, theirs, compare=None):
    """Equal but for rounding: structure, dtypes, weak types, placement; values as ``close`` says."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b)
        assert jax.typeof(a) == jax.typeof(b)
        assert (a.sharding, a.committed) == (b.sharding, b.committed)
        (compare or close)(a, b)


def close(ours, theirs, units=UNITS):
    """Floats within ``units`` of the largest, NaNs and infinities in the same places; anything else to the bit."""
    if not jax.numpy.issubdtype(ours.dtype, jax.numpy.inexact):
        np.testing.assert_array_equal(bits(ours), bits(theirs))
        return
    wide = np.complex128 if jax.numpy.issubdtype(ours.dtype, jax.numpy.complexfloating) else np.float64
    a, b = (np.asarray(x).astype(wide) for x in (ours, theirs))
    largest = np.max(np.abs(b), where=np.isfinite(b), initial=0.0)
    np.testing.assert_allclose(a, b, rtol=0, atol=units * float(jax.numpy.finfo(ours.dtype).eps) * largest)


def bits(x):
    """The array's bytes as integers (NaNs and signed zeros count), a key's data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        return x
    return x.view(np.uint8) if x.ndim else x.reshape(1).view(np.uint8)


def doubled(graph):
    """Every op twice: the second time behind one barrier over all that the first time read.

    Outputs come from the second run. What must not run twice runs once, and what only such ops
    read (references) passes no barrier.
    """
    values, version_of = list(graph.values), list(range(len(graph.values)))
    ops, origin = list(graph.ops), list(range(len(graph.ops)))
    now = {}

    def version(v):
        values.append(replace(graph.values[v], id=ValueId(len(values))))
        version_of.append(v)
        return ValueId(len(values) - 1)

    def put(op, operands, results, came_from):
        ops.append(replace(op, id=OpId(len(ops)), operands=tuple(operands), results=tuple(results)))
        origin.append(came_from)

    once = {r for op in graph.ops if op.pinned for r in op.results}
    again = {v for op in graph.ops if not op.pinned for v in op.operands}
    read = [v for v in (*graph.inputs, *sorted(once)) if v in again]
    if read:
        fresh = [version(v) for v in read]
        put(replace(graph.ops[0], primitive="optimization_barrier"), read, fresh, -1)
        now.update(zip(read, fresh, strict=True))
    for op in graph.ops:
        if not op.pinned:
            fresh = [version(r) for r in op.results]
            put(op, [now.get(v, v) for v in op.operands], fresh, op.id)
            now.update(zip(op.results, fresh, strict=True))
    outputs = tuple(ValueId(now.get(v, v)) for v in graph.outputs)
    made = replace(graph, values=tuple(values), ops=tuple(ops), outputs=outputs)
    return Program(made, tuple(origin), tuple(version_of))


def fit_by_force(job, **_):
    """``pipeline.fit`` of a planner that rewrites whatever it gets."""
    kept = pipeline.fit.__wrapped__(job) if hasattr(pipeline.fit, "__wrapped__") else _fit(job)
    traced = trace_jaxpr(job.jaxpr, job.donated, keep_unused=job.keep_unused)
    evaluate = emit(traced, doubled(traced.graph))
    made = compile_program(lambda o: job.make(evaluate, o), job.args, job.kwargs, job.options)
    return replace(kept, jitted=made.jitted, evaluate=evaluate, options=made.options)


_fit = pipeline.fit

SHARES = (0.8, 0.7, 0.9, 0.6)


def squeezed(fun, *args, shares=SHARES, **options):
    """``jaxtensile.jit(fun)`` under the first budget of a ladder that has a plan, and its report.

    A share is of the plain program's temporary bytes, above its arguments and outputs. None when
    no share has a plan that changes the program.
    """
    plain = jaxtensile.jit(fun, budget="1TiB", **options).plan(*args).compiled
    for share in shares:
        budget = int(plain.device - (1 - share) * plain.temp)
        planned = jaxtensile.jit(fun, budget=budget, **options)
        try:
            report = planned.plan(*args)
        except jaxtensile.BudgetError:
            continue
        if not report.unchanged:
            return planned, report
    return None


def chain(weights, x):
    """A loss that leaves one residual per layer."""
    for w in weights:
        x = jax.numpy.tanh(x @ w)
    return (x * x).sum()


def step(weights, x):
    """One step of gradient descent on ``chain``."""
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(chain)(weights, x))


def descent(loss):
    """A step of gradient descent on ``loss(weights, ...)``, and its value."""

    def step(weights, *args):
        value, grads = jax.value_and_grad(loss)(weights, *args)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step


def chain_args(layers=12, width=8, rows=256):
    """Arguments of ``chain`` and ``step`` that a budget changes on every supported jax."""
    return [jax.numpy.eye(width) / 2] * layers, jax.numpy.ones((rows, width))
