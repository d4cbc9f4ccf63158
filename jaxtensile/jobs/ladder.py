"""The plans of one step, from the smallest found up to the program with nothing recomputed.

A *ladder* starts as predictions without a compile: the program as it is, the smallest plan once asked for, and, in the
background, the plans between, at half a second each. Compiled plans, verified by XLA's allocation, replace them. A rung
splits a program's bytes into persistent ones (arguments, and results that replace none) and the temporaries of a
running step.

Invariant: ``fitted`` returns a compiled plan within the bytes asked for.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from jaxtensile.clock import Watch, nothing
from jaxtensile.errors import BudgetError, StoppedError
from jaxtensile.groups.grouped import grouped
from jaxtensile.ir.plan import MemoryUse, Prepare
from jaxtensile.jobs import sketching
from jaxtensile.passes.solvers.by_name import named
from jaxtensile.planner import pipeline
from jaxtensile.planner.plan_cache import PlanCache
from jaxtensile.runtime.client.holds import Exclusive
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.search.request import Fitted, Request
from jaxtensile.units import Bytes, Seconds

RUNGS = 4
"""Plans at most; each takes a few compiles. A guess."""
MARGIN, TOP_MARGIN = 0.2, 0.25
"""Shares of temporaries that XLA may need beyond the model: of the smallest plan, and of the program as it is, if
nobody waits and another plan may be compiled. Guesses; the first as ``build_report.MARGIN``."""
STEPS = 5
"""Measured steps remembered per rung, without the one after a switch. A guess: the median of five ignores two disturbed
ones."""
_LEAST: Seconds = 1e-9
"""Least seconds reported for a step: the protocol has no step of zero time."""
GROUPS = "cutting a step into groups"
_ROUNDING: Bytes = 64
"""Bytes: XLA rounds arguments and results up by at most this, and adds a table for several results."""


def persistent(use: MemoryUse) -> Bytes:
    """Bytes on the device between steps: a step's arguments, and results that replace none of them."""
    return use.argument + use.output - use.alias


_log = logging.getLogger("jaxtensile")


@dataclass(slots=True, eq=False)
class Position:
    """One plan's needs, as predicted (``fitted`` is None) or as XLA allocated it."""

    persistent: Bytes
    temp: Bytes
    host: Bytes
    seconds: Seconds
    """Predicted."""
    aim: Bytes
    """Bytes for which the model finds this plan again."""
    budget: Bytes
    """Bytes to compile it for if nobody waits for it."""
    fitted: Fitted | None = None
    measured: list[Seconds] = field(default_factory=list[Seconds])
    copied: Bytes = 0
    """Bytes that a step copies to the host and back."""
    wait: Seconds = 0.0
    """Of the seconds, those in which it waits for them."""

    @property
    def level(self) -> Bytes:
        return self.persistent + self.temp


class _Wanted(StoppedError):
    """A step waits for a plan, so background compiles give way."""


class Ladder:
    """The plans of one signature.

    ``request``: without arrays; its budget is an upper bound. ``most``: largest step time of a plan, as a factor of the
    fastest's; None: any. ``groups``: executables of a plan at most, where it can be cut within its bytes.
    """

    def __init__(
        self, request: Request, plans: PlanCache | None = None, *, most: float | None = None, groups: int = 1
    ) -> None:
        # Its plans are compared by the seconds of one device, also with the program as it is.
        self.request, self._plans, self._groups = request.with_sizes(), plans, groups
        self._most_overhead = most
        self._lock = threading.Lock()
        self._compiling, self._building = Exclusive(), threading.Lock()
        """For a waiting step, and for the background: a step does not wait for the latter."""
        self._asked: dict[Bytes, Fitted | None] = {}
        self._soon: set[Bytes] = set()
        """Budgets for which the first plan that fitted was taken."""
        self._sketching = threading.Lock()
        self._solver: Prepare | None = None
        """The solver of predictions, which knows its answers; None while a thread asks it, and at the end."""
        self._places = self._predicted(1)
        self._sketches = 1 if request.shards == 1 else RUNGS
        """Number of plans predicted, or the most there may be."""
        self.smallest = self._places[0].level
        """Fewest bytes the step is known to run in."""

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def rate(self) -> float:
        """Bytes a second that copies are planned for, each way of the link."""
        return self.request.way.bandwidth

    @property
    def persistent(self) -> Bytes:
        """Largest bytes between steps over all plans."""
        return max(p.persistent for p in self._places)

    @property
    def sketched(self) -> bool:
        """Whether a smaller plan is predicted too."""
        return self._sketches > 1

    @property
    def complete(self) -> bool:
        """Whether every plan is compiled and the best for its bytes."""
        return self._sketches == RUNGS and not self._soon and self.compiled == len(self._places)

    @property
    def compiled(self) -> int:
        """Number of compiled plans."""
        return sum(p.fitted is not None for p in self._places)

    def places(self) -> tuple[Position, ...]:
        """The plans, ascending in bytes."""
        with self._lock:
            return tuple(self._places)

    def share(self, rung: Rung) -> Bytes:
        """Bytes that a plan of this step may need on a rung of its job."""
        return min(self.persistent, rung.persistent) + rung.temp

    def sketch(self, count: int = 2) -> None:
        """Predict up to ``count`` plans. With two, the second is the smallest, used for admission."""
        with self._sketching:
            if self._sketches >= count:
                return
            with self._asking() as solver:
                found = self._predicted(count, solver)
            with self._lock:
                known = [p for p in self._places if p.fitted is not None]
                new = [p for p in found if not any(k.level <= p.level and k.seconds <= p.seconds for k in known)]
                self._places = sorted([*new, *known], key=lambda p: p.level)
                self.smallest = self._places[0].level
                self._sketches = count

    def runs(self, budget: Bytes) -> Position | None:
        """The fastest compiled plan within ``budget``."""
        with self._lock:
            found = self._within(budget)
            return next((p for p in self._places if p.fitted is found), None) if found is not None else None

    def tight(self) -> bool:
        """Promise the smallest plan's predicted bytes without a margin; False if already done or nothing is gained."""
        with self._lock:
            low = self._places[0]
            if low.fitted is not None or self._tightest >= low.temp:
                return False
            low.temp = self._tightest
            self.smallest = low.level
            return True

    def fitted(self, budget: Bytes, watch: Watch = nothing) -> Fitted:
        """The fastest compiled plan within ``budget`` device bytes; if there is none, one compiled now.

        A better plan that is only predicted is not waited for: ``build`` compiles it. If plans are compiled but none
        fits ``budget``, the smallest predicted one is compiled, since the job may be told to shrink again meanwhile.
        Raises ``BudgetError`` if no plan fits.
        """
        with self._lock:
            known = self._within(budget)
            promised = [p.level for p in self._places if p.fitted is None and p.level <= budget]
        if known is not None:
            return known
        level = promised[0 if self.compiled else -1] if promised else budget
        if level < budget:
            with suppress(BudgetError):
                return self.compile(level, watch, soon=True)
        return self.compile(budget, watch, soon=True)

    def fits(self, fitted: Fitted, budget: Bytes) -> bool:
        """Whether a plan of this ladder needs no more than ``budget``."""
        return place_of(fitted).level <= budget

    def compile(self, budget: Bytes, watch: Watch = nothing, *, soon: bool = False) -> Fitted:
        """Make a plan for exactly ``budget`` bytes, for a waiting step. ``soon``: use the predicted plan of that level
        if there is one. Raises ``BudgetError``."""
        with self._compiling():
            return self._compile(budget, watch, soon)

    def _compile(self, budget: Bytes, watch: Watch, soon: bool) -> Fitted:
        with self._lock:
            if budget in self._asked and (known := self._within(budget)) is not None:
                return known
            place = next((p for p in self._places if p.fitted is None and p.level == budget and soon), None)
        request = replace(self.request, budget=budget)
        try:
            if place is None:
                found = pipeline.fit(request, None, watch, plans=self._plans)
            else:
                with self._asking() as solver:
                    found = pipeline.fit(request, solver, watch, plans=self._plans, aim=place.aim)
        except BudgetError as error:
            with self._lock:
                self._asked[budget] = None
                self._soon.discard(budget)
                self.smallest = max(self.smallest, error.needs or 0)
                left = [p for p in self._places if p.fitted is not None or min(p.level, p.budget) > budget]
                self._places = left or self._places
            raise
        found = self._in_groups(found, budget)
        with self._lock:
            self._asked[budget] = found
            self._soon.discard(budget)
            if place is not None and found.evaluate is not None and place.budget not in self._asked:
                self._soon.add(place.budget)
            self._put(found, budget)
            best = self._within(budget)
        assert best is not None, "what was just compiled is within its budget"
        return best

    def _in_groups(self, found: Fitted, budget: Bytes) -> Fitted:
        """The plan in groups, where that is asked for and they fit too."""
        if self._groups < 2:
            return found
        request, report = self.request, found.report
        args, kwargs = request.arguments()
        made = request.faults.spared(
            GROUPS,
            lambda: grouped(
                found.jitted,
                args,
                kwargs,
                device=request.device,
                options=found.options,
                count=self._groups,
                needs=report.compiled.device,
                most=max(budget, report.compiled.device),
            ),
            lambda: None,
        )
        if made is None:
            return found
        if made.pieces is None:
            _log.warning("%s: %s", self.name, made.said)
        return replace(found, pieces=made.pieces, report=replace(report, notes=(*report.notes, made.said)))

    @contextmanager
    def _asking(self) -> Iterator[Prepare]:
        """The solver and its answers, for one thread at a time; another thread starts a new solver."""
        with self._lock:
            solver, self._solver = self._solver, None
        solver = solver or named(self.request.solver)
        try:
            yield solver
        finally:
            with self._lock:
                self._solver = solver

    def build(self, watch: Watch = nothing, *, between: Callable[[], object] = lambda: None) -> None:
        """Compile every plan that is only predicted.

        Order: the smallest first, since others may ask for it at any time; then from the largest down; last, the best
        plan for budgets where the first fit was taken. A compile broken off for a waiting step begins again.
        ``between``: called after each compile.
        """
        self.sketch(RUNGS)

        def yielding(what: str) -> None:
            watch(what)
            if (step := self._compiling.holder) is not None and step.alive:
                raise _Wanted

        while (budget := self._next()) is not None:
            watch("build")
            with self._building, suppress(_Wanted):
                try:
                    self._compile(budget, yielding, False)
                except BudgetError as error:
                    if error.needs is not None and error.needs not in self._asked and error.needs < self._top():
                        with suppress(BudgetError):
                            self._compile(error.needs, yielding, False)
            with self._compiling():
                pass  # a step has what it waited for
            between()
        with self._lock:
            self._solver = None

    def took(self, fitted: Fitted, seconds: Seconds) -> None:
        """Record the measured ``seconds`` of a step of a plan."""
        with self._lock:
            for place in self._places:
                if place.fitted is fitted:
                    place.measured = [*place.measured[-STEPS + 1 :], seconds]

    def timed(self) -> tuple[tuple[Position, Seconds], ...]:
        """The plans, ascending in bytes, with a step's seconds: measured, or predicted and corrected by other plans'
        measurements."""
        with self._lock:
            ratios = [statistics.median(p.measured) / p.seconds for p in self._places if p.measured]
            factor = statistics.median(ratios) if ratios else 1.0
            return tuple(
                (p, max(statistics.median(p.measured) if p.measured else p.seconds * factor, _LEAST))
                for p in self._places
            )

    def _predicted(self, count: int, solver: Prepare | None = None) -> list[Position]:
        job = self.request
        if job.shards > 1:
            # The model knows programs, not what one of several devices has of them: the plain one, as XLA says.
            found = pipeline.fit(job, plans=self._plans)
            self._asked[job.budget] = found
            self._tightest = found.report.compiled.temp
            return [place_of(found)]
        found = sketching.sketches(job, count, solver)
        self._tightest = found[0].use.temp
        rounding = _ROUNDING * (1 + len(job.donated) + len(job.jaxpr.out_avals))
        sure = job.device.backend.sketched
        places: list[Position] = []
        for k, sketch in enumerate(found):
            stays, temp = persistent(sketch.use) + rounding, sketch.use.temp
            more = max(TOP_MARGIN if k == len(found) - 1 else 0.0, MARGIN if k == 0 else 0.0)
            place = Position(
                stays,
                int(temp * (1 + sure)),
                sketch.use.host,
                max(sketch.seconds, _LEAST),
                sketch.aim,
                stays + int(temp * (1 + more)),
                copied=sketch.copied,
                wait=sketch.wait,
            )
            if not places or place.level > places[-1].level:
                places.append(place)
        within = [p for p in places if p.level <= job.budget]
        return self._quick(within or places[:1])

    def _quick(self, places: list[Position]) -> list[Position]:
        """The plans within the wanted overhead; the fastest always stays."""
        if self._most_overhead is None:
            return places
        fastest = min(p.seconds for p in places)
        return [p for p in places if p.seconds <= self._most_overhead * fastest]

    # ---- under the lock ----

    def _within(self, budget: Bytes) -> Fitted | None:
        fit = [p for p in self._places if p.fitted is not None and p.level <= budget]
        return min(fit, key=lambda p: p.seconds).fitted if fit else None

    def _planned(self) -> bool:
        """Whether no compiled plan is the program as it is."""
        return not any(p.fitted is not None and p.fitted.evaluate is None for p in self._places)

    def _top(self) -> Bytes:
        return self._places[-1].level

    def _next(self) -> Bytes | None:
        with self._lock:
            left = [p.budget for p in self._places if p.fitted is None and p.budget not in self._asked]
            if not left and self._soon:
                return min(self._soon)
            if not left:  # the program as it is, where what was predicted for it was too little
                return self.request.budget if self.request.budget not in self._asked and self._planned() else None
            return left[0] if left[0] == self._places[0].budget else left[-1]

    def _put(self, found: Fitted, budget: Bytes) -> None:
        """Insert a compiled plan in place of the prediction for its budget and of the plans it beats."""
        new = place_of(found)
        places = [p for p in self._places if p.fitted is not None or budget not in (p.level, p.budget)]
        better = [p for p in places if p.fitted is not None and p.level <= new.level and p.seconds <= new.seconds]
        if not better:
            worse = [p for p in places if p.level >= new.level and p.seconds >= new.seconds and not p.measured]
            places = [p for p in places if p not in worse] + [new]
        self._places = sorted(places, key=lambda p: p.level)
        self.smallest = self._places[0].level


def place_of(found: Fitted) -> Position:
    """The needs of a compiled plan."""
    use, stays = found.report.compiled, persistent(found.report.compiled)
    level = use.device if found.pieces is None else max(found.pieces.device, use.device)
    copied, wait = found.report.offload_bytes, found.report.wait
    step = max(found.report.step, _LEAST)
    return Position(stays, level - stays, use.host, step, level, level, found, copied=copied, wait=wait)


def together(ladders: Sequence[Ladder], calls: Sequence[int] = ()) -> tuple[Rung, ...]:
    """The ladder of a job with several steps: on each rung, every step has a plan that fits.

    Persistent bytes are those of the step with most, as all steps are assumed to share one state. Seconds are the mean,
    weighted by ``calls`` of each step, and so are those of the link each way.
    """
    counts = [max(n, 1) for n in calls or [1] * len(ladders)]
    tables = [ladder.timed() for ladder in ladders]
    stays = max(p.persistent for plans in tables for p, _ in plans)
    rungs: dict[Bytes, Rung] = {}
    for temp in sorted({p.temp for plans in tables for p, _ in plans}):
        chosen = [min((t for t in plans if t[0].temp <= temp), key=lambda t: t[1], default=None) for plans in tables]
        found = [t for t in chosen if t is not None]
        if len(found) == len(chosen):

            def mean(of_each: Iterable[Seconds]) -> Seconds:
                return sum(s * n for s, n in zip(of_each, counts, strict=True)) / sum(counts)

            each = zip(found, ladders, strict=True)
            copies = mean(p.copied / ladder.rate if p.copied else 0.0 for (p, _), ladder in each)
            rungs[stays + temp] = Rung(
                persistent=stays,
                temp=temp,
                host=max(p.host for p, _ in found),
                seconds=mean(s for _, s in found),
                wait=mean(min(p.wait, s) for p, s in found),
                into=copies,
                out=copies,
            )
    return tuple(rungs[level] for level in sorted(rungs))


__all__ = ["Ladder", "Position", "persistent", "place_of", "together"]
