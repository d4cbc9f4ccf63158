"""The executables of a step's groups: made, compiled side by side, and run one after another.

A value is handed on as a buffer, and dropped behind its last reader: written over there by a result of the same type if
there is one, else given back when that group ends. While a group runs there are its own arguments, results and
temporaries, and what waits for later groups.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtensile import _compat
from jaxtensile.groups.step import Step
from jaxtensile.ir.groups import Group
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.program.trace import Traced, bind
from jaxtensile.units import MIB, Bytes
from jaxtensile.xla.compile import Options, memory_of

LARGE = MIB
"""Bytes from which a constant is an argument of the groups that read it, so that it is on the device once. A guess, as
``emit``'s."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One group's executable. ``takes``, ``gives``: the values at its arguments and results; the program's results that
    repeat a value or are literals have negative numbers. ``drops``: values that nobody reads behind it. ``deletes``:
    those of them that a caller has donated and that it does not write over. ``memory``: by XLA. ``constants``: bytes of
    its arguments that the program closes over: one executable has them too, and XLA does not count them. ``aside``:
    bytes that wait on the device meanwhile. ``wide``: its types need 64 bits."""

    jitted: Any
    executable: Any
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    deletes: tuple[int, ...]
    memory: MemoryUse
    constants: Bytes
    aside: Bytes
    wide: bool

    @property
    def device(self) -> Bytes:
        """Bytes in use while it runs."""
        return self.aside + self.memory.device - self.constants


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The executables of a step. ``step``: the program. ``results``: the value at each flat result. ``held``: most
    bytes in use between two groups, arguments included."""

    step: Step
    pieces: tuple[Piece, ...]
    results: tuple[int, ...]
    held: Bytes

    @property
    def device(self) -> Bytes:
        """Most bytes in use while any of them runs."""
        return max(piece.device for piece in self.pieces)

    def __call__(self, flat: Sequence[Any], between: Callable[[], object] | None = None) -> Any:
        """The step's results for flat arguments. ``between``: called between two groups, when nothing runs."""
        with self.step.there():
            return self._run(flat, between)

    def _run(self, flat: Sequence[Any], between: Callable[[], object] | None) -> Any:
        traced = self.step.traced
        given = (x if not isinstance(x, np.ndarray) else jax.device_put(x) for x in (*self.step.captured, *flat))
        env: dict[int, Any] = dict(zip(traced.arguments, given, strict=True))
        env.update((v, traced.consts[v]) for piece in self.pieces for v in piece.takes if v in traced.consts)
        for k, piece in enumerate(self.pieces):
            if k and between is not None:
                between()
            operands = [env[v] for v in piece.takes]
            with _compat.wide_if(piece.wide):
                made = piece.jitted(*operands)
            del operands
            for v in piece.deletes:
                if isinstance(x := env[v], jax.Array):
                    x.delete()
            for v in piece.drops:
                del env[v]
            env.update(zip(piece.gives, made, strict=True))
            if between is not None:
                jax.block_until_ready(made)
                if not made:  # it has effects alone
                    jax.effects_barrier()
        return jax.tree.unflatten(self.step.out_tree, [env[v] for v in self.results])


def compiled(step: Step, groups: Sequence[Group], options: Options) -> Pieces:
    """Compile every group, side by side on this machine's cores. ``options``: the compiler's, of the whole step."""
    with step.there():
        drafts, lowered = _lowered(step, groups, options)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        executables = list(pool.map(lambda made: made[1].compile(), lowered))
    return _laid_out(step, drafts, [jitted for jitted, _ in lowered], executables)


def _lowered(step: Step, groups: Sequence[Group], options: Options) -> tuple[list[_Draft], list[Any]]:
    """The groups, and each as a jit object and lowered for the compiler."""
    drafts, lowered = _drafts(step, groups), list[Any]()
    committed: set[int] = {
        v for v, x in zip(step.traced.arguments, step.flat, strict=True) if getattr(x, "sharding", None) is not None
    }
    kinds = _types(step)
    for draft in drafts:
        if not committed.isdisjoint(draft.takes):
            committed.update(draft.gives)
        given = [_argument(step, v, kinds, v in committed) for v in draft.takes]
        with _compat.wide_if(draft.wide):
            jitted = _compat.jit(
                draft.run,
                donate_argnums=tuple(range(draft.donated)),
                keep_unused=True,
                compiler_options=dict(options) or None,
            )
            lowered.append((jitted, jitted.lower(*given)))
    return drafts, lowered


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A group before it is compiled, as in ``Piece``. ``run``: on flat arguments, the first ``donated`` of which it may
    write over."""

    group: Group
    run: Callable[..., list[Any]]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    donated: int
    wide: bool


def _drafts(step: Step, groups: Sequence[Group]) -> list[_Draft]:
    traced, graph = step.traced, step.graph
    inside = {v for v in traced.consts if graph.values[v].nbytes < LARGE}
    # A result that repeats a value, or is a literal, is a buffer of its own, as one executable would make it.
    maker = {int(v): k for k, group in enumerate(groups) for v in group.outputs}
    again: list[list[tuple[int, Any]]] = [[] for _ in groups]
    seen = set[int]()
    for slot, atom in enumerate(traced.outputs):
        if not isinstance(atom, int):
            again[-1].append((~slot, atom))
        elif atom in seen:
            again[maker[atom]].append((~slot, atom))
        else:
            seen.add(atom)
    kinds, found = _types(step), list[_Draft]()
    for group, more in zip(groups, again, strict=True):
        takes = tuple(int(v) for v in group.inputs if v not in inside)
        gives = tuple(int(v) for v in group.outputs)
        results = {r for o in group.ops for r in graph.ops[o].results}
        avals = [kinds[v] for v in (*takes, *gives, *results)]
        found.append(
            _Draft(
                group=group,
                run=_evaluation(traced, group, takes, inside, (*gives, *(atom for _, atom in more))),
                takes=takes,
                gives=(*gives, *(slot for slot, _ in more)),
                donated=group.donated,
                wide=_compat.are_wide(avals),
            )
        )
    return found


def _evaluation(
    traced: Traced, group: Group, takes: Sequence[int], inside: set[int], gives: Sequence[Any]
) -> Callable[..., list[Any]]:
    """A group as a function of its flat arguments."""
    same = {int(r): int(v) for r, v in group.same}
    own = {int(v): traced.consts[v] for v in group.inputs if v in inside}

    def run(*flat: Any) -> list[Any]:
        env: dict[int, Any] = {**own, **dict(zip(takes, flat, strict=True))}

        def read(atom: Any) -> Any:
            if not isinstance(atom, int):
                return atom.val
            while atom in same:
                atom = same[atom]
            return env[atom]

        for o in group.ops:
            equation = traced.equations[o]
            env.update(zip(equation.results, bind(equation, list(map(read, equation.operands))), strict=True))
        return list(map(read, gives))

    return run


def _types(step: Step) -> dict[int, Any]:
    """The type of each value."""
    traced = step.traced
    found = {v: jax.typeof(x) for v, x in traced.consts.items()}
    for equation in traced.equations:
        if equation.eqn is not None:
            found.update((r, v.aval) for r, v in zip(equation.results, equation.eqn.outvars, strict=True))
            read = zip(equation.operands, equation.eqn.invars, strict=True)
            found.update((v, atom.aval) for v, atom in read if isinstance(v, int))
    for equation in traced.equations:
        if equation.eqn is None:
            found.update(zip(equation.results, (found[v] for v in equation.operands), strict=True))
    for v, x in zip(traced.arguments, step.flat, strict=True):
        found.setdefault(v, jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x)
    return found


def _argument(step: Step, v: int, kinds: Mapping[int, Any], committed: bool) -> Any:
    """What a group is lowered for in place of value ``v``."""
    if v in step.given:
        return step.given[v]
    aval = kinds[v]
    place = step.device if committed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place, weak_type=getattr(aval, "weak_type", False))


def _laid_out(step: Step, drafts: Sequence[_Draft], jitted: Sequence[Any], executables: Sequence[Any]) -> Pieces:
    """The pieces with what each drops, and the bytes that wait beside each."""
    traced, graph = step.traced, step.graph

    def size(values: Iterable[int]) -> Bytes:
        atoms = (v if v >= 0 else traced.outputs[~v] for v in values)
        return sum(graph.values[a].nbytes for a in atoms if isinstance(a, int))

    results: list[int] = []
    for slot, atom in enumerate(traced.outputs):
        results.append(atom if isinstance(atom, int) and atom not in results else ~slot)
    last = {v: k for k, draft in enumerate(drafts) for v in draft.takes}
    taken = _given_away(step)
    kept = {*results, *traced.consts, *(v for v in traced.arguments if v not in taken)}
    there = set(traced.arguments).intersection(graph.inputs)
    pieces, held = list[Piece](), 0
    for k, (draft, run, executable) in enumerate(zip(drafts, jitted, executables, strict=True)):
        drops = tuple(v for v in draft.takes if last[v] == k and v not in results and v not in traced.consts)
        over = set(draft.takes[: draft.donated])
        memory = memory_of(executable)
        pieces.append(
            Piece(
                jitted=run,
                executable=executable,
                takes=draft.takes,
                gives=draft.gives,
                drops=drops,
                deletes=tuple(v for v in drops if v in taken and v not in over),
                memory=memory,
                constants=size(traced.consts.keys() & set(draft.takes)),
                aside=size(there.difference(draft.takes)),
                wide=draft.wide,
            )
        )
        there = (there | {*draft.gives}) - ({*drops} - kept)
        if k < len(drafts) - 1:
            held = max(held, size(there))
    return Pieces(step=step, pieces=tuple(pieces), results=tuple(results), held=held)


def _given_away(step: Step) -> set[int]:
    """Donated arguments that one executable would write a result of the same type over, as ``jax.jit`` pairs them."""
    graph = step.graph
    kind = lambda v: (graph.values[v].shape, graph.values[v].dtype)  # noqa: E731
    room = Counter(map(kind, graph.outputs))
    found = set[int]()
    for v in step.traced.arguments:
        if v in graph.donated and room[kind(v)] > 0:
            room[kind(v)] -= 1
            found.add(v)
    return found


__all__ = ["Piece", "Pieces", "compiled"]
