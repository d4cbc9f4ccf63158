"""Run a region of a program part by part: the batch as a loop inside the step.

Intermediates shrink accordingly; the multiplications stay the same. Rows that others read are recomputed afterwards
instead of stacked if that costs little beside the region.

Invariant: the same operations on the same elements make every element. Totals over rows are totals of the parts'
totals, added in float32 if they have fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.devices.backends import Backend
from jaxtensile.ir.ir import Graph, producers
from jaxtensile.program.trace import Equation, Traced, bind, retrace, trace_on
from jaxtensile.rewrites.rows.loop_rows import Branches, Loop
from jaxtensile.rewrites.rows.made_after import handed_on
from jaxtensile.rewrites.rows.region import Region
from jaxtensile.rewrites.rows.rows import SAME, Passing, Row, Section

_JOIN: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "max": lax.max,
    "min": lax.min,
    SAME: lambda _, made: made,
}


_ANY = Backend(name="", in_jax="")


def in_chunks(traced: Traced, closed: Any, own: Region, parts: int, *, backend: Backend = _ANY) -> Any | None:
    """The closed jaxpr of ``traced`` (of ``closed``) with the region in a loop of ``parts`` parts of its rows.

    None if an op with effects would have to wait for the loop. ``parts`` divides the number of rows.
    """
    order = _order(traced.graph, own)
    if order is None:
        return None
    first = {v for o in order[: order.index(-1)] for v in traced.graph.ops[o].results}
    kept, again = handed_on(traced.graph, own, first.union(traced.arguments, traced.consts))

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)

        def read(atom: Any) -> Any:
            return env[own.root(atom)] if isinstance(atom, int) else atom.val

        for o in order:
            if o < 0:
                env.update(_loop(traced, own, kept, read, parts, backend))
            for i in again if o < 0 else [o]:
                equation = traced.equations[i]
                env.update(zip(equation.results, bind(equation, [read(a) for a in equation.operands]), strict=True))
        return [read(a) for a in traced.outputs]

    return retrace(evaluate, closed)


def _order(graph: Graph, own: Region) -> list[int] | None:
    """The other ops and the loop (-1), which starts as early as possible; ops that wait for it follow at once."""
    reads = {own.root(v) for v in (*(a for a, _ in own.sliced), *own.whole)}
    missing = {v for op in graph.ops for v in op.results} & reads
    late: set[int] = {v for o in own.members for v in graph.ops[o].results if v not in own.same}
    first, order, waiting, done = min(own.members), list[int](), list[int](), False
    for op in graph.ops:
        if not done and op.id >= first and not missing:
            order += [-1, *waiting]
            late, done = set(), True
        if op.id in own.members:
            continue
        if not done and any(own.root(v) in late for v in op.operands):
            if op.pinned:
                return None
            waiting.append(op.id)
            late.update(op.results)
        else:
            order.append(op.id)
            missing.difference_update(op.results)
    if not done:
        order += [-1, *waiting]
    return order


def _loop(
    traced: Traced,
    own: Region,
    leaving: Mapping[int, Row | str],
    read: Callable[[Any], Any],
    parts: int,
    backend: Backend,
) -> Iterator[tuple[int, Any]]:
    """Run the region part by part; yields the values of ``leaving``, rows or totals."""
    n = own.seed.rows // parts

    def part(i: Any) -> dict[int, Any]:
        # What else it reads is made of these, in the kernels that read it.
        known = {own.root(v): read(v) for v in (*own.whole, *(v for v, _ in own.sliced))}
        made = _Part(traced, own, _Reader(traced, own, known), i, n, backend)
        made.make()
        return {v: made.rows[v] for v in leaving}

    shapes = jax.eval_shape(part, jax.ShapeDtypeStruct((), np.uint32))
    values = traced.graph.values
    totals_or_inner = {v for v, how in leaving.items() if isinstance(how, str) or how.dim > 0}
    carried = [v for v in leaving if v in totals_or_inner]
    stacked = [v for v in leaving if v not in totals_or_inner]

    types = {r: x.aval for e in traced.equations if e.eqn for r, x in zip(e.results, e.eqn.outvars, strict=True)}

    def start(v: int) -> Any:
        how, made = leaving[v], shapes[v]
        if isinstance(how, Row):
            zero = lax.full(values[v].shape, 0, made.dtype)
        else:
            wide = how == "add" and _is_short(made.dtype)
            zero = lax.full(made.shape, _identity(how, made.dtype), np.float32 if wide else made.dtype)
        return _compat.varying_as(zero, types[v]) if v in types else zero

    def step(totals: Any, i: Any) -> Any:
        made = part(i)
        new: list[Any] = []
        for v, before in zip(carried, totals, strict=True):
            how = leaving[v]
            if isinstance(how, Row):
                new.append(lax.dynamic_update_slice_in_dim(before, made[v], i * n * how.block, how.dim))
            else:
                new.append(_JOIN[how](before, lax.convert_element_type(made[v], before.dtype)))
        return new, [made[v] for v in stacked]

    totals, parts_of = lax.scan(step, [start(v) for v in carried], np.arange(parts, dtype=np.uint32))
    for v, x in zip(carried, totals, strict=True):
        yield v, lax.convert_element_type(x, jnp.dtype(values[v].dtype))
    for v, x in zip(stacked, parts_of, strict=True):
        yield v, lax.reshape(x, values[v].shape)


class _Part:
    """Part ``i`` of a section: ``n`` rows of its results."""

    def __init__(
        self,
        traced: Traced,
        own: Section,
        read: Callable[[Any], Any],
        i: Any,
        n: int,
        backend: Backend,
        wide: bool = True,
    ) -> None:
        self.traced, self.own, self.read, self.i, self.n = traced, own, read, i, n
        self.backend, self.wide = backend, wide
        """``read``: gives any whole value. ``wide``: totals of fewer bits are made with 32."""
        self.rows: dict[int, Any] = {}
        """Rows, and totals of rows, made by members."""
        self.outer: dict[tuple[int, Row], Any] = {}
        """Rows of other values."""

    def get(self, atom: Any, need: Row | None) -> Any:
        """The rows of a value, or all of it."""
        if isinstance(atom, int) and atom in self.rows:
            return self.rows[atom]
        if need is None or not isinstance(atom, int):
            return self.read(atom)
        if (atom, need) not in self.outer:
            size = self.n * need.block
            self.outer[atom, need] = lax.dynamic_slice_in_dim(self.read(atom), self.i * size, size, need.dim)
        return self.outer[atom, need]

    def make(self) -> None:
        """Make all rows, in program order."""
        pulled = _by_op(self.own)
        for o in sorted({*self.own.members, *pulled}):
            for row, how in pulled.get(o, ()):
                self.outer[self.traced.equations[o].results[0], row] = self._made(o, how, row)[0]
            if o in self.own.members:
                how = self.own.members[o]
                equation = self.traced.equations[o]
                if self.traced.graph.ops[o].primitive == "optimization_barrier":
                    read = [*zip(equation.operands, how.needs, strict=True)]
                    there = [k for k, (a, need) in enumerate(read) if need is not None or a in self.rows]
                    made = _compat.barrier(self.get(*read[k]) for k in there)
                    self.rows.update((equation.results[k], x) for k, x in zip(there, made, strict=True))
                else:
                    self.rows.update(zip(equation.results, self._made(o, how), strict=True))

    def _made(self, o: int, how: Passing, row: Row | None = None) -> list[Any]:
        """The rows that op ``o`` makes; ``row``: where they are, for results that depend on their numbers."""
        equation = self.traced.equations[o]
        operands = [*map(self.get, equation.operands, how.needs)]
        if how.numbered is not None and row is not None:
            size = self.n * row.block
            with _compat.equation_context(equation.eqn, equation.stack):
                return [how.numbered(operands, self.i * size, size)]
        if isinstance(how.inside, Loop):
            with _compat.equation_context(equation.eqn, equation.stack):
                return self._scanned(equation.eqn.params, how.inside, operands)
        if isinstance(how.inside, Branches):
            return self._branched(equation, how.inside, operands)
        return _bound(equation, how, operands, self.n, self.backend, self.wide)

    def _scanned(self, params: dict[str, Any], own: Loop, operands: list[Any]) -> list[Any]:
        """A scan whose body makes some rows."""
        consts, carries = _compat.scan_split(params)

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self._inside(own, [*operands[:consts], *carry, *slices], self.i)
            return out[:carries], out[carries:]

        last, stacks = lax.scan(
            step,
            operands[consts : consts + carries],
            operands[consts + carries :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params.get("unroll", 1),
        )
        return [*last, *stacks]

    def _branched(self, equation: Equation, own: Branches, operands: list[Any]) -> list[Any]:
        """Branches that make some rows; their platforms stay."""
        which, *given = operands
        avals = [jax.typeof(x) for x in (self.i, *given)]
        made = tuple(trace_on(lambda i, *args, b=branch: self._inside(b, args, i), avals) for branch in own.each)
        eqn = equation.eqn.replace(params={**equation.eqn.params, "branches": made})
        return bind(replace(equation, eqn=eqn), [which, self.i, *given])

    def _inside(self, own: Loop, args: Sequence[Any], i: Any) -> list[Any]:
        """The results of a body for some rows."""
        body = own.body
        known = {v: (x, takes) for v, x, takes in zip(body.arguments, args, own.takes, strict=True)}
        whole = {**body.consts, **{v: x for v, (x, takes) in known.items() if takes is None}}
        part = _Part(body, own, _Reader(body, own, whole), i, self.n, self.backend, wide=False)
        part.rows.update((v, x) for v, (x, takes) in known.items() if takes is not None)
        part.make()
        return [part.get(a, g if isinstance(g, Row) else None) for a, g in zip(body.outputs, own.gives, strict=True)]


class _Reader:
    """Reads whole values, and makes unknown ones when first read.

    A class, because a function that calls itself would keep tracers until the next garbage collection, which
    ``jax.checking_leaks`` takes for a leak.
    """

    def __init__(self, body: Traced, own: Section, known: dict[int, Any]) -> None:
        self.body, self.own, self.known = body, own, known
        self.made = producers(body.graph)

    def __call__(self, atom: Any) -> Any:
        if not isinstance(atom, int):
            return jnp.asarray(atom.val, atom.aval.dtype)
        v = self.own.root(atom)
        if v not in self.known:
            equation = self.body.equations[self.made[v]]
            made = bind(equation, [self(a) for a in equation.operands])
            self.known.update(zip(equation.results, made, strict=True))
        return self.known[v]


def _by_op(own: Section) -> dict[int, list[tuple[Row, Passing]]]:
    found: dict[int, list[tuple[Row, Passing]]] = {}
    for (_, row), (o, how) in own.pulled.items():
        found.setdefault(o, []).append((row, how))
    return found


def _identity(how: str, dtype: Any) -> Any:
    if how in ("add", SAME):
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if how == "max" else np.inf
    if dtype == np.bool_:
        return how == "min"
    return jnp.iinfo(dtype).min if how == "max" else jnp.iinfo(dtype).max


def _is_short(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _bound(equation: Equation, how: Passing, operands: list[Any], n: int, backend: Backend, wide: bool) -> list[Any]:
    """Run the equation on some rows; ``wide``: totals of fewer than 32 bits in float32."""
    eqn = equation.eqn
    params = {**eqn.params, **how.params(n)}
    adds = how.gives == ("add",) and "update_jaxpr" not in params  # a scatter's says of which type it is
    if wide and adds and _is_short(eqn.outvars[0].aval.dtype):
        if "preferred_element_type" in params:
            params["preferred_element_type"] = np.dtype(np.float32)
        if "preferred_element_type" not in params or not backend.widens_sums:
            operands = [lax.convert_element_type(x, np.float32) for x in operands]
    with _compat.equation_context(eqn, equation.stack):
        if backend.loops_channels_last and eqn.primitive.name == "conv_general_dilated":
            return [_channels_last(replace(equation, eqn=eqn.replace(params=params)), operands)]
        return bind(replace(equation, eqn=eqn.replace(params=params)), operands)


def _channels_last(equation: Equation, operands: Sequence[Any]) -> Any:
    """The convolution of NHWC by HWIO to NHWC, in any number of spatial dimensions, with what must be transposed."""
    params = equation.eqn.params
    left, right, out = params["dimension_numbers"]
    n = len(left)
    space = range(1, n - 1)
    last = lax.ConvDimensionNumbers((0, n - 1, *space), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *space))
    turned = equation.eqn.replace(params={**params, "dimension_numbers": last})
    x, kernel = operands
    operands = [
        lax.transpose(x, (left[0], *left[2:], left[1])),
        lax.transpose(kernel, (*right[2:], right[1], right[0])),
    ]
    (made,) = bind(replace(equation, eqn=turned), operands)
    return lax.transpose(made, np.argsort((out[0], *out[2:], out[1])))
