"""A stretch of a program done for some rows after the other: the batch in parts, as a loop inside the step.

What lies between a batch and the gradients of the weights makes every row from the same row of what went before, and
adds up over rows in the end (``rows``). Such a stretch may run for a part of the rows at a time: what it makes on the
way is as much smaller, and the multiplications are the same. Where it is all of a training step up to the update, this
is gradient accumulation; where it is the loss of a language model, logits of all tokens never exist.

Invariant: every element is made by the same operations from the same elements as before; totals over rows are totals of
the parts' totals, added in float32 where they are of fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.ir import Graph, producers
from jaxtensile.rows import ELEMENTWISE, Passing, Row, made_of_whole, passing
from jaxtensile.trace import Equation, Traced, bind, retrace
from jaxtensile.units import Bytes

SEEDS = 12
"""Places of rows that are tried at most, of arguments and of what large products read."""
CHEAP = 1 / 64
"""Share of what rows go through that is little enough to make for all rows first."""
_JOIN: dict[str, Callable[[Any, Any], Any]] = {"add": lax.add, "max": lax.max, "min": lax.min}


class Seed(NamedTuple):
    """Where rows come from: a value, its dimension of that many rows; ``stage``: after how many totals of them."""

    value: int
    dim: int
    rows: int
    stage: int


@dataclass
class Stretch:
    """Ops that pass rows on, with no way from one to another outside.

    ``members``: op → how; ``pulled``: (value, rows) that are made anew for some rows from whole values → how;
    ``sliced``: (value, rows) that come from outside; ``whole``: values that are read as they are; ``leaving``: what
    others read of it, as rows or as totals; ``same``: results of barriers → what they are, for whoever reads all of it.
    """

    seed: Seed
    members: dict[int, Passing]
    pulled: dict[tuple[int, Row], tuple[int, Passing]] = field(default_factory=dict)
    sliced: dict[tuple[int, Row], None] = field(default_factory=dict)
    whole: dict[int, None] = field(default_factory=dict)
    leaving: dict[int, Row | str] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    inside: Bytes = 0
    """Bytes of the values that nothing outside reads, less those of rows that leave it."""


def find_stretch(traced: Traced, smallest: Bytes) -> Stretch | None:
    """The stretch that keeps most bytes to itself, less those of rows that leave it; None where these are fewer than
    ``smallest``."""
    found = [s for seed in _seeds(traced, smallest) for s in stretches(traced, *seed)]
    best = max(found, key=lambda s: (s.inside, -s.seed.value, -s.seed.dim), default=None)
    return best if best is not None and best.inside >= smallest else None


def stretch_of(traced: Traced, seed: Seed) -> Stretch | None:
    """The stretch that comes from a seed; None where there is none."""
    found = stretches(traced, seed.value, Row(seed.dim), seed.rows)
    return next((s for s in found if s.seed == seed), None)


def _seeds(traced: Traced, smallest: Bytes) -> list[tuple[int, Row, int]]:
    """(value, rows, how many) of arguments that come back as no result, and of what large products read."""
    graph = traced.graph
    kinds = {(graph.values[v].shape, graph.values[v].dtype) for v in graph.outputs}
    values = [v for v in graph.inputs if (graph.values[v].shape, graph.values[v].dtype) not in kinds]
    large = [op for op in graph.ops if op.primitive == "dot_general" and graph.values[op.results[0]].nbytes >= smallest]
    large.sort(key=lambda op: -graph.values[op.results[0]].nbytes)
    values = sorted(values, key=lambda v: -graph.values[v].nbytes)[:SEEDS] + [
        v for op in large[:4] for v in op.operands
    ]
    found: dict[tuple[int, Row, int], None] = {}
    for v in dict.fromkeys(values):
        for dim, size in enumerate(graph.values[v].shape[:2]):
            if size > 1:
                found[int(v), Row(dim), size] = None
    return list(found)


def stretches(traced: Traced, value: int, row: Row, rows: int) -> list[Stretch]:
    """The stretches of ops that rows of a value go through, one for each time that totals of them are needed.

    Totals that are cheap to have before, like the number of tokens that count, are not waited for.
    """
    graph = traced.graph
    aside: set[int] = set()
    while True:
        at, found, same = _passed_on(traced, value, row, rows, aside)
        more = _cheap_totals(graph, at, found)
        if not more:
            break
        aside |= more
    made = producers(graph)
    for own in found.values():
        _complete(traced, own, at, same, made)
    return list(found.values())


def _passed_on(
    traced: Traced, value: int, row: Row, rows: int, aside: set[int]
) -> tuple[dict[int, Row | str], dict[int, Stretch], dict[int, int]]:
    """Where rows of all values are that have them, the stretches by their stage, and what barriers only hand on;
    ``aside``: ops that are for whole values."""
    graph = traced.graph
    at: dict[int, Row | str] = {value: row}
    stage = [0] * len(graph.values)
    found: dict[int, Stretch] = {}
    same: dict[int, int] = {}
    made = set[int]()
    for op, equation in zip(graph.ops, traced.equations, strict=True):
        given = [_row(at, a) for a in equation.operands]
        able = any(given) and not op.pinned and op.id not in aside and _on_the_device(graph, equation)
        how = passing(equation.eqn, given, rows) if able else None
        if how is not None and any(g not in (None, n) for g, n in zip(given, how.needs, strict=True)):
            how = None
        # What does not pass rows on reads around barriers: behind them is what was before.
        reads = [_root(same, v) if how is None else v for v in op.operands]
        level = max((stage[v] + (v in made and (how is None or isinstance(at[v], str))) for v in reads), default=0)
        for v in op.results:
            stage[v] = level
        if how is None:
            continue
        own = found.setdefault(level, Stretch(Seed(value, row.dim, rows, level), {}))
        own.members[op.id] = how
        for i, (v, gives) in enumerate(zip(equation.results, how.gives, strict=True)):
            a = equation.operands[i] if i < len(equation.operands) else None
            if gives is not None:
                at[v] = gives
            if op.primitive == "optimization_barrier" and isinstance(a, int) and _root(same, a) not in made:
                same[v] = _root(same, a)
            elif gives is not None:
                made.add(v)
    return at, found, same


def _cheap_totals(graph: Graph, at: Mapping[int, Row | str], found: Mapping[int, Stretch]) -> set[int]:
    """Members that make totals which later ones wait for, where they multiply nothing and make little."""
    if len(found) < 2:
        return set()
    members = {o for own in found.values() for o in own.members}
    made = producers(graph)
    enough = CHEAP * sum(graph.values[v].nbytes for o in members for v in graph.ops[o].results)
    awaited = [False] * len(graph.values)
    for op in reversed(graph.ops):
        if op.id in members or any(awaited[r] for r in op.results):
            for v in op.operands:
                awaited[v] = True
    cheap: set[int] = set()
    for v, how in at.items():
        if isinstance(how, str) and awaited[v]:
            own = _ancestors(graph, made, v, members)
            if sum(graph.values[r].nbytes for o in own for r in graph.ops[o].results) <= enough and not any(
                graph.ops[o].flops for o in own
            ):
                cheap |= own
    return cheap


def _ancestors(graph: Graph, made: Sequence[int], v: int, members: set[int]) -> set[int]:
    """The members that ``v`` is made by, as far back as there are any."""
    found, todo = set[int](), [v]
    while todo:
        o = made[todo.pop()]
        if o in members and o not in found and graph.ops[o].primitive != "optimization_barrier":
            found.add(o)
            todo += graph.ops[o].operands
    return found


def _on_the_device(graph: Graph, equation: Equation) -> bool:
    """Whether all that it makes are arrays of numbers that are on the device."""
    avals = () if equation.eqn is None else [v.aval for v in equation.eqn.outvars]
    if any(not isinstance(getattr(a, "dtype", None), np.dtype) or a.dtype == jax.dtypes.float0 for a in avals):
        return False
    return all(graph.values[v].space == "device" for v in (*equation.results, *_ids(equation.operands)))


def _ids(atoms: Sequence[Any]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]


def _row(at: Mapping[int, Row | str], atom: Any) -> Row | None:
    found = at.get(atom) if isinstance(atom, int) else None
    return found if isinstance(found, Row) else None


def _complete(
    traced: Traced, own: Stretch, at: Mapping[int, Row | str], same: Mapping[int, int], made: Sequence[int]
) -> None:
    """What a stretch reads from outside, and what is read of it there."""
    graph = traced.graph
    own.same = {v: a for v, a in same.items() if made[v] in own.members}
    inner: set[int] = {v for o in own.members for v in graph.ops[o].results if v in at}
    for o, how in own.members.items():
        for a, need in zip(traced.equations[o].operands, how.needs, strict=True):
            if not isinstance(a, int) or (need is not None and a in inner):
                continue
            if need is None:
                own.whole[a] = None
            elif not _pull(traced, own, a, need, inner, made):
                own.sliced[a, need] = None
    outside = {v for op in graph.ops if op.id not in own.members for v in op.operands} | set(graph.outputs)
    own.leaving = {v: at[v] for v in sorted(inner & outside - own.same.keys())}
    totals = {v for v in inner if isinstance(at[v], str)}
    leaving = sum(graph.values[v].nbytes for v, how in own.leaving.items() if isinstance(how, Row))
    own.inside = sum(graph.values[v].nbytes for v in inner - outside - totals) - leaving


def _pull(traced: Traced, own: Stretch, v: Any, row: Row, inner: set[int], made: Sequence[int]) -> bool:
    """Whether some rows of ``v`` can be made from whole values alone; noted if so."""
    if (v, row) in own.pulled:
        return True
    if not isinstance(v, int) or made[v] < 0 or v in inner:
        return False
    op, equation = traced.graph.ops[made[v]], traced.equations[made[v]]
    if equation.eqn is None or op.pinned or len(op.results) != 1:
        return False
    how = made_of_whole(equation.eqn, row, own.seed.rows)
    if how is not None:
        own.whole.update(dict.fromkeys(a for a in equation.operands if isinstance(a, int)))
    elif equation.eqn.primitive.name in ELEMENTWISE:
        shapes = [traced.graph.values[a].shape if isinstance(a, int) else () for a in equation.operands]
        given = [row if len(shape) > row.dim and shape[row.dim] > 1 else None for shape in shapes]
        how = passing(equation.eqn, given, own.seed.rows) if any(given) else None
        pairs = [*zip(equation.operands, how.needs, strict=True)] if how is not None else []
        if how is None or not all(_pull(traced, own, a, need, inner, made) for a, need in pairs if need is not None):
            return False
        own.whole.update(dict.fromkeys(a for a, need in pairs if isinstance(a, int) and need is None))
    else:
        return False
    own.pulled[v, row] = (op.id, how)
    return True


def in_chunks(traced: Traced, closed: Any, own: Stretch, parts: int, *, mixed: bool = True) -> Any | None:
    """The closed jaxpr of ``traced`` (of ``closed``) with the stretch in a loop of so many parts of its rows.

    None where what has effects would have to wait for the loop. ``parts`` divides the number of rows; ``mixed``:
    whether the device multiplies numbers of 16 bits into float32 (XLA:CPU does not for all shapes).
    """
    graph = traced.graph
    outside = {a for a, _ in own.sliced} | set(own.whole)
    outside = {_root(own.same, v) for v in outside}
    first = min(own.members)
    order = _order(graph, own, outside, first)
    if order is None:
        return None

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)

        def read(atom: Any) -> Any:
            return env[_root(own.same, atom)] if isinstance(atom, int) else atom.val

        for o in order:
            if o < 0:
                env.update(_loop(traced, own, read, parts, mixed))
            else:
                equation = traced.equations[o]
                env.update(zip(equation.results, bind(equation, [read(a) for a in equation.operands]), strict=True))
        return [read(a) for a in traced.outputs]

    return retrace(evaluate, closed)


def _root(same: Mapping[int, int], v: int) -> int:
    while v in same:
        v = same[v]
    return v


def _order(graph: Graph, own: Stretch, outside: set[int], first: int) -> list[int] | None:
    """The other ops and the loop (-1): it begins as soon as it can, and what waits for it comes right after."""
    inner = {v for o in own.members for v in graph.ops[o].results if v not in own.same}
    missing = {v for op in graph.ops for v in op.results} & outside
    order: list[int] = []
    waiting: list[int] = []
    late: set[int] = set(inner)
    done = False
    for op in graph.ops:
        if not done and op.id >= first and not missing:
            order += [-1, *waiting]
            late, waiting, done = set(), [], True
        if op.id in own.members:
            continue
        if not done and any(_root(own.same, v) in late for v in op.operands):
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
    traced: Traced, own: Stretch, read: Callable[[Any], Any], parts: int, mixed: bool
) -> Iterator[tuple[int, Any]]:
    """What leaves the stretch, made part by part."""
    n = own.seed.rows // parts
    pulled = _by_op(own)

    def part(i: Any) -> dict[int, Any]:
        env: dict[tuple[int, Row | None], Any] = {}

        def get(atom: Any, need: Row | None) -> Any:
            if not isinstance(atom, int):
                return atom.val
            if need is None:
                return read(atom)
            if (atom, need) not in env:
                if (atom, None) in env:
                    return env[atom, None]
                size = n * need.block
                env[atom, need] = lax.dynamic_slice_in_dim(read(atom), i * size, size, need.dim)
            return env[atom, need]

        for o in sorted({*own.members, *pulled}):
            for row, how in pulled.get(o, ()):
                equation = traced.equations[o]
                (env[equation.results[0], row],) = _bound(
                    equation, how, [*map(get, equation.operands, how.needs)], n, mixed
                )
            if o in own.members:
                equation, how = traced.equations[o], own.members[o]
                if equation.eqn is None or equation.eqn.primitive.name == "optimization_barrier":
                    there = [k for k, row in enumerate(how.needs) if row is not None]
                    made = lax.optimization_barrier(tuple(get(equation.operands[k], how.needs[k]) for k in there))
                    env.update(((equation.results[k], None), x) for k, x in zip(there, made, strict=True))
                    continue
                made = _bound(equation, how, [*map(get, equation.operands, how.needs)], n, mixed)
                env.update(((v, None), x) for v, x in zip(equation.results, made, strict=True))
        return {v: env[v, None] for v in own.leaving}

    shapes = jax.eval_shape(part, jax.ShapeDtypeStruct((), np.int32))
    values = traced.graph.values
    carried = [v for v, how in own.leaving.items() if isinstance(how, str) or how.dim > 0]
    stacked = [v for v in own.leaving if v not in carried]

    def start(v: int) -> Any:
        how, made = own.leaving[v], shapes[v]
        if isinstance(how, Row):
            return lax.full(values[v].shape, 0, made.dtype)
        return lax.full(made.shape, _identity(how, made.dtype), made.dtype)

    def step(state: Any, _: None) -> Any:
        i, totals = state
        made = part(i)
        new: list[Any] = []
        for v, before in zip(carried, totals, strict=True):
            how = own.leaving[v]
            if isinstance(how, Row):
                new.append(lax.dynamic_update_slice_in_dim(before, made[v], i * n * how.block, how.dim))
            else:
                new.append(_JOIN[how](before, made[v]))
        return (i + 1, new), [made[v] for v in stacked]

    (_, totals), parts_of = lax.scan(step, (np.int32(0), [start(v) for v in carried]), None, length=parts)
    for v, x in zip(carried, totals, strict=True):
        yield v, lax.convert_element_type(x, _dtype(traced, v))
    for v, x in zip(stacked, parts_of, strict=True):
        yield v, lax.reshape(x, values[v].shape)


def _by_op(own: Stretch) -> dict[int, list[tuple[Row, Passing]]]:
    found: dict[int, list[tuple[Row, Passing]]] = {}
    for (_, row), (o, how) in own.pulled.items():
        found.setdefault(o, []).append((row, how))
    return found


def _dtype(traced: Traced, v: int) -> Any:
    return jnp.dtype(traced.graph.values[v].dtype)


def _identity(how: str, dtype: Any) -> Any:
    if how == "add":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if how == "max" else np.inf
    if dtype == np.bool_:
        return how == "min"
    return jnp.iinfo(dtype).min if how == "max" else jnp.iinfo(dtype).max


def _bound(equation: Equation, how: Passing, operands: list[Any], n: int, mixed: bool) -> list[Any]:
    """The equation on some rows; totals of fewer than 32 bits in float32."""
    eqn = equation.eqn
    params = {**eqn.params, **how.params(n)}
    dtype = eqn.outvars[0].aval.dtype
    if how.gives == ("add",) and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        if "preferred_element_type" in params:
            params["preferred_element_type"] = np.dtype(np.float32)
        if "preferred_element_type" not in params or not mixed:
            operands = [lax.convert_element_type(x, np.float32) for x in operands]
    with _compat.equation_context(eqn, equation.stack):
        return bind(replace(equation, eqn=eqn.replace(params=params)), operands)
