"""What differential tests share: budgets that bite, the planned program beside the plain one, results compared.

A planner gets its budget from the model and may be believed at once: XLA's own number only decides whether a
plan is taken, and here every plan is to be run.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from jaxtensile import _compat
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload import loops
from jaxtensile.passes.recompute import segments
from jaxtensile.passes.recompute.lowerbound import lower_bound
from jaxtensile.passes.solvers import greedy
from jaxtensile.planner import trial_compiles
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.search import modelled
from programs import FAST, bits

QUICK = FAST | {"xla_cpu_parallel_codegen_split_count": 1}
"""More of LLVM's part of a compile spared."""
if _compat.JAX_VERSION < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False
ROUNDINGS = 64
"""Units in the last place, of an array's largest value, by which a compiled result may differ."""
SMALL = 1e-4
"""Gradients below it are differences of larger numbers, and have their rounding."""


@contextmanager
def believed():
    """A pipeline that takes the solver's plan whatever XLA allocates for it, and compiles no plain program.

    The solver tries fewer prices: its plans are dearer, and of the same kinds.
    """
    real = trial_compiles.compile_program
    nothing = MemoryUse(argument=0, output=0, temp=0, alias=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_compiles, "compile_program", lambda *args: replace(real(*args), memory=nothing))
        patch.setattr(modelled, "SURELY_OVER", 0.0)
        patch.setattr(modelled, "SURELY_OVER_WITH_LOOPS", 0.0)
        patch.setattr(segments, "_PRICES", 4)
        patch.setattr(loops, "_PRICES", 4)
        patch.setattr(greedy, "_BOUNDARIES", 4)
        yield


class Needs(NamedTuple):
    """What the model says of a program: device bytes, temporaries among them, and what no plan goes below."""

    device: int
    temp: int
    bound: int

    def share(self, share):
        """A budget of this share of the temporaries, where plans may reach it."""
        return max(self.bound, self.device - int((1 - share) * self.temp))


def needs(closed, donated=()):
    traced = trace_jaxpr(closed, donated, keep_unused=False)
    live = live_ranges(traced.graph)
    return Needs(live.device, live.temp, lower_bound(traced.graph, traced.consts, bounded=False).nbytes)


def deleted(args):
    return [x.is_deleted() for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]


def same_bits(ours, theirs, flat):
    """Whether two traced programs compute the same bits of the same flat arguments, one primitive after the other."""
    for a, b in zip(step_by_step(ours, flat), step_by_step(theirs, flat), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def difference(ours, theirs, coarse):
    """The largest difference, in units in the last place of ``coarse`` of each array's largest value; -1.0 where
    all bits agree. An error where anything but the values of floats differs, or one of them without end."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    worst = -1.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b) and jax.typeof(a) == jax.typeof(b)
        if isinstance(a, jax.Array):
            assert (a.sharding, a.committed) == (b.sharding, b.committed)
        if a.dtype == jax.dtypes.float0:
            continue
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(bits(a), bits(b))
        if not a.size or np.array_equal(bits(a), bits(b)):
            continue
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        a, b = np.asarray(a, wide), np.asarray(b, wide)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        apart = np.abs(a - b)[np.isfinite(b)].max(initial=0.0)
        largest = np.abs(b)[np.isfinite(b)].max(initial=SMALL)
        worst = max(worst, float(apart / largest / float(jnp.finfo(coarse).eps)))
    return worst


def agree(ours, theirs, coarse):
    """Whether all bits agree; an error when a value differs by more than rounding of ``coarse`` explains."""
    found = difference(ours, theirs, coarse)
    assert found <= ROUNDINGS, f"values differ by {found:.0f} units in the last place of {coarse}"
    return found < 0


def step_by_step(closed, flat):
    """Results of a program, its loops, branches and calls run in Python: nothing of two primitives is compiled
    together."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *flat), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _one_step(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _one_step(eqn, operands):
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(params, operands)
    if name == "while":
        c, b = params["cond_nconsts"], params["body_nconsts"]
        carry = operands[c + b :]
        while step_by_step(params["cond_jaxpr"], [*operands[:c], *carry])[0]:
            carry = step_by_step(params["body_jaxpr"], [*operands[c : c + b], *carry])
        return carry
    if name == "cond":
        branches = params["branches"]
        return step_by_step(branches[min(max(int(operands[0]), 0), len(branches) - 1)], operands[1:])
    if name == "optimization_barrier":
        return operands
    body = params.get("jaxpr", params.get("call_jaxpr"))
    if body is not None:
        closed = body if hasattr(body, "consts") else jax.extend.core.ClosedJaxpr(body, ())
        return step_by_step(closed, operands)
    with _compat.equation_context(eqn, _compat.EMPTY_STACK):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return out if eqn.primitive.multiple_results else [out]


def _scan(params, operands):
    consts, carries = _compat.scan_split(params)
    fixed, carry, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    xs = [x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x) for x in xs]
    ys = []
    steps = range(params["length"])
    for i in reversed(steps) if params["reverse"] else steps:
        out = step_by_step(params["jaxpr"], [*fixed, *carry, *(x[i] for x in xs)])
        carry = out[:carries]
        ys.append(out[carries:])
    if params["reverse"]:
        ys.reverse()
    jaxpr, _ = _compat.open_jaxpr(params["jaxpr"])
    return [*carry, *(_stacked([y[k] for y in ys], v.aval) for k, v in enumerate(jaxpr.outvars[carries:]))]


def _stacked(slices, aval):
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jnp.stack(slices) if slices else jax.random.split(jax.random.key(0), 0)
    return np.stack([np.asarray(x) for x in slices]) if slices else np.zeros((0, *aval.shape), aval.dtype)


def every(strategy, examples, compare, *, alike=None, number=None):
    """``compare(program, counts)`` on so many programs, always the same; the counts.

    ``alike``: what programs have in common of which one is enough, because hypothesis likes to vary what it made.
    ``number``: other programs.
    """
    seen, known = Counter(), {}

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def each(program):
        if alike is not None:
            assume(known.setdefault(alike(program), program) == program)  # hypothesis runs what fails again
        compare(program, seen)

    (each if number is None else seed(number)(each))()
    return seen


def tell(seen, record_property):
    """Counts for the summary at the end of the run, whichever process runs this test."""
    for name, count in seen.items():
        record_property(f"differential: {name}", count)
