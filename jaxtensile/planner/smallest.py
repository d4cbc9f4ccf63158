"""The smallest program of a request that misses its budget: named by errors, and sometimes a fit after all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from jaxtensile.ir.plan import Plan
from jaxtensile.planner.rounds import CLOSE, Rounds, with_and_without_host
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.variant import Variant, program_key
from jaxtensile.units import Bytes


class Smallest:
    """The search for it, after ``rounds`` or instead of them."""

    def __init__(self, rounds: Rounds) -> None:
        self.request, self.compiles, self.rounds = rounds.request, rounds.compiles, rounds

    def glance(self, candidates: Candidates) -> tuple[Made | None, int]:
        """The smallest plan, compiled in one way, for a hopeless budget; and the number compiled. The schedulers of a
        CPU differ by up to a factor of two: there it is compiled in each.

        The error then names a compiled figure, if somewhat higher than for a near budget. Others are planned and
        compiled only if XLA adds much to the first.
        """
        best: Made | None = None
        count, once = 0, len(self.request.device.backend.schedulers) == 1
        others = (anew for host in with_and_without_host(candidates) for anew in (host, *host.without_early_updates()))
        for anew in others:
            variant, plan = self.rounds.cheapest(anew, 0)
            if plan.changes_nothing and variant.as_it_is:
                continue
            made, count = self.compiles.planned(variant, plan, once=once), count + 1
            if made is None or made.compiled.memory is None or made.misplaced:
                continue
            best = made if best is None or made.compiled.device < best.compiled.device else best
            if made.compiled.device <= CLOSE * plan.predicted.device:
                break
        return best, count

    def found(self, candidates: Candidates, missed: Made | None) -> tuple[Made | None, int]:
        """The smallest plan of all, and the number compiled; ``missed``: the plan closest to the budget.

        Plans and ways compiled here do not depend on the budget. So a budget of the smallest plan's bytes is met; lower
        ones, once met by luck, are not promised.
        """
        request = self.request
        found: list[tuple[Made, Candidates]] = []
        rounds = 0
        for made, host, more in self._least(candidates, found):
            rounds += more
            if made is None or made.misplaced:
                continue
            if made.fits:
                made, more = self._with_what_is_left(host, made, missed)
                return made, rounds + more
            found.append((made, host))
        best = min(found, key=_needs)[0] if found else None
        plain = self.compiles.plain
        if best is not None and plain is not None and not request.state and plain.device <= best.compiled.device:
            best = replace(best, compiled=plain, evaluate=None)
        return best or missed, rounds

    def _least(
        self, candidates: Candidates, found: list[tuple[Made, Candidates]]
    ) -> Iterator[tuple[Made | None, Candidates, int]]:
        """The smallest plans in one way, then those near the best ``found`` in other ways; each with its candidates and
        the number compiled."""
        keys = set[int]()
        for host in with_and_without_host(candidates):
            with self.compiles.clock("solve"):
                plans: list[tuple[Candidates, Variant, Plan]] = []
                for anew in (host, *host.without_early_updates()):
                    plans.append((anew, *anew.cheapest(0)))
                    plans += [(anew, *anew.shallow())] if plans[-1][1].deep else []
            for anew, variant, plan in plans:
                key = program_key(variant, plan)
                if key in keys:
                    continue
                keys.add(key)
                if plan.changes_nothing and variant.as_it_is and variant.undone is None:
                    made, more = self.compiles.as_it_is(variant, plan), 1
                else:
                    made, more = self.rounds.planned(anew, variant, plan, 0, once=True)
                yield made, host, more
        # Ties make less of a difference than a plan, the CPU's schedulers may make more.
        near = CLOSE if self.request.device.backend.heeds_barriers else inf
        for once, host in sorted(found, key=_needs):
            if once.evaluate is not None and once.compiled.device <= near * _needs(min(found, key=_needs)):
                yield self.compiles.planned(once.variant, once.plan, learned=False), host, 1

    def _with_what_is_left(self, candidates: Candidates, fits: Made, missed: Made | None) -> tuple[Made, int]:
        """``fits``, or a plan with less work: in fewer parts, or between it and ``missed``; and the number compiled."""
        fits, count = self.rounds.in_fewer_parts(candidates, fits, 1)
        if missed is None or missed.compiled.memory is None:
            return fits, count
        cheaper, more = self.rounds.cheaper(
            candidates, fits, (missed.plan.predicted.device, int(missed.compiled.device * self.rounds.scale))
        )
        return cheaper, count + more


def _needs(found: tuple[Made, Candidates]) -> Bytes:
    return found[0].compiled.device
