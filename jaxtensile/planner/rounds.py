"""What one round asks and compiles, and a cheaper plan after one that fits.

Invariant: a result was checked and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtensile.ir.plan import Plan
from jaxtensile.planner.trial_compiles import TrialCompiles
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.variant import Variant, charge_of
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds

CLOSE = 1.1
"""Programs within this factor of the budget are close to it. A guess."""
SPARE, LIFTS = 0.01, 3
"""After a plan that fits: spare share of the budget that is worth another plan, and how many are compiled at most.
Guesses."""
REPAID: Seconds = 1e-4
"""Seconds of a step that such a plan has to save, or 10,000 steps do not repay a compile."""
GAIN, UNSURE = 0.001, 0.01
"""Shares of the step's work that such a plan has to save: always, and if only the model predicts its bytes. Guesses."""
MUCH = 0.05
"""Share of the step's work that a plan halfway to one that missed has to save. A guess: a compile may be in vain."""
DEEP = 1.25
"""Before bodies are planned or loops strip-mined, plans predicted within this factor of the budget are compiled. A
guess, as far as ``SURELY``."""
HOPELESS = 2.0
"""Plans predicted over the budget by this factor are not compiled after others were. A guess."""
SURELY = 1.25
"""Nothing is tried where the model is sure and puts all plans over the budget by this factor. Of some 300 plans for an
H200, XLA allocated at least 0.88 of the prediction."""


class Rounds:
    """Rounds for one request.

    ``predicted``: bytes of its program as it is. ``aim``: model bytes assumed to fit; the first plan that does is
    taken.
    """

    def __init__(self, compiles: TrialCompiles, predicted: Bytes, aim: Bytes | None = None) -> None:
        self.request, self.compiles, self.predicted, self.aim = compiles.request, compiles, predicted, aim
        self.worth: Callable[[Variant, Plan], bool] = lambda _, __: True
        """Whether a plan is worth a compile."""
        self.doubts: Callable[[Made], bool] = lambda _: False
        """Whether what XLA made of a plan tells against the model."""
        self.doubted = False
        """Whether it did: nothing more is planned by this model."""

    def trust(self) -> None:
        """Doubt the model no more."""
        self.doubts, self.doubted = lambda _: False, False

    @property
    def scale(self) -> float:
        """Model bytes per byte on one device; across shards, from the plain program."""
        plain = self.compiles.plain
        if self.aim is not None:
            return self.aim / self.request.budget
        if not self.request.sized and plain is not None and plain.memory is not None:
            return self.predicted / max(plain.device, 1)
        return 1.0

    def cheapest(self, candidates: Candidates, aim: Bytes) -> tuple[Variant, Plan]:
        """The cheapest variant, and its plan as it will be compiled."""
        with self.compiles.clock("solve"):
            if self.aim is not None and (found := candidates.readily(aim))[1].predicted.device <= aim:
                return found
            variant, plan = candidates.cheapest(aim)
            return variant, variant.finished(plan, aim)

    def at_hand(self, candidates: Candidates, aim: Bytes) -> bool:
        """Whether a plan for ``aim`` is at hand."""
        with self.compiles.clock("solve"):
            return candidates.at_hand(aim)

    def planned(
        self, candidates: Candidates, variant: Variant, plan: Plan, aim: Bytes, *, once: bool = False
    ) -> tuple[Made | None, int]:
        """The plan compiled, after a miss also with bodies in order: the smaller, and the number compiled.

        If order helps, bodies stay in order from then on. ``once``: in one way only.
        """
        made = self.compiles.planned(variant, plan, once=once)
        if made is None or made.compiled.memory is None or made.fits:
            return made, 1
        self.doubted = self.doubted or self.doubts(made)
        if self.doubted:
            return made, 1
        more = int(made.compiled.device * self.scale) - plan.predicted.device
        with self.compiles.clock("solve"):
            helps = not made.misplaced and candidates.hold(variant, more, aim)
            held = candidates.held((variant, plan), aim) if helps else None
        if not helps:
            return made, 1
        second = self.compiles.planned(*held, once=once) if held is not None and self.worth(*held) else None
        if second is not None and not second.misplaced and second.compiled.device < made.compiled.device:
            return second, 2
        candidates.release()
        return made, 1 + (second is not None)

    def shallow(self, candidates: Candidates, aim: Bytes, charge: Seconds) -> tuple[Made | None, int]:
        """The smallest plan without deep changes, compiled if it costs no more and the model may be wrong; the number
        compiled."""
        with self.compiles.clock("solve"):
            if candidates.has_shallow(aim) or not on("shallow"):
                return None, 0  # dearer than what was chosen, as it is among what that was compared with
            variant, plan = candidates.shallow()
        as_it_is = plan.changes_nothing and variant.as_it_is
        if as_it_is or plan.predicted.device > DEEP * aim or charge_of(variant, plan) > charge:
            return None, 0
        made, count = self.planned(candidates, variant, plan, aim) if self.worth(variant, plan) else (None, 0)
        return (None, 0) if made is None or made.misplaced else (made, count)

    def hopeless(self, variant: Variant, nbytes: Bytes) -> bool:
        """Whether a program like ``variant`` of ``nbytes`` is too far over the budget for anything to help.

        Loops, and compilers that do not follow a plan's order, may need much less than predicted.
        """
        loops = any(op.bodies for op in variant.base.graph.ops)
        sure = variant.request.device.backend.bounded and not loops and variant.request.shards == 1
        return nbytes > (SURELY if sure else HOPELESS) * self.request.budget

    def all_hopeless(self, candidates: Candidates, first: tuple[Variant, Plan]) -> bool:
        """Whether the first plan, and recomputation alone, are hopeless."""
        if not self.hopeless(first[0], first[1].predicted.device):
            return False
        others = (self.cheapest(alone, self.request.budget) for alone in with_and_without_host(candidates)[1:])
        return all(self.hopeless(variant, plan.predicted.device) for variant, plan in others)

    def lifted(
        self,
        candidates: Candidates,
        fits: Made,
        missed: tuple[Bytes, Bytes] | None,
        parts: int,
        beat: Seconds = math.inf,
    ) -> tuple[Made, int]:
        """A plan with less work than one that fits, by fewer parts or a cheaper plan; and the number compiled.

        None is compiled that costs ``beat`` or more, nor if somebody waits for the first that fits.
        """
        if self.aim is not None or beat <= 0:
            return fits, 0
        fewer, count = self.in_fewer_parts(candidates, fits, parts)
        cheaper, more = self.cheaper(candidates, fewer, missed, beat)
        return cheaper, count + more

    def in_fewer_parts(self, candidates: Candidates, fits: Made, missed: int) -> tuple[Made, int]:
        """The plan in the fewest parts that fits, between ``missed`` and the parts of ``fits``; the number compiled.

        The model's error for one number of parts says little of others.
        """
        budget, count = int(self.request.budget * self.scale), 0
        numbers = candidates.between(missed, fits.variant.parts) if on("lifted_parts") else []
        while numbers and count < LIFTS:
            middle = len(numbers) // 2
            aim, made = budget, None
            for _ in range(LIFTS):  # what misses by little is planned for that much less
                found = candidates.in_parts(numbers[middle], aim)
                if found is None or found[1].predicted.device > aim or not self._saves(found, fits):
                    break
                made = self.compiles.planned(*found, best=True)
                count += 1
                if made is None or not self.request.budget < made.compiled.device <= CLOSE * self.request.budget:
                    break
                aim = found[1].predicted.device - int((made.compiled.device - self.request.budget) * self.scale)
            if made is not None and made.fits:
                fits, numbers = made, numbers[:middle]
            else:
                numbers = numbers[middle + 1 :]
        return fits, count

    def cheaper(
        self, candidates: Candidates, fits: Made, missed: tuple[Bytes, Bytes] | None, beat: Seconds = math.inf
    ) -> tuple[Made, int]:
        """A plan with less work between ``missed``, in (predicted, compiled) bytes, and ``fits``; else ``fits``. And
        the number compiled.

        ``missed`` None: the program as it is, where that is nearer, else the model's error is assumed equal to that of
        ``fits``.
        """
        request, scale = self.request, self.scale
        budget = request.budget * scale
        work = sum(fits.variant.problem.costs.charge)
        gain, much = GAIN * work, MUCH * work
        if missed is None:
            spare = 2 * int(budget - fits.compiled.device * scale)
            missed = fits.plan.predicted.device + spare, int(fits.compiled.device * scale) + spare
            plain = self.compiles.plain
            if (
                plain is not None
                and plain.memory is not None
                and fits.plan.predicted.device < self.predicted < missed[0]
            ):
                missed = self.predicted, int(plain.device * scale)
            else:
                gain, much = UNSURE * work, math.inf
        count = 0
        for _ in range(LIFTS if on("lifted_plans") else 0):
            found = self._lifted(candidates, fits, missed, gain) or self._halfway(candidates, fits, missed, much)
            if found is None or charge_of(*found) >= beat:
                break
            made, count = self.compiles.planned(*found, best=True), count + 1
            if made is None or made.compiled.memory is None or made.misplaced:
                break
            if made.fits:
                if fits is self._quicker(fits, made):
                    break  # less work by the model, and more by what was compiled
                fits = made
            else:
                missed = made.plan.predicted.device, int(made.compiled.device * scale)
        return fits, count

    def _lifted(
        self, candidates: Candidates, fits: Made, missed: tuple[Bytes, Bytes], gain: Seconds
    ) -> tuple[Variant, Plan] | None:
        """A plan that saves ``gain`` and meets the budget if XLA's bytes are on the line through both; None if there is
        none."""
        budget = self.request.budget * self.scale
        predicted, compiled = fits.plan.predicted.device, fits.compiled.device * self.scale
        if budget - compiled <= SPARE * budget or missed[0] <= predicted or missed[1] <= compiled:
            return None
        aim = predicted + int((budget - compiled) / (missed[1] - compiled) * (missed[0] - predicted))
        return self._saving(candidates, fits, aim, gain)

    def _halfway(
        self, candidates: Candidates, fits: Made, missed: tuple[Bytes, Bytes], much: Seconds
    ) -> tuple[Variant, Plan] | None:
        """A plan between both by the model that saves much; None if there is none. XLA's bytes are far from any line
        where it orders a loop's body anew."""
        predicted = fits.plan.predicted.device
        if missed[0] <= predicted or not on("halfway"):
            return None
        return self._saving(candidates, fits, (predicted + missed[0]) // 2, much)

    def _saving(self, candidates: Candidates, fits: Made, aim: Bytes, gain: Seconds) -> tuple[Variant, Plan] | None:
        """The cheapest plan for the aim, if it saves ``gain``."""
        variant, plan = found = self.cheapest(candidates, aim)
        same = plan.changes_nothing and variant.as_it_is
        return None if same or plan.predicted.device > aim or not self._saves(found, fits, gain) else found

    def _quicker(self, fits: Made, cheaper: Made) -> Made:
        """Of two plans that fit, the one with the shorter step if compiled kernels are known and steps count; else the
        cheaper by the model."""
        before, now = fits.compiled.time, cheaper.compiled.time
        if self.request.device.traffic_weight < 1 or before is None or now is None:
            return cheaper
        return cheaper if now.seconds <= before.seconds else fits

    def _saves(self, found: tuple[Variant, Plan], fits: Made, gain: Seconds = 0.0) -> bool:
        """Whether a plan saves ``gain`` over one that fits and is worth a compile."""
        return charge_of(*found) + max(gain, REPAID) < charge_of(fits.variant, fits.plan) and self.worth(*found)


def with_and_without_host(candidates: Candidates) -> list[Candidates]:
    """Fresh candidates; also by recomputation alone, if bytes may wait on the host."""
    anew = [candidates.anew()]
    if candidates.written.request.host_budget:
        anew.append(candidates.anew())
        anew[-1].forget_host()
    return anew
