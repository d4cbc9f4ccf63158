"""The choice of residuals to keep as an integer programme: bytes at chosen steps, exact but for fusion.

With K_v = "v is kept across the boundary" (binary), Y_o = "op o runs again" and D_ot = "o has run again by step t of
the backward part", one boundary is

    minimise sum_o charge_o Y_o
    subject to  Y_o >= 1 - K_v          for each needed result v of o,
                Y_o >= Y_p - K_v        when p reads v,
                the same for D_ot, for what is needed by t,
                others_t + sum_v bytes_v E_vt <= budget   at every step t that is looked at,

where E_vt = "v occupies memory at t":

* v is there, kept or recomputed, and will be read by the backward part or by an op yet to run again; or
* v is kept, only a barrier makes XLA store it, and nothing has run again, so there was no barrier yet.

Clones run in the order of ``emit``'s demands, so K decides D; only K is integral. D_ot is at most Y_o and at most the
sum of its possible demands by t; otherwise a relaxation pretends that readers are done.

The forward part is coarsened (``nodes``): a value looked through is never kept, and its cost is paid whenever a reader
runs again. Steps not looked at and bytes not foreseen only lower the optimum: it is a lower bound, as far as fusion is
foreseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from jaxtensile.devices.hushed import hushed
from jaxtensile.passes.lifetimes.liveness import Liveness
from jaxtensile.passes.recompute.nodes import Nodes, Sometimes, forward_ends, others
from jaxtensile.units import Bytes, Seconds

INF = float("inf")
TOLERANCE = 1e-7
"""Gap, as a share of the step, at which the programme counts as solved. ``_LEAST``, as a share of ``_STEP``, is a
hundredth of it."""
_STEP = 1e3
"""Cost of a step in the objective. HiGHS ignores improvements below ``_LEAST``, whatever gap is asked."""
_LEAST = 1e-6
"""Absolute gap of the objective at which HiGHS stops (``mip_abs_gap``)."""
_DEAREST, _FARTHEST = 1e3, 1e3
"""If nothing fits: steps that a unit over the budget costs, so that bytes come first, and most units over it.
Guesses."""
_BRIEFEST: Seconds = 0.1
"""Least seconds for a programme: a limit of 0 finds nothing. A guess."""

_INFEASIBLE = 2
"""Status of scipy's ``milp`` for a programme without an answer."""
_REPAIRED = b"HighsMipSolverData::transformNewIntegerFeasibleSolution"

Row = dict[int, float]
"""A linear expression: coefficient by variable, with the constant at ``_ONE``."""
_ONE = -1
"""Key of the constant in a ``Row``; no variable has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``kept``: None if none was found in time. ``bound``: no solution costs less. ``short``: bytes over the budget if
    none fits."""

    kept: frozenset[int] | None
    bound: Seconds
    short: Bytes


class Model:
    """The integer programme; rows for steps are added one by one."""

    def __init__(self, nodes: Nodes, live: Liveness, charge: Sequence[Seconds], budget: Bytes) -> None:
        self.nodes = nodes
        self._charge = charge
        self._size = [v.nbytes for v in nodes.graph.values]
        self._unit = max(live.temp, 1)
        self._budget = budget
        self._low: list[float] = []
        self._high: list[float] = []
        self._rows: list[Row] = []
        self._sometimes: list[Sometimes] = []
        self._others = others(nodes, live, self._sometimes)
        self._forward = forward_ends(nodes, live)
        self._memory: dict[int, int] = {}
        self.slack: dict[int, Bytes] = {}
        """Bytes set aside at a step because the emitted schedule needed more there."""
        self._over = self._variable()
        self._one = self._variable(low=1.0)
        self.keep: dict[int, int] = {}
        for v in nodes.maker:
            self.keep[v] = self._variable(low=float(v in nodes.pinned))
        self._again: dict[int, Row] = {}
        for o, made in nodes.makes.items():
            needed = [v for v in made if v in nodes.first]
            if nodes.single(o) and needed:
                self._again[o] = {_ONE: 1.0, self.keep[made[0]]: -1.0}
                continue
            again: Row = {self._variable(): 1.0}
            self._again[o] = again
            if nodes.single(o):
                self._at_least({_ONE: 1.0, self.keep[made[0]]: -1.0}, again)
            for v in needed:
                self._at_least(again, {_ONE: 1.0, self.keep[v]: -1.0})
        for v, readers in nodes.readers.items():
            for p in readers:
                self._at_least(self._again[nodes.maker[v]], _sum(self._again[p], {self.keep[v]: -1.0}))
        self._priced = [(self._again[o], charge[o]) for o in nodes.makes]
        for by, ops in nodes.through.items():
            price = sum(charge[o] for o in ops)
            any_of_them = self._again[min(by)]
            if len(by) > 1 and price:
                any_of_them = {self._variable(): 1.0}
                for o in by:
                    self._at_least(any_of_them, self._again[o])
            self._priced.append((any_of_them, price))

    def _variable(self, low: float = 0.0) -> int:
        self._low.append(low)
        self._high.append(1.0)
        return len(self._low) - 1

    def _at_least(self, left: Row, right: Row) -> None:
        row = _sum(left, right, -1.0)
        if any(k != _ONE for k in row):
            self._rows.append(row)

    @property
    def width(self) -> int:
        """Number of variables."""
        return len(self._low)

    def has(self, step: int) -> bool:
        """Whether the bytes at ``step`` are looked at."""
        return step in self._memory

    def set_aside(self, step: int, over: Bytes) -> None:
        """Reduce the room at ``step``: the emitted schedule needed ``over`` bytes more than the model sees."""
        # Doubled at least: what is missing may be little, and as little again for the next answer.
        self.slack[step] = self.slack.get(step, 0) + max(over, self.slack.get(step, 0))

    def look_at(self, step: int) -> None:
        """Constrain the bytes at ``step``."""
        if step in self._memory:
            return
        row: Row = {_ONE: self._others[step] / self._unit}
        held = self._before(step) if step < self.nodes.step else self._after(step)
        held += self._beside(step, dict(held) if step < self.nodes.step else {})
        for v, expr in held:
            row = _sum(row, expr, self._size[v] / self._unit)
        # row <= budget + over, as: budget + over - row >= 0
        self._memory[step] = len(self._rows)
        self._rows.append(_sum({self._over: 1.0, _ONE: self._budget / self._unit}, row, -1.0))

    def _before(self, step: int) -> list[tuple[int, Row]]:
        return [
            (v, {self.keep[v]: 1.0})
            for v, o in self.nodes.maker.items()
            if o < step and self._forward.get(v, -1) < step
        ]

    def _beside(self, step: int, kept: dict[int, Row]) -> list[tuple[int, Row]]:
        """Buffers needed at ``step`` unless values made from them are kept, beyond what ``kept`` counts."""
        read: dict[int, list[Row]] = {}
        for s in self._sometimes:
            if s.start <= step < s.stop:
                row: Row = {_ONE: 1.0}
                for v in s.stored:
                    row = _sum(row, {self.keep[v]: -1.0})
                read.setdefault(s.value, []).append(row)
        held: list[tuple[int, Row]] = []
        for v, rows in read.items():
            there: Row = {self._variable(): 1.0}
            for row in (*rows, kept.get(v, {})):
                self._at_least(there, row)
            # Whether it is kept is counted already.
            held.append((v, _sum(there, kept.get(v, {}), -1.0)))
        return held

    def _after(self, step: int) -> list[tuple[int, Row]]:
        nodes = self.nodes
        done = self._done_by(step)
        here: dict[int, Row] = {}
        held: list[tuple[int, Row]] = []
        for o in sorted(nodes.makes, reverse=True):
            for v in nodes.makes[o]:
                here[v] = self._occupies(v, o, step, done, here)
                if v in nodes.solid:
                    held.append((v, here[v]))
                elif here[v]:
                    stored = {self._variable(): 1.0}
                    self._at_least(stored, _sum(here[v], self._again[o], -1.0))
                    held.append((v, stored))
        return held

    def _done_by(self, step: int) -> dict[int, Row]:
        """Per op the row for "has run again by ``step``"; missing if it cannot have."""
        nodes = self.nodes
        done: dict[int, Row] = {}
        for o in sorted(nodes.makes, reverse=True):
            if self._low[self.keep[nodes.makes[o][0]]] == 1.0 and nodes.single(o):
                continue
            now = [v for v in nodes.makes[o] if nodes.first.get(v, step + 1) <= step]
            later = [(v, p) for v in nodes.makes[o] for p in nodes.readers[v] if p in done]
            if now and nodes.single(o):
                done[o] = self._again[o]
            elif now or later:
                done[o] = {self._variable(): 1.0}
                for v in now:
                    self._at_least(done[o], {_ONE: 1.0, self.keep[v]: -1.0})
                for v, p in later:
                    self._at_least(done[o], _sum(done[p], {self.keep[v]: -1.0}))
                why: Row = {}
                for v in now:
                    why = _sum(_sum(why, {_ONE: 1.0}), {self.keep[v]: -1.0})
                for p in {p for _, p in later}:
                    why = _sum(why, done[p])
                self._at_least(why, done[o])
                self._at_least(self._again[o], done[o])
        return done

    def _occupies(self, v: int, o: int, step: int, done: dict[int, Row], here: dict[int, Row]) -> Row:
        """Row for "``v``, or a fused value computed from it, needs memory at ``step``"."""
        nodes, keep, again = self.nodes, {self.keep[v]: 1.0}, self._again[o]
        if nodes.first.get(v, step + 1) <= step <= nodes.last.get(v, -1):
            return {_ONE: 1.0}
        missing = _sum(again, done.get(o, {}), -1.0)  # it runs again, but later
        least: list[Row] = []
        if step < nodes.first.get(v, -1):
            least.append(_sum({_ONE: 1.0}, missing, -1.0))
            if not nodes.single(o):
                least += [keep, *([done[o]] if o in done else [])]
        for p in nodes.readers[v]:
            waits = _sum(self._again[p], done.get(p, {}), -1.0)
            if waits:
                least.append(_sum(waits, missing, -1.0))
                if not nodes.single(o):
                    least.append(_sum(_sum(waits, keep), {_ONE: -1.0}))
            for f in nodes.makes[p]:
                if f not in nodes.solid and here[f]:
                    least.append(_sum(here[f], {self.keep[f]: -1.0}))
        if v in nodes.forced:
            # There is no barrier before the first op that runs again, and ``v`` is an operand of one.
            row = keep
            for other in done.values():
                row = _sum(row, other, -1.0)
            least.append(row)
        if not least:
            return {}
        if len(least) == 1 and nodes.single(o) and step < nodes.first.get(v, -1):
            return least[0]
        occupied: Row = {self._variable(): 1.0}
        for row in least:
            self._at_least(occupied, row)
        return occupied

    def forbid(self, kept: frozenset[int]) -> None:
        """Exclude one answer: another set must be kept."""
        row: Row = {_ONE: -1.0}
        for v, k in self.keep.items():
            row = _sum(row, {_ONE: 1.0, k: -1.0} if v in kept else {k: 1.0})
        self._rows.append(row)

    def solve(
        self, seconds: float = INF, *, short: bool = False, tolerance: float = TOLERANCE, nodes: int | None = None
    ) -> Outcome:
        """The cheapest kept set. ``short``: allow the budget to be missed, by as little as possible.

        ``nodes``: most nodes of the search tree, independent of the clock; 0: the relaxation, rounded.
        """
        count = len(self._low)
        objective = np.zeros(count)
        whole = (sum(self._charge) or 1.0) / _STEP
        constant = 0.0
        for again, price in self._priced:
            for k, c in again.items():
                if k == _ONE:
                    constant += c * price / whole
                else:
                    objective[k] += c * price / whole
        objective[self._over] = _DEAREST * _STEP
        # A variable that is one: with the step itself in the objective, relative gaps are shares of a step.
        objective[self._one] = _STEP + constant
        high = np.array(self._high)
        high[self._over] = _FARTHEST if short else 0.0
        integral = np.zeros(count)
        integral[list(self.keep.values())] = 0 if nodes == 0 else 1
        if not self.keep:
            return Outcome(self.nodes.small, 0.0, 0)
        entries = [(i, k, c) for i, row in enumerate(self._rows) for k, c in row.items() if k != _ONE]
        least = np.array([-row.get(_ONE, 0.0) for row in self._rows])
        for step, i in self._memory.items():
            least[i] += self.slack.get(step, 0) / self._unit
        # scipy's optimisers and sparse types are unknown to type checkers.
        shape = (len(self._rows), count)
        matrix = cast(
            Any, csr_array(([c for *_, c in entries], ([e[0] for e in entries], [e[1] for e in entries])), shape)
        )
        found = _answered(
            c=objective,
            integrality=integral,
            bounds=Bounds(np.array(self._low), high),
            constraints=[LinearConstraint(matrix, least, np.full(len(least), np.inf))] if entries else [],
            options={
                "time_limit": max(seconds, _BRIEFEST),
                "mip_rel_gap": tolerance,
                **({"node_limit": nodes} if nodes else {}),
            },
        )
        bound = 0.0
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            least = float(found.mip_dual_bound)
            if found.x is not None:
                # What is better by less than the tolerance was not looked for.
                least = min(least, found.fun - max(tolerance * found.fun, _LEAST))
            bound = max(least - _STEP, 0.0) * whole
        if found.x is None:
            return Outcome(None, bound if found.status == 1 else INF, 0)
        kept = frozenset(v for v, k in self.keep.items() if found.x[k] > 0.5)
        return Outcome(kept | self.nodes.small, bound, int(found.x[self._over] * self._unit))


def _answered(*, options: Mapping[str, float], **programme: Any) -> Any:
    """HiGHS's answer; if infeasible, again without presolve, which calls some feasible programmes infeasible."""
    with hushed(_REPAIRED):
        found = cast(Any, milp)(**programme, options=options)
        if found.status == _INFEASIBLE:
            found = cast(Any, milp)(**programme, options={**options, "presolve": False})
    return found


def _sum(a: Row, b: Row, times: float = 1.0) -> Row:
    out = dict(a)
    for k, c in b.items():
        out[k] = out.get(k, 0.0) + times * c
        if out[k] == 0.0:
            del out[k]
    return out
