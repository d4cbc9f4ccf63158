"""Schedules laid out and measured around the boundaries of one problem, so that no search repeats them.

Invariant: the plan found does not depend on what is remembered. Measurements stay (8 bytes an op, 16 a clone). Of the
schedules, fifty times as large, only the first stay; others are laid out again on demand.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain

from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.offload.offload import Copy
from jaxtensile.passes.recompute.clones import with_clones_listed
from jaxtensile.passes.recompute.segments import Menu
from jaxtensile.passes.recompute.stages import boundary_at
from jaxtensile.switches import on
from jaxtensile.units import Seconds

HELD = 1 << 16
"""Ops of schedules that stay: some 40 MB. A bound on memory alone."""
AROUND = 1 << 16
"""Ops of programs whose boundaries stay known, beside the problem's own: some 150 MB. A bound on memory alone."""

Laid = tuple[Program, Liveness]


class Trial:
    """One kept set, laid out and measured. ``worth``: charge of a second of waiting."""

    __slots__ = (
        "_again",
        "_at_peak",
        "_clones",
        "_laid",
        "barrier",
        "charge",
        "copies",
        "device",
        "kept",
        "profile",
        "temp",
        "wait",
        "worth",
    )

    def __init__(
        self,
        kept: frozenset[int],
        laid: Laid,
        charge: float,
        clones: Sequence[tuple[int, int]] = (),
        *,
        again: Callable[[], Laid] | None = None,
        copies: tuple[Copy, ...] = (),
        wait: Seconds = 0.0,
        worth: float = 1.0,
    ) -> None:
        program, live = laid
        self.kept, self.charge, self.copies, self.wait, self.worth = kept, charge, copies, wait, worth
        self.device, self.temp, self.profile = live.device, live.temp, array("q", live.profile)
        self._clones = array("q", chain.from_iterable(clones))
        self.barrier = next((i for i, o in enumerate(program.origin) if o < 0), len(program.origin))
        """First step that the problem's own program does not have."""
        self._laid: Laid | None = laid
        self._at_peak: frozenset[int] | None = None
        self._again = again
        """Lays the schedule out again."""

    @property
    def program(self) -> Program:
        return self.laid()[0]

    @property
    def live(self) -> Liveness:
        return self.laid()[1]

    @property
    def clones(self) -> list[tuple[int, int]]:
        """Each clone's place in the schedule and the op that it repeats."""
        return [*zip(self._clones[::2], self._clones[1::2], strict=True)]

    @property
    def price(self) -> float:
        """The solvers' objective: charge of recomputation and of waiting for copies."""
        return self.charge + self.wait * self.worth

    def laid(self) -> Laid:
        """The schedule and its liveness."""
        if self._laid is None:
            assert self._again is not None, "what cannot be made again is not let go"
            self._laid = self._again()
        return self._laid

    @property
    def at_peak(self) -> frozenset[int]:
        """Values of the problem with a version in memory at the peak."""
        if self._at_peak is None:
            program, live = self.laid()
            self._at_peak = frozenset(program.version_of[r.value] for r in live.at_peak()[1])
        return self._at_peak

    def let_go(self) -> None:
        """Forget the schedule, if it can be laid out again."""
        if self._again is not None and self._laid is not None:
            _ = self.at_peak
            self._laid = None


class Around:
    """Trials around one boundary of the program of ``start``."""

    def __init__(self, start: Trial, menu: Menu, charge: Sequence[float]) -> None:
        self.start, self.menu, self.charge = start, menu, charge
        self._known: dict[frozenset[int], Trial] = {}

    def price(self, kept: frozenset[int]) -> float:
        """Price when exactly ``kept`` survives the boundary."""
        trial = self._known.get(kept)
        return trial.price if trial is not None else self._charged(self.menu.again.ops(kept))

    def _charged(self, again: set[int]) -> float:
        return self.start.charge + sum(self.charge[o] for o in again)

    def measure(self, kept: frozenset[int]) -> Trial:
        """The trial in which exactly ``kept`` survives the boundary."""
        trial = self._known.get(kept)
        if trial is None:
            again = self.menu.again.ops(kept)
            laid, clones = self._lay(kept, again)
            trial = Trial(
                kept, laid, self._charged(again), clones, again=lambda: self._lay(kept, self.menu.again.ops(kept))[0]
            )
            self._known[kept] = trial
        return trial

    def _lay(self, kept: frozenset[int], again: set[int]) -> tuple[Laid, list[tuple[int, int]]]:
        start, menu = self.start, self.menu
        program, clones = with_clones_listed(
            start.program, start.live.kernels, menu.boundary, kept, again, menu.cut_points
        )
        return (program, live_ranges(program.graph)), clones


class Explored:
    """Boundaries looked at: of the first program, and of the first ones that searches reached."""

    def __init__(self, costs: Sequence[float], first: Trial) -> None:
        self._costs, self._first = costs, first
        self._arounds: dict[tuple[int, int], Around | None] = {}
        self._starts: dict[int, Trial] = {}
        """Trials by the ids used in keys."""
        self._held: dict[int, Trial] = {}
        self._left, self._more = HELD, AROUND

    def around(self, start: Trial, step: int) -> Around | None:
        """The trials around a boundary; None if nothing waits across it."""
        key = id(start), step
        if key in self._arounds:
            return self._arounds[key]
        ops = 0 if start is self._first else len(start.profile)
        found = self._looked_at(start, step)
        if ops <= self._more and on("kept_trials"):
            self._more -= ops
            self._starts[id(start)], self._arounds[key] = start, found
        return found

    def _looked_at(self, start: Trial, step: int) -> Around | None:
        graph, origin = start.program.graph, start.program.origin
        boundary = boundary_at(graph, step)
        if not boundary.needed:
            return None
        charge = [self._costs[o] if o >= 0 else 0.0 for o in origin]
        return Around(start, Menu(graph, boundary, charge), charge)

    def keep(self, trial: Trial) -> None:
        """Keep the schedule for this search or the next, if there is room."""
        ops = len(trial.profile)
        if id(trial) not in self._held and ops <= self._left:
            self._held[id(trial)] = trial
            self._left -= ops

    def let_go(self, trial: Trial) -> None:
        """Forget the schedule, unless it is kept."""
        if id(trial) not in self._held:
            trial.let_go()
