"""Plan, compile, and after a miss plan again for what XLA added.

Invariant: a result was checked and compiled; only a measured number flows from one round to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtensile.ir import plan as plans
from jaxtensile.ir.plan import Plan
from jaxtensile.planner.trial_compiles import TrialCompiles
from jaxtensile.rewrites.early_updates import EARLY_UPDATES
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.variant import Variant, charge_of, program_key
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds

ROUNDS = 4
"""Plans compiled at most, each in every way of its platform until one fits. A guess: each takes a compile.

Twice as many if the program without the user's checkpoints is tried first, in vain.
"""

SPARE, LIFTS = 0.01, 3
"""After a plan that fits: spare share of the budget that is worth another plan, and how many are compiled at most.
Guesses."""
GAIN, UNSURE = 0.001, 0.01
"""Shares of the step's work that such a plan has to save: always, and if only the model predicts its bytes. Guesses."""
ROUNDS_IF_CLOSE, CLOSE = 6, 1.1
"""Plans at most once one came within this factor of the budget. Guesses."""
FLATTEST = 0.4
"""Least saving in XLA's allocation per byte saved in the model, as assumed. A guess."""
REFUSED = 0.9
"""Factor on the aim after a compiler ran out of memory without a figure. A guess."""
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

    def all(
        self, candidates: Candidates, first: tuple[Variant, Plan] | None, *, beat: Seconds = math.inf
    ) -> tuple[Made | None, int]:
        """The plan closest to the budget, and the number compiled. One that fits is lifted only to plans that cost less
        than ``beat``.

        If plans with bytes on the host miss or are refused, recomputation alone gets as many rounds: a ``host_budget``
        costs compiles, never a fit. Updates moved behind their gradients, which XLA may postpone, are given up in the
        same way.
        """
        budget = self.request.budget
        best, rounds, tried = self.some(candidates, first, beat)
        for way, forget in (("host", candidates.forget_host), ("early", candidates.forget_early_updates)):
            if best is not None and best.fits:
                break
            if way not in tried:
                continue
            forget()
            first = self.cheapest(candidates, budget)
            if first[1].predicted.device > HOPELESS * budget:
                continue
            second, more, also = self.some(candidates, first, beat)
            tried |= also
            made = [m for m in (best, second) if m is not None]
            best, rounds = min(made, key=lambda m: m.compiled.device, default=None), rounds + more
        return best, rounds

    def some(
        self, candidates: Candidates, first: tuple[Variant, Plan] | None, beat: Seconds
    ) -> tuple[Made | None, int, set[str]]:
        """Plan, compile, and after a miss plan again.

        Returns the smallest plan, the number compiled, and which of bytes on the ``host`` and ``early`` updates were
        tried.
        """
        request, compiles, scale = self.request, self.compiles, self.scale
        aim = int(request.budget * scale)
        if not request.device.backend.own_memory:
            aim -= request.state_bytes  # its host memory is its device memory
        best: Made | None = None
        rounds, tried = 0, set[str]()
        seen: list[tuple[Bytes, Bytes]] = []
        keys: set[int] = set()
        parts, beside = 1, 0
        loose: Bytes | None = None
        """Bytes of the program as it is, if its bodies are kept in order instead."""
        while rounds - beside < (
            ROUNDS if best is None or best.compiled.device > CLOSE * request.budget else ROUNDS_IF_CLOSE
        ):
            (variant, plan), first = first or self.cheapest(candidates, aim), None
            if not self.worth(variant, plan):
                break
            if best is None and plan.predicted.device > aim:
                written = candidates.written
                if compiles.known(written) is None and written.plain.device <= CLOSE * plan.predicted.device:
                    # The model sees nothing fit, nor a plan save much.
                    made = compiles.as_it_is(written, written.solve(written.plain.device))
                    if made.fits:
                        return made, rounds, tried
            if plan.changes_nothing and variant.as_it_is:
                plain = compiles.known(variant)
                if variant.undone is None and plain is None and plan.predicted.device <= aim:
                    # With its checkpoints it may fit as it is, at the least price.
                    made = compiles.as_it_is(variant, plan)
                    if made.fits:
                        return made, rounds, tried
                    plain = made.compiled
                more = int(plain.device * scale) - plan.predicted.device if plain is not None and plain.memory else 0
                if loose is None and more > 0 and candidates.hold(variant, more, aim) and plain is not None:
                    loose = plain.device
                    continue
                plan = variants.separated(variant, plan)
                if plan.changes_nothing:
                    # The model thinks that the program fits as it is, XLA knows better: aim as much lower.
                    over = 1 / REFUSED if plain is None or plain.memory is None else plain.device / request.budget
                    lower = int(plan.predicted.device / over) if plain is not None and over > 1.0 else aim
                    if lower >= aim or lower >= plan.predicted.device:
                        break
                    aim = lower
                    continue
            if (key := program_key(variant, plan)) in keys:
                break
            if best is None and variant.deep:
                best, more = self._shallow(candidates, aim, charge_of(variant, plan))
                if best is not None:
                    rounds, beside = rounds + more, beside + more - 1
                    keys.add(program_key(best.variant, best.plan))
                    tried |= _tried(best.variant, best.plan)
                    if best.fits:
                        return best, rounds, tried
            keys.add(key)
            tried |= _tried(variant, plan)
            made, more = self.planned(candidates, variant, plan, aim)
            rounds, beside = rounds + more, beside + more - 1
            if made is None:
                break
            variant, plan = made.variant, made.plan
            keys.add(program_key(variant, plan))
            if loose is not None and made.compiled.device >= loose:
                candidates.release()
            loose = None
            if best is None or made.compiled.device < best.compiled.device:
                best = made
            if made.misplaced:
                best = None if best is made else best
                break
            if made.fits:
                best = made
                best, more = self.lifted(candidates, made, seen[-1] if seen else None, parts, beat)
                rounds += more
                break
            parts = max(parts, variant.parts)
            if made.compiled.memory is None:
                target = int(min(aim, plan.predicted.device) * REFUSED)
            else:
                seen.append((plan.predicted.device, int(made.compiled.device * scale)))
                target = _lower(seen, int(request.budget * scale))
            if plan.predicted.device > aim or target >= aim:
                break
            aim = target
        return best, rounds, tried

    def planned(
        self, candidates: Candidates, variant: Variant, plan: Plan, aim: Bytes, *, once: bool = False
    ) -> tuple[Made | None, int]:
        """The plan compiled, after a miss also with bodies in order: the smaller, and the number compiled.

        If order helps, bodies stay in order from then on. ``once``: in one way only.
        """
        made = self.compiles.planned(variant, plan, once=once)
        if made is None or made.compiled.memory is None or made.fits:
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

    def _shallow(self, candidates: Candidates, aim: Bytes, charge: Seconds) -> tuple[Made | None, int]:
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

        ``missed`` None: the model's error is assumed equal to that of ``fits``.
        """
        request, scale = self.request, self.scale
        budget = request.budget * scale
        work = sum(fits.variant.problem.costs.charge)
        gain = GAIN * work
        if missed is None:
            spare = 2 * int(budget - fits.compiled.device * scale)
            missed = fits.plan.predicted.device + spare, int(fits.compiled.device * scale) + spare
            gain = UNSURE * work
        count = 0
        for _ in range(LIFTS if on("lifted_plans") else 0):
            predicted, compiled = fits.plan.predicted.device, fits.compiled.device * scale
            if budget - compiled <= SPARE * budget or missed[0] <= predicted or missed[1] <= compiled:
                break
            aim = predicted + int((budget - compiled) / (missed[1] - compiled) * (missed[0] - predicted))
            variant, plan = self.cheapest(candidates, aim)
            same = plan.changes_nothing and variant.as_it_is
            dear = charge_of(variant, plan) >= beat
            if same or dear or not self._saves((variant, plan), fits, gain) or plan.predicted.device > aim:
                break
            made, count = self.compiles.planned(variant, plan, best=True), count + 1
            if made is None or made.compiled.memory is None or made.misplaced:
                break
            if made.fits:
                if fits is self._quicker(fits, made):
                    break  # less work by the model, and more by what was compiled
                fits = made
            else:
                missed = made.plan.predicted.device, int(made.compiled.device * scale)
        return fits, count

    def _quicker(self, fits: Made, cheaper: Made) -> Made:
        """Of two plans that fit, the one with the shorter step if compiled kernels are known and steps count; else the
        cheaper by the model."""
        before, now = fits.compiled.time, cheaper.compiled.time
        if self.request.device.traffic_weight < 1 or before is None or now is None:
            return cheaper
        return cheaper if now.seconds <= before.seconds else fits

    def _saves(self, found: tuple[Variant, Plan], fits: Made, gain: Seconds = 0.0) -> bool:
        """Whether a plan saves ``gain`` over one that fits and is worth a compile."""
        return charge_of(*found) + max(gain, plans.PAYS) < charge_of(fits.variant, fits.plan) and self.worth(*found)


def with_and_without_host(candidates: Candidates) -> list[Candidates]:
    """Fresh candidates; also by recomputation alone, if bytes may wait on the host."""
    anew = [candidates.anew()]
    if candidates.written.request.host_budget:
        anew.append(candidates.anew())
        anew[-1].forget_host()
    return anew


def _tried(variant: Variant, plan: Plan) -> set[str]:
    """The parts of a plan that may be left out after a miss."""
    hosted = plan.offload_bytes > variant.request.state_bytes
    return {way for way, used in (("host", hosted), ("early", variant.has(EARLY_UPDATES))) if used}


def _lower(seen: list[tuple[Bytes, Bytes]], budget: Bytes) -> Bytes:
    """The aim after misses; ``seen``: (predicted, compiled) bytes, the latest last.

    Lower by the last miss, or by the line through the last two if that is lower. If the model's error grows with what
    is dropped, the first rule never arrives.
    """
    (p, c) = seen[-1]
    target = min(p, budget) - max(c - budget, 0)
    if len(seen) > 1 and on("two_misses"):
        (q, d) = seen[-2]
        slope = min(max((d - c) / (q - p), FLATTEST), 1.0) if q > p else 1.0
        target = min(target, int(p - (c - budget) / slope))
    return target
