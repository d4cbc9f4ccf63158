"""Plan, compile, and after a miss plan again for what XLA added.

Invariant: only a measured number flows from one round to the next.
"""

from __future__ import annotations

import math

from jaxtensile.ir.plan import Plan
from jaxtensile.planner.rounds import CLOSE, HOPELESS, Rounds
from jaxtensile.rewrites.early_updates import EARLY_UPDATES
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.variant import Variant, charge_of, program_key
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds
from jaxtensile.xla.compile import Compiled

ROUNDS = 4
"""Plans compiled at most, each in every way of its platform until one fits. A guess: each takes a compile.

Twice as many if the program without the user's checkpoints is tried first, in vain.
"""
ROUNDS_IF_CLOSE = 6
"""Plans at most once one came within ``CLOSE``. A guess."""
FLATTEST = 0.4
"""Least saving in XLA's allocation per byte saved in the model, as assumed. A guess."""
REACH = (0.0, 0.5, 0.75)
"""How far towards what missed an aim is raised that nothing at hand meets, as shares of the way. Guesses."""
REFUSED = 0.9
"""Factor on the aim after a compiler ran out of memory without a figure. A guess."""


def closest(
    rounds: Rounds, candidates: Candidates, first: tuple[Variant, Plan] | None, *, beat: Seconds = math.inf
) -> tuple[Made | None, int]:
    """The plan closest to the budget, and the number compiled. One that fits is lifted only to plans that cost less
    than ``beat``.

    If plans with bytes on the host miss or are refused, recomputation alone gets as many rounds: a ``host_budget``
    costs compiles, never a fit. Updates moved behind their gradients, which XLA may postpone, are given up in the
    same way.
    """
    budget = rounds.request.budget
    best, count, tried = _Series(rounds, candidates, first, beat).run()
    for way, forget in (("host", candidates.forget_host), ("early", candidates.forget_early_updates)):
        if (best is not None and best.fits) or rounds.doubted:
            break
        if way not in tried:
            continue
        forget()
        first = rounds.cheapest(candidates, budget)
        if first[1].predicted.device > HOPELESS * budget:
            continue
        second, more, also = _Series(rounds, candidates, first, beat).run()
        tried |= also
        made = [m for m in (best, second) if m is not None]
        best, count = min(made, key=lambda m: m.compiled.device, default=None), count + more
    return best, count


class _Series:
    """Plans for ever lower aims, each compiled, until one fits.

    ``first``: the first, if known. One that fits is lifted only to plans that cost less than ``beat``.
    """

    def __init__(
        self, rounds: Rounds, candidates: Candidates, first: tuple[Variant, Plan] | None, beat: Seconds
    ) -> None:
        self.rounds, self.compiles, self.request = rounds, rounds.compiles, rounds.request
        self.candidates, self.beat = candidates, beat
        self.next = first
        """The plan that comes next, if known."""
        self.scale = rounds.scale
        self.aim = int(self.request.budget * self.scale)
        if not self.request.device.backend.own_memory:
            self.aim -= self.request.state_bytes  # its host memory is its device memory
        self.best: Made | None = None
        """The smallest so far."""
        self.count, self.spent = 0, 0
        """Programs compiled, and rounds spent: one for each plan in all its ways, none for barriers alone before it."""
        self.tried: set[str] = set()
        """Which of bytes on the ``host`` and ``early`` updates were tried."""
        self.order: tuple[Variant, Plan] | None = None
        """The program as it is with barriers alone, if not compiled yet."""
        self._seen: list[tuple[Bytes, Bytes]] = []
        self._keys: set[int] = set()
        self._parts = 1
        self._loose: Bytes | None = None
        """Bytes of the program as it is, if its bodies are kept in order instead."""

    def run(self) -> tuple[Made | None, int, set[str]]:
        """The smallest plan, the number compiled, and what was ``tried``."""
        close = CLOSE * self.request.budget
        while not self.rounds.doubted and self.spent < (
            ROUNDS if self.best is None or self.best.compiled.device > close else ROUNDS_IF_CLOSE
        ):
            found = self._chosen()
            if found is None or not self._compiled(*found):
                break
        return self.best, self.count, self.tried

    def _chosen(self) -> tuple[Variant, Plan] | None:
        """The plan to compile next; None if there is none, or the program fits as it is."""
        while True:
            (variant, plan), self.next = self.next or self.rounds.cheapest(self.candidates, self.aim), None
            if not self.rounds.worth(variant, plan):
                return None
            if self.best is None and plan.predicted.device > self.aim and self._fits_after_all(plan):
                return None
            if not (plan.changes_nothing and variant.as_it_is):
                return self._or_order(variant, plan)
            plain = self.compiles.known(variant)
            if variant.undone is None and plain is None and plan.predicted.device <= self.aim:
                # With its checkpoints it may fit as it is, at the least price.
                made = self.compiles.as_it_is(variant, plan)
                if made.fits:
                    self.best = made
                    return None
                plain = made.compiled
            if self._held(variant, plan, plain):
                continue
            # The model thinks that the program fits as it is, XLA knows better: hold it in order, or aim lower.
            ordered = variants.held_in_order(variant, plan)
            new = ordered is not plan and program_key(variant, ordered) not in self._keys
            self.order = (variant, ordered) if new and self.rounds.worth(variant, ordered) else self.order
            over = 1 / REFUSED if plain is None or plain.memory is None else plain.device / self.request.budget
            lower = int(plan.predicted.device / over) if plain is not None and over > 1.0 else self.aim
            if lower >= min(self.aim, plan.predicted.device):
                found, self.order = self.order, None
                return found
            self.aim = self._within_reach(lower, min(self.aim, plan.predicted.device))

    def _within_reach(self, aim: Bytes, above: Bytes) -> Bytes:
        """``aim``, or more, below ``above``, if a plan is at hand for that alone.

        An aim is a guess of what XLA adds. Where nothing at hand is as small, a search for it takes long and ends with
        the dearest plan; what is at hand may do.
        """
        if aim <= 0 or not on("within_reach"):
            return aim
        aims = (aim + int(share * (above - aim)) for share in REACH)
        return next((a for a in aims if self.rounds.at_hand(self.candidates, a)), aim)

    def _fits_after_all(self, plan: Plan) -> bool:
        """Whether the program as written fits where the model sees neither anything fit nor a plan save much."""
        written = self.candidates.written
        if self.compiles.known(written) is not None or written.plain.device > CLOSE * plan.predicted.device:
            return False
        made = self.compiles.as_it_is(written, written.solve(written.plain.device))
        self.best = made if made.fits else None
        return made.fits

    def _held(self, variant: Variant, plan: Plan, plain: Compiled | None) -> bool:
        """Whether bodies are kept in order from now on, because the program as it is needs more than predicted."""
        if self._loose is not None or plain is None or not plain.memory:
            return False
        more = int(plain.device * self.scale) - plan.predicted.device
        if more <= 0 or not self.candidates.hold(variant, more, self.aim):
            return False
        self._loose = plain.device
        return True

    def _or_order(self, variant: Variant, plan: Plan) -> tuple[Variant, Plan]:
        """The plan, or the program with barriers alone if that is cheaper; the plan then comes next."""
        order = self.order
        if order is None or (plan.predicted.device <= self.aim and charge_of(*order) >= charge_of(variant, plan)):
            return variant, plan
        self.next, self.order = (variant, plan), None
        return order

    def _compiled(self, variant: Variant, plan: Plan) -> bool:
        """Compile a plan and learn from it; whether another may follow."""
        if (key := program_key(variant, plan)) in self._keys:
            return False
        if not self.spent and variant.deep and self._fits_shallow(variant, plan):
            return False
        self._keys.add(key)
        self.tried |= _tried(variant, plan)
        made, more = self.rounds.planned(self.candidates, variant, plan, self.aim)
        self.count, self.spent = self.count + more, self.spent + (self.next is None)
        if made is None:
            return False
        self._keys.add(program_key(made.variant, made.plan))
        if self._loose is not None and made.compiled.device >= self._loose:
            self.candidates.release()
        self._loose = None
        if self.best is None or made.compiled.device < self.best.compiled.device:
            self.best = made
        if made.misplaced:
            self.best = None if self.best is made else self.best
            return False
        if made.fits:
            made = self._or_next(made)
            missed = self._seen[-1] if self._seen else None
            self.best, more = self.rounds.lifted(self.candidates, made, missed, self._parts, self.beat)
            self.count += more
            return False
        return not self.rounds.doubted and (self.next is not None or self._lowered(made))

    def _or_next(self, order: Made) -> Made:
        """The program with barriers alone, or the plan that it came before, if compiled kernels find it shorter.

        Barriers split kernels, which the model does not see.
        """
        plain, now = self.compiles.plain, order.compiled.time
        if self.next is None or plain is None or plain.time is None or now is None:
            return order
        variant, plan = self.next
        least = plain.time.seconds + variant.seconds + plan.overhead
        if now.seconds <= least or plan.predicted.device > self.aim or self.request.device.traffic_weight < 1:
            return order
        made, more = self.rounds.planned(self.candidates, variant, plan, self.aim)
        self.count += more
        if made is None or not made.fits or made.misplaced or made.compiled.time is None:
            return order
        return made if made.compiled.time.seconds < now.seconds else order

    def _fits_shallow(self, variant: Variant, plan: Plan) -> bool:
        """Whether a plan without deep changes, which is compiled before one with them, fits."""
        made, more = self.rounds.shallow(self.candidates, self.aim, charge_of(variant, plan))
        if made is None:
            return False
        self.count, self.spent = self.count + more, self.spent + 1
        self._keys.add(program_key(made.variant, made.plan))
        self.tried |= _tried(made.variant, made.plan)
        if self.best is None or made.compiled.device < self.best.compiled.device:
            self.best = made
        return made.fits

    def _lowered(self, made: Made) -> bool:
        """Aim lower after a plan that misses; whether that is possible."""
        self._parts = max(self._parts, made.variant.parts)
        predicted = made.plan.predicted.device
        if made.compiled.memory is None:
            target = int(min(self.aim, predicted) * REFUSED)
        else:
            self._seen.append((predicted, int(made.compiled.device * self.scale)))
            target = _lower(self._seen, int(self.request.budget * self.scale))
        if predicted > self.aim or target >= self.aim:
            return False
        self.aim = self._within_reach(target, min(self.aim, predicted))
        return True


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
