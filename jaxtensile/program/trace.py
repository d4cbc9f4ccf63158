"""JAX function → flat equations and their Graph.

Calls that mean nothing to XLA (``jit`` without shardings, undifferentiated custom rules, remat) are inlined, and
high-level primitives expanded. Loops and branches stay ops with bodies. A ``jax.checkpoint`` becomes its equations
behind an ``optimization_barrier``, as JAX lowers it.

Invariant: ``graph.ops[i]`` describes ``equations[i]``; value ids are shared by both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxtensile import _compat
from jaxtensile.ir.fuser import H200, Fuser
from jaxtensile.ir.ir import COLLECTIVES, OUTER, Graph, Op, OpId, Value, ValueId, is_fixed
from jaxtensile.program.flops import BY_GROUPS, leaf_flops, spread, sums

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "linear_call": "callee",
}
_SOLVE = "custom_linear_solve"
_FOREIGN = """pure_callback io_callback debug_callback ffi_call pallas_call custom_call custom_partitioning
    call_hi_primitive"""
REFERENCE_BARRIER = "reference_barrier"
"""Graph name of JAX's ``optimization_barrier`` over references."""
_RANDOM = "rng_uniform"
_GATHERS = frozenset({"all_gather", "all_gather_invariant"})
"""Collectives that may run again: all devices run the same program, and nothing is added up. Not in branches and
``while`` loops, where devices may part, nor within a larger program's ``shard_map``."""
_NEVER_CLONED = {
    name: why
    for names, why in (
        (_FOREIGN.split(), "foreign code"),
        ({_RANDOM}, "random state"),
        ({"xla_pmap", "pmap"} | (COLLECTIVES - _GATHERS), "several devices"),
    )
    for name in names
}
"""Primitives whose repetition or move could change meaning, and why."""


@dataclass(frozen=True, slots=True)
class Equation:
    """One flat equation: what to bind, on which values. ``eqn`` None: an inserted barrier, or a ``copy``."""

    eqn: Any
    stack: Any
    operands: tuple[Any, ...]
    """Value ids, or ``Literal`` objects."""
    results: tuple[int, ...]
    callers: tuple[Any, ...] = ()
    """The inlined calls around it, innermost first: the user's line if the equation is JAX's own."""
    copy: str = ""
    """``TO_HOST`` or ``TO_DEVICE``: an inserted copy between memory spaces."""


@dataclass(frozen=True)
class Traced:
    """A traced function: its equations, its Graph, the constants it closes over."""

    graph: Graph
    equations: tuple[Equation, ...]
    consts: dict[int, Any] = field(repr=False)
    outputs: tuple[Any, ...]
    """Value ids or ``Literal`` objects, in the order of the flat outputs."""
    arguments: tuple[int, ...]
    """Value ids of the flat arguments (``graph.inputs`` also lists the constants)."""

    def source(self, op: int) -> str:
        """The user's line of op ``op``."""
        equation = self.equations[op]
        if equation.eqn is None:
            return f"<{equation.copy or 'checkpoint'}>"
        lines = [_compat.source_line(e) for e in (equation.eqn, *equation.callers)]
        return next((line for line in chain(lines, _inside(equation.eqn)) if not line.startswith("<")), lines[0])

    def sources(self) -> tuple[str, ...]:
        """The user's line of each op; equal lines are one string."""
        known: dict[str, str] = {}
        return tuple(known.setdefault(line, line) for line in map(self.source, range(len(self.equations))))


def _inside(eqn: Any) -> Iterator[str]:
    """User lines of an equation's bodies, largest result first."""
    inner = [e for body in _compat.bodies(eqn) for e in body.eqns]
    for e in sorted(inner, key=lambda e: -max((getattr(v.aval, "size", 0) for v in e.outvars), default=0)):
        yield _compat.source_line(e)
        yield from _inside(e)


class _Flattener:
    """Scratch of one ``flatten``: grows the value table and the equations."""

    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.consts: dict[int, Any] = {}
        self.const_ids: dict[int, int] = {}

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def const(self, val: Any, aval: Any) -> int:
        known = self.const_ids.get(id(val))
        if known is None:
            known = self.const_ids[id(val)] = self.new(aval)
            self.consts[known] = val
        return known

    def inline(self, closed: Any, args: list[Any], stack: Any, callers: tuple[Any, ...] = ()) -> list[Any]:
        jaxpr, consts = _compat.open_jaxpr(closed)
        env: dict[Any, Any] = {}
        for var, val in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.const(val, var.aval)
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, _compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            if _is_barrier_of_checkpoint(eqn):
                env.update(zip(eqn.outvars, self.barrier(operands, stack), strict=True))
                continue
            body = _inlinable(eqn)
            if body is not None:
                inner = stack + eqn.source_info.name_stack
                operands = self.remat_barrier(eqn, _handed_on(eqn, operands), stack)
                env.update(zip(eqn.outvars, self.inline(body, operands, inner, (eqn, *callers)), strict=True))
                continue
            results = tuple(self.new(v.aval) for v in eqn.outvars)
            env.update(zip(eqn.outvars, results, strict=True))
            self.equations.append(Equation(eqn, stack, tuple(operands), results, callers))
        return [read(a) for a in jaxpr.outvars]

    def is_array(self, atom: Any) -> bool:
        """Whether ``atom`` is a value, not a literal, that barriers hand on."""
        return isinstance(atom, int) and type(self.avals[atom]) is _compat.ShapedArray

    def remat_barrier(self, eqn: Any, operands: list[Any], stack: Any) -> list[Any]:
        """The barrier that JAX's lowering puts in front of a differentiated ``remat``."""
        if not eqn.params.get("differentiated", False):
            return operands
        prevent = eqn.params.get("prevent_cse", True)
        flags = prevent if isinstance(prevent, tuple) else (prevent,) * len(operands)
        return self.barrier(operands, stack, flags)

    def barrier(self, operands: list[Any], stack: Any, flags: Sequence[bool] | None = None) -> list[Any]:
        """``operands`` behind a barrier over those that ``flags`` selects; literals are not part of it."""
        flags = (True,) * len(operands) if flags is None else flags
        chosen = [i for i, (f, o) in enumerate(zip(flags, operands, strict=True)) if f and self.is_array(o)]
        behind = list(operands)
        if chosen:
            inputs = tuple(operands[i] for i in chosen)
            results = tuple(self.new(self.avals[v]) for v in inputs)
            self.equations.append(Equation(None, stack, inputs, results))
            for i, r in zip(chosen, results, strict=True):
                behind[i] = r
        return behind


def _is_barrier_of_checkpoint(eqn: Any) -> bool:
    """Whether ``eqn`` is the barrier before a checkpoint's recomputation, over arrays alone."""
    plain = eqn.primitive.name == "optimization_barrier" and not _compat.has_effects(eqn)
    return plain and all(type(v.aval) is _compat.ShapedArray for v in eqn.invars) and _compat.is_checkpoint_barrier(eqn)


def _called(eqn: Any) -> Any | None:
    """The closed jaxpr of a call; None for anything else."""
    name, params = eqn.primitive.name, eqn.params
    body = params.get(_CALLS[name]) if name in _CALLS else params["jaxprs"].solve if name == _SOLVE else None
    if body is None and name == "eval_jaxpr":
        body = params.get("jaxpr")  # as on 0.10
    if body is None or hasattr(body, "consts"):
        return body
    return _compat.ClosedJaxpr(body, ())  # an open jaxpr: remat2 on 0.10


def _handed_on(eqn: Any, operands: list[Any]) -> list[Any]:
    """The operands of a call that its body takes: of a linear solve those of the solver, as in JAX's lowering."""
    if eqn.primitive.name != _SOLVE:
        return operands
    lengths = eqn.params["const_lengths"]
    before, count = lengths.matvec + lengths.vecmat, lengths.solve
    return operands[before : before + count] + operands[sum(lengths) :]


def _inlinable(eqn: Any) -> Any | None:
    name, params = eqn.primitive.name, eqn.params
    body = _called(eqn)
    if body is None:
        return None
    if name in ("jit", "pjit"):
        plain = all(_is_unspecified(s) for s in (*params["in_shardings"], *params["out_shardings"]))
        layouts = any(x is not None for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ())))
        if not plain or layouts or params.get("compiler_options_kvs") or _types_say(params.get("ctx_mesh")):
            return None
    return body


def _is_unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


def _types_say(mesh: Any) -> bool:
    """Whether types in a call say how values are divided over ``mesh``, so that it says more than its equations."""
    return mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types


def trace_jaxpr(closed: Any, donated: tuple[bool, ...] = (), *, keep_unused: bool = True) -> Traced:
    """Flatten a closed jaxpr into equations and their Graph, without dead code, which XLA drops too.

    ``keep_unused=False``: unread arguments are no inputs, as in ``jax.jit``.
    """
    with _WITHIN.get()():
        closed = _compat.without_dead_code(_compat.lowered(closed))
    jaxpr, _ = _compat.open_jaxpr(closed)
    flat = _Flattener()
    args = [flat.new(v.aval) for v in jaxpr.invars]
    return _described(flat, args, flat.inline(closed, list(args), _compat.EMPTY_STACK), donated, keep_unused)


def trace_in_turn(first: Any, second: Any, given: Mapping[int, int]) -> tuple[Traced, int]:
    """Two closed jaxprs as one program, and the number of equations of ``first``.

    ``given``: argument of ``second`` → its result in ``first``, or ``~k`` for argument ``k`` of ``first``. Other
    arguments follow those of ``first``. Given results are not results of the program.
    """
    with _WITHIN.get()():
        first, second = (_compat.without_dead_code(_compat.lowered(closed)) for closed in (first, second))
    flat = _Flattener()
    args = [flat.new(v.aval) for v in _compat.open_jaxpr(first)[0].invars]
    made = flat.inline(first, list(args), _compat.EMPTY_STACK)
    count = len(flat.equations)
    others = [
        flat.new(v.aval) if k not in given else made[given[k]] if given[k] >= 0 else args[~given[k]]
        for k, v in enumerate(_compat.open_jaxpr(second)[0].invars)
    ]
    outs = flat.inline(second, list(others), _compat.EMPTY_STACK)
    handed_on = set(given.values())
    args += [v for k, v in enumerate(others) if k not in given]
    outs = [*(v for k, v in enumerate(made) if k not in handed_on), *outs]
    return _described(flat, args, outs, (), keep_unused=True), count


def _described(
    flat: _Flattener, args: Sequence[int], outs: Sequence[Any], donated: tuple[bool, ...], keep_unused: bool
) -> Traced:
    """The flattened equations and their Graph."""
    donated_ids = frozenset(ValueId(a) for a, d in zip(args, donated or (False,) * len(args), strict=True) if d)
    used = {v for e in (*(e.operands for e in flat.equations), outs) for v in e if isinstance(v, int)}
    inputs = tuple(ValueId(v) for v in (*args, *flat.consts) if keep_unused or v in used)
    zeros = {r for e in flat.equations if _is_zero(e) for r in e.results}
    graph = Graph(
        values=tuple(_value(i, aval) for i, aval in enumerate(flat.avals)),
        ops=tuple(_op(i, e, zeros) for i, e in enumerate(flat.equations)),
        inputs=inputs,
        outputs=tuple(ValueId(o) for o in outs if isinstance(o, int)),
        donated=donated_ids,
        output_slots=tuple(ValueId(o) if isinstance(o, int) else None for o in outs),
        fuser=_FUSER.get(),
    )
    return Traced(
        graph=graph,
        equations=tuple(flat.equations),
        consts=flat.consts,
        outputs=tuple(outs),
        arguments=tuple(args),
    )


def why_pinned(traced: Traced, o: int) -> str:
    """Why op ``o`` is never cloned, dropped or moved; empty if it may be."""
    op, eqn = traced.graph.ops[o], traced.equations[o].eqn
    if not is_fixed(op) or eqn is None:
        return ""
    if op.primitive in _NEVER_CLONED:
        return _NEVER_CLONED[op.primitive]
    all_inside = [inner for body in op.bodies for inner in body.ops]
    inside = next((inner.primitive for inner in all_inside if inner.pinned or _gathers(inner)), None)
    if inside is not None:
        return f"{inside} inside"
    return "effects" if _compat.has_effects(eqn) else "values in host memory"


def _value(i: int, aval: Any) -> Value:
    shape = tuple(int(d) for d in getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    name = str(dtype) if dtype is not None else type(aval).__name__
    return Value(id=ValueId(i), nbytes=_nbytes(shape, dtype), shape=shape, dtype=name, space=_space(aval))


def size_of(aval: Any) -> tuple[tuple[int, ...], int]:
    """The shape and the bytes of an array of this type."""
    value = _value(0, aval)
    return value.shape, value.nbytes


def _space(aval: Any) -> str:
    return "host" if "host" in str(getattr(aval, "memory_space", "")).lower() else "device"


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array on the device. Sub-byte types are packed, tokens are 0, extended types (keys) as stored."""
    if dtype is None:
        return 0
    count = math.prod(shape)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        element = _compat.stored_element(dtype)
        return count * _nbytes(element.shape, element.dtype)
    bits = _bits(np.dtype(dtype))
    return (count * bits + 7) // 8


def _bits(dtype: Any) -> int:
    name = dtype.name
    for prefix in ("uint", "int"):
        if name.startswith(prefix) and name[len(prefix) :].isdigit():
            return max(int(name[len(prefix) :]), 1)
    if name.startswith(("float4_", "float6_")):
        return int(name[5])
    return dtype.itemsize * 8


def is_barrier(eqn: Any) -> bool:
    """Whether an equation (None: an inserted one) only hands each operand on as a result.

    With references, JAX's barrier is an effect on them, without results.
    """
    return eqn is None or (eqn.primitive.name == "optimization_barrier" and not _compat.has_effects(eqn))


def _op(i: int, equation: Equation, zeros: set[int]) -> Op:
    operands = tuple(ValueId(v) for v in equation.operands if isinstance(v, int))
    results = tuple(ValueId(v) for v in equation.results)
    slots = tuple(ValueId(v) if isinstance(v, int) else -1 for v in equation.operands)
    if is_barrier(equation.eqn):
        positions = slots if len(slots) > len(operands) else ()  # of a literal the result is a buffer of its own
        return Op(id=OpId(i), primitive="optimization_barrier", operands=operands, results=results, slots=positions)
    eqn = equation.eqn
    name = eqn.primitive.name if eqn.primitive.name != "optimization_barrier" else REFERENCE_BARRIER
    if name == "dot_general" and not sums(eqn.params, eqn.invars[0].aval.shape):
        name = OUTER
    bodies, trips = closed_bodies(eqn)
    inner = tuple(trace_jaxpr(b).graph for b in bodies)
    may_part = name in ("while", "cond", "shard_map")
    return Op(
        id=OpId(i),
        primitive=name,
        operands=operands,
        results=results,
        flops=equation_flops(eqn),
        pinned=_compat.has_effects(eqn)
        or name in _NEVER_CLONED
        or any(o.pinned or (may_part and _gathers(o)) for g in inner for o in g.ops)
        or (bool(bodies) and any(_space(v.aval) == "host" for v in eqn.outvars)),
        bodies=inner,
        trip_count=trips,
        slots=slots if bodies else (),
        carried=_compat.scan_split(eqn.params) if name == "scan" else (0, 0),
        reverse=name == "scan" and bool(eqn.params["reverse"]),
        padded=_padded(eqn) if name != "pad" else _padded_with_zeros(equation, zeros),
        turned=_is_turned(eqn),
        windows_first=name.startswith("scatter") and _has_windows_first(eqn),
        across=_across(eqn),
        groups=spread(eqn.params, [v.aval.shape for v in eqn.invars]) if name in BY_GROUPS else (),
        rereads=_rereads(eqn),
    )


def _gathers(op: Op) -> bool:
    """Whether it gathers from several devices, itself or in a body."""
    return op.primitive in _GATHERS or any(_gathers(inner) for body in op.bodies for inner in body.ops)


def _rereads(eqn: Any) -> float:
    """``Op.rereads``: elements of all windows ÷ elements of the operand."""
    window = eqn.params.get("window_dimensions")
    if not window:
        return 1.0
    gradient = "select_prim" in eqn.params  # of (what flows back to each window, the operand)
    read, windows = (eqn.invars[1], eqn.invars[0]) if gradient else (eqn.invars[0], eqn.outvars[0])
    return max(math.prod(window) * math.prod(windows.aval.shape) / max(math.prod(read.aval.shape), 1), 1.0)


def _padded(eqn: Any) -> int:
    """``Op.padded`` of an equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "select_and_scatter_add":
        aval, pads = eqn.outvars[0].aval, params["padding"]
        before = any(low > 0 for low, _ in pads)  # XLA leaves out what is added behind
        return _nbytes(
            tuple(d + before * (low + high) for d, (low, high) in zip(aval.shape, pads, strict=True)), aval.dtype
        )
    if name != "conv_general_dilated":
        return 0
    aval, (_, _, *spatial) = eqn.invars[0].aval, params["dimension_numbers"].lhs_spec
    pads, dilation = params["padding"], params["lhs_dilation"] or (1,) * len(spatial)
    shape = list(aval.shape)
    if _is_turned(eqn):
        # cuDNN dilates the other way round, by itself, what it pads alike on both sides.
        if any(low != high for low, high in pads):
            for axis, step in zip(spatial, dilation, strict=True):
                shape[axis] = (shape[axis] - 1) * step + 1
        return _nbytes(tuple(shape), aval.dtype)
    if _is_filters_gradient(eqn):
        pads = [_padded_behind(low, high, step) for (low, high), step in zip(pads, params["rhs_dilation"], strict=True)]
    for axis, (low, high), step in zip(spatial, pads, dilation, strict=True):
        # All of it where there is dilation, else what one side has more than the other.
        more = max(low, 0) + max(high, 0) if max(dilation) > 1 else abs(high - low)
        shape[axis] = (shape[axis] - 1) * step + 1 + more
    return _nbytes(tuple(shape), aval.dtype) if tuple(shape) != aval.shape else 0


def _padded_with_zeros(equation: Equation, zeros: set[int]) -> int:
    """``Op.padded`` of a ``pad``."""
    eqn, number = equation.eqn, equation.operands[1]
    zero = number in zeros if isinstance(number, int) else _is_number_zero(number)
    alike = all(low == high >= 0 and not inside for low, high, inside in eqn.params["padding_config"])
    aval = eqn.outvars[0].aval
    return _nbytes(tuple(aval.shape), aval.dtype) if zero and alike else 0


def _is_zero(equation: Equation) -> bool:
    """Whether it makes a zero scalar from a literal."""
    named = equation.eqn is not None and equation.eqn.primitive.name == "convert_element_type"
    return named and not isinstance(equation.operands[0], int) and _is_number_zero(equation.operands[0])


def _is_number_zero(literal: Any) -> bool:
    return np.ndim(literal.val) == 0 and not np.any(literal.val)


def _is_turned(eqn: Any) -> bool:
    """``Op.turned`` of an equation."""
    return _is_filters_gradient(eqn) and max(eqn.params["lhs_dilation"] or (1,)) > 1


def _has_windows_first(eqn: Any) -> bool:
    """``Op.windows_first`` of a scatter."""
    windows, rank = eqn.params["dimension_numbers"].update_window_dims, eqn.invars[2].aval.ndim
    return tuple(windows) != tuple(range(rank - len(windows), rank))


def _is_filters_gradient(eqn: Any) -> bool:
    """Whether it is a convolution over the batch, as in JAX's gradient of a filter."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    batch, feature, *_ = eqn.params["dimension_numbers"].lhs_spec
    return feature < batch


def _across(eqn: Any) -> tuple[tuple[int, ...], ...]:
    """``Op.across``: products as ``xla/service/dot_decomposer.cc`` writes them, matrices by groups one below the other,
    images with channels last."""
    if eqn.primitive.name == "dot_general":
        (summed_a, summed_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
        ranks = [v.aval.ndim for v in eqn.invars]
        batch = tuple(range(len(batch_a)))
        alike = tuple(batch_a) == tuple(batch_b) == batch and len(summed_a) == 1
        if alike and all(rank <= len(batch) + 2 for rank in ranks):
            return ()
        free_a, free_b = (
            tuple(d for d in range(rank) if d not in taken)
            for rank, taken in zip(ranks, ({*summed_a, *batch_a}, {*summed_b, *batch_b}), strict=True)
        )
        orders = (*batch_a, *free_a, *summed_a), (*batch_b, *summed_b, *free_b)
    elif eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        (batch, feature, *spatial), (out, inner, *taps) = numbers.lhs_spec, numbers.rhs_spec
        orders = (batch, *spatial, feature), (*taps, inner, out)
    elif eqn.primitive.name in BY_GROUPS:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, summed), (_, batch) = numbers.dot_dimension_numbers
        before = (*batch, *numbers.rhs_group_dimensions, *summed)
        orders = (), (*before, *(d for d in range(eqn.invars[1].aval.ndim) if d not in before))
    else:
        return ()
    large = ([d for d in order if v.aval.shape[d] > 1] for order, v in zip(orders, eqn.invars[:2], strict=True))
    # What swaps the last two axes a product does by itself (``transpose_folding.cc``).
    swaps = eqn.primitive.name == "dot_general"
    orders = [[*o[:-2], *sorted(o[-2:])] if swaps and sorted(o[-2:]) == sorted(o)[-2:] else o for o in large]
    found = tuple(() if order == sorted(order) else tuple(order) for order in orders)
    return found if any(found) else ()


def _padded_behind(low: int, high: int, stride: int) -> tuple[int, int]:
    """cuDNN's padding for the gradient of a filter: as much behind as before, if the last window's stride allows it
    (``MatchBackwardFilter`` in ``xla/service/gpu/transforms/conv_rewriter.cc``)."""
    return low, min(max(low, high), high + stride - 1)


def closed_bodies(eqn: Any) -> tuple[list[Any], int]:
    """Closed jaxprs inside an equation, and their number of runs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return [params["jaxpr"]], int(params["length"])
    if name == "while":
        return [params["body_jaxpr"]], 1
    if name == "cond":
        return list(params["branches"]), 1
    if name in ("jit", "pjit", "shard_map"):
        body = params["jaxpr"]
        return [body if hasattr(body, "consts") else _compat.ClosedJaxpr(body, ())], 1
    return [], 1


def equation_flops(eqn: Any) -> float:
    """Matrix FLOPs of one equation with its bodies: the dearest branch of a ``cond``, one trip of a ``while``."""
    if flops := leaf_flops(eqn):
        return flops
    bodies, trips = closed_bodies(eqn)
    called = _called(eqn) if not bodies else None
    inner = bodies or ([called] if called is not None else list(jaxprs_in(eqn.params.values())))
    return max(map(jaxpr_flops, inner), default=0.0) * trips


def jaxprs_in(params: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for param in params:
        if hasattr(param, "eqns"):
            yield param
        elif isinstance(param, (tuple, list)):
            yield from jaxprs_in(param)


def jaxpr_flops(jaxpr: Any) -> float:
    """Matrix and convolution FLOPs of a (closed) jaxpr: the figure all benchmarks quote."""
    if hasattr(jaxpr, "consts"):
        jaxpr, _ = _compat.open_jaxpr(_compat.lowered(jaxpr))
    return sum(equation_flops(e) for e in jaxpr.eqns)


def retrace(evaluate: Callable[..., Any], closed: Any) -> Any:
    """The closed jaxpr of ``evaluate`` on the argument types of ``closed``, references included."""
    jaxpr, _ = _compat.open_jaxpr(closed)
    return trace_on(evaluate, [v.aval for v in jaxpr.invars])


T = TypeVar("T")
Context = Callable[[], AbstractContextManager[Any]]
_WITHIN: ContextVar[Context] = ContextVar("within", default=nullcontext)


_FUSER: ContextVar[Fuser] = ContextVar("fuser", default=H200)


def traced_within(context: Context) -> AbstractContextManager[None]:
    """In here programs are traced in ``context``: in a ``shard_map``, say, whose body they are to be."""
    return _during(_WITHIN, context)


def with_rules_of(fuser: Fuser) -> AbstractContextManager[None]:
    """In here lifetimes of programs that are traced are told by the rules of ``fuser``."""
    return _during(_FUSER, fuser)


@contextmanager
def _during(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def trace_on(evaluate: Callable[..., Any], avals: Iterable[Any]) -> Any:
    """The closed jaxpr of ``evaluate`` on these exact types."""
    kinds = [_compat.OfType(aval) for aval in avals]
    with _compat.as_wide_as(kinds), _WITHIN.get()():
        return jax.make_jaxpr(evaluate)(*kinds)


def exchanged(traced: Traced, closed: Any, new: Mapping[int, Callable[[Callable[[Any], Any]], Sequence[Any]]]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with some ops computed differently.

    ``new``: op → its results, from a function that reads any earlier value.
    """

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)

        def read(atom: Any) -> Any:
            return env[atom] if isinstance(atom, int) else atom.val

        for i, equation in enumerate(traced.equations):
            made = new[i](read) if i in new else bind(equation, [read(a) for a in equation.operands])
            env.update(zip(equation.results, made, strict=True))
        return [read(a) for a in traced.outputs]

    return retrace(evaluate, closed)


def bind(equation: Equation, operands: list[Any]) -> list[Any]:
    """Evaluate one flat equation on ``operands`` (tracers or arrays)."""
    if equation.eqn is None:
        return _compat.barrier(operands)
    eqn = equation.eqn
    if is_barrier(eqn):
        with _compat.equation_context(eqn, equation.stack):
            return _compat.barrier(operands)
    with _compat.equation_context(eqn, equation.stack):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def run(traced: Traced, equations: Iterable[int], env: dict[int, Any]) -> None:
    """Evaluate some flat equations of a program, in this order, in ``env``: value → what it is."""
    for i in equations:
        equation = traced.equations[i]
        operands = [env[a] if isinstance(a, int) else a.val for a in equation.operands]
        env.update(zip(equation.results, bind(equation, operands), strict=True))
