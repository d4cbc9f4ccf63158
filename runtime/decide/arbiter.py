"""Decisions: which jobs are admitted, grow, or are asked to shrink.

1. Shrink where charges exceed the limit: a capacity was lowered, or a job holds more than it said.
2. Admit waiters, by class and arrival, if their floor fits. If it only fits beside the floors of all, make room.
3. Distribute and shift the surplus that no waiter is to get.

A job *can give up* bytes if it speaks and is not known to keep them. In favour of a job with a lease, it must also have
held them for ``min_hold`` or be of a lower class. Other jobs count with their charges.

Invariant: a decision is charged at once, and fits. Only admission waits: the first waiter of a class waits for bytes
that others can give up, and later ones that need the same resources wait behind it. Waiters hold nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

from jaxtensile.runtime.decide.demand import Demand
from jaxtensile.runtime.decide.events import Rules, Settings
from jaxtensile.runtime.decide.knapsack_kinds import Groups
from jaxtensile.runtime.decide.leases import (
    FREED,
    GRANT,
    HELD,
    NOTHING,
    QUEUED,
    REVOKE,
    REVOKING,
    Charge,
    Happening,
    Lease,
    after,
)
from jaxtensile.runtime.decide.ledger import Capacity, Ledger
from jaxtensile.runtime.decide.links import copies, loads_of
from jaxtensile.runtime.decide.policy import Claim, Option, Room, ahead, divide
from jaxtensile.runtime.decide.rota import Rota
from jaxtensile.units import Seconds, format_bytes

TRIES: Final = 2
"""Repeated divisions for jobs that found no way down. A guess."""
WAYS: Final = 4
"""Most blocked jobs that one decision makes room for: each takes a division. A guess."""
REST: Final[Seconds] = 2.5e-4
"""Seconds for each job that had its turn, until the next turn: about ten times what it takes, so that messages are
answered meanwhile."""
BESIDE: Final = 4
"""Times the work of a shift among jobs that copy, or run beside such. Measured: up to 65 ms for 128 of them in threes
(``benchmarks/coordinator/divide``)."""


class _Ways(Struct, eq=False):
    """The rungs that a lease can reach from its charge."""

    stay: Option
    higher: tuple[Option, ...]
    """Higher rungs worth going to, charged to cover the way there."""
    lower: tuple[tuple[Option, tuple[Charge, ...] | None], ...] | None = None
    """Lower rungs. Each has the charge that covers both ends, or None if the present charge does. As a whole None: not
    computed yet."""


class _Settled(NamedTuple):
    """A part that was decided about."""

    seen: object
    """Its state."""
    turn: int
    began: Seconds
    """The turn after which, and the time at which it was seen so first, or a minimum hold had ended."""
    until: Seconds
    """Until when there is no change to make: the end of the first minimum hold; -inf while not all devices had their
    turn."""


class Arbiter:
    """The leases and their charges. Report events to it, then ``settle``."""

    def __init__(self, capacities: Mapping[str, Capacity], settings: Settings, rules: Rules) -> None:
        self.settings, self.rules = settings, rules
        self.ledger = Ledger(capacities)
        self.floors = Ledger(capacities)
        """Bytes that cannot be taken away: guaranteed rungs, and charges of jobs that cannot give up."""
        self.leases: dict[int, Lease] = {}
        self.queue: list[Lease] = []
        self.hungry: set[int] = set()
        """Held, and below the wanted rung."""
        self.revoking: set[int] = set()
        self.above: set[int] = set()
        """Leases that speak and are above their floor: they can give up bytes, some after their minimum hold."""
        self._copying: set[int] = set()
        """Leases whose steps copy to host memory and back, on some rung."""
        self.told: dict[int, Lease] = {}
        """Leases with a rung decided since the coordinator last asked."""
        self.recheck: Seconds | None = None
        """End of a minimum hold, or of a rest, that something waits for."""
        self._rest: Seconds = -inf
        """Until when no bytes are shifted among many jobs."""
        self._put_off = False
        """Whether a shift waits for that."""
        self.grants = True
        self._ways: dict[int, _Ways] = {}
        """By lease, if unchanged since its last decision, under the settings of then."""
        self._under = settings
        self._settled: dict[int, _Settled] = {}
        """Parts that were decided about, by first lease."""
        self.rota = Rota()

    # What happens to leases.

    def enqueue(self, lease: Lease) -> None:
        """A job asks to be admitted."""
        self.leases[lease.id] = self.told[lease.id] = lease
        self._know_copies(lease)
        if self.queue and self.queue[-1].priority < lease.priority:
            insort(self.queue, lease, key=lambda a: (-a.priority, a.id))
        else:
            self.queue.append(lease)  # the last to come has the highest number

    def restore(self, lease: Lease, charges: tuple[Charge, ...]) -> None:
        """Add a lease of an earlier coordinator, with its charges."""
        for ledger in (self.ledger, self.floors):
            ledger.know(lease.resources)
            for name in lease.resources:
                if not ledger.accounts[name].charges:
                    ledger.accounts[name].agree(name in lease.gated)
        self.leases[lease.id] = lease
        self._know_copies(lease)
        self.ledger.measured(lease.id, lease.resources, charges)
        self.changed(lease)

    def resize(self, capacities: Mapping[str, Capacity]) -> None:
        """Change the capacities."""
        self.ledger.resize(capacities)
        self.floors.resize(capacities)
        self._ways.clear()

    def happened(self, lease: Lease, happening: Happening, charges: tuple[Charge, ...] | None = None) -> None:
        """Change a lease's state, and charge what it really holds, if known. Raises ``LeaseError``."""
        state = after(lease.state, happening)
        if lease.state is QUEUED:
            self.queue.remove(lease)
            self._call_off(lease.id)
        lease.state = state
        if charges is not None:
            self.ledger.measured(lease.id, lease.resources, charges)
        if state is FREED:
            self.ledger.release(lease.id, lease.resources)
            self.floors.release(lease.id, lease.resources)
            self.hungry.discard(lease.id)
            self.revoking.discard(lease.id)
            self.above.discard(lease.id)
            self._copying.discard(lease.id)
            self.told.pop(lease.id, None)
            self._ways.pop(lease.id, None)
            self._settled.pop(lease.id, None)
            del self.leases[lease.id]
        else:
            self.changed(lease)

    def charged(self, lease: Lease) -> tuple[Charge, ...]:
        """A lease's charges, by resource."""
        return self.ledger.charged(lease.id, lease.resources)

    def renew(self, lease: Lease, asked: Demand, rung: int) -> str:
        """Give a lease another ladder, and charge it ``rung`` of that. The reason if it does not fit, and nothing
        changes; else empty."""
        if not asked.low <= rung <= asked.high:
            return f"a job cannot be on rung {rung} of a ladder of which it may use {asked.low} to {asked.high}"
        for ledger, charges, what in (
            (self.ledger, asked.needs[rung], "are free"),
            (self.floors, asked.needs[asked.low], "can be guaranteed"),
        ):
            if not ledger.fits(lease.id, lease.resources, charges):
                return f"{format_bytes(max(c.level for c in charges))} are needed, and not so many {what}"
        lease.ladder, lease.needs, lease.low, lease.high = asked.ladder, asked.needs, asked.low, asked.high
        lease.slowdowns, lease.best, lease.touched, lease.rung = asked.slowdowns, asked.best, asked.touched, rung
        self._know_copies(lease)
        self.ledger.charge(lease.id, lease.resources, lease.needs[rung])
        self.changed(lease)
        return ""

    def _know_copies(self, lease: Lease) -> None:
        copy = copies(lease.ladder[lease.low : lease.high + 1])
        self._copying.add(lease.id) if copy else self._copying.discard(lease.id)

    def covered(self, lease: Lease) -> int:
        """The highest rung within the charge."""
        now = self.charged(lease)
        for rung in range(lease.high, lease.rung, -1):
            if self.ledger.wider(lease.resources, now, lease.needs[rung]) == now:
                return rung
        return lease.rung

    def wanting(self) -> list[Lease]:
        """The leases that wait to be admitted, or would be faster with more bytes."""
        return [*self.queue, *(lease for k in self.hungry if self._way(lease := self.leases[k]).higher)]

    def changed(self, lease: Lease) -> None:
        """Update everything that depends on a changed lease."""
        k, held, revoking = lease.id, lease.state is HELD, lease.state is REVOKING
        self._ways.pop(k, None)
        speaks = (held or revoking) and not lease.stuck
        guaranteed = lease.needs[lease.low]
        if not speaks:
            # It keeps what it has, or may come back and be guaranteed a rung that needs more of something else.
            charges = self.charged(lease)
            guaranteed = charges if lease.stuck else self.ledger.wider(lease.resources, charges, guaranteed)
        self.floors.put(k, lease.resources, guaranteed)
        self.hungry.add(k) if held and lease.rung < lease.high else self.hungry.discard(k)
        self.revoking.add(k) if revoking else self.revoking.discard(k)
        self.above.add(k) if speaks and lease.rung > lease.low else self.above.discard(k)

    # Decisions.

    def settle(self, now: Seconds, *, grants: bool = True) -> None:
        """Decide; ``grants``: whether any lease may get more."""
        self.grants = grants
        if self.settings is not self._under:
            self._ways.clear()
            self._under = self.settings
        for name, account in self.ledger.accounts.items():
            self.floors.accounts[name].agree(account.gated)
        over = self.ledger.over()
        if over:
            self._shrink(now, over, {}, None)  # as far as the jobs can give up bytes
        self._put_off = False
        if grants and (self.queue or self.hungry):
            held_back = self._admit(now) | over if self.queue else over
            # Where steps take turns, a division was made for some largest temp: one that is smaller leaves bytes.
            gated = any(a.gated for a in self.ledger.accounts.values())
            while self.hungry and self._spread(now, held_back) and gated:
                pass
        self.recheck = None
        if self.above and (over or self.queue or self.hungry):
            ends = (self.leases[k].since + self.settings.min_hold for k in self.above)
            ends = [end for end in ends if end > now]
            self.recheck = min([*ends, self._rest] if self._put_off else ends, default=None)

    def _tell(self, lease: Lease, rung: int, happening: Happening, now: Seconds) -> None:
        lease.rung = rung
        lease.state = after(lease.state, happening)
        if happening is GRANT:
            lease.since, lease.deadline, lease.wanted_by = now, None, None
        elif lease.deadline is None:
            lease.deadline = now + self.settings.revoke_deadline
        self.told[lease.id] = lease
        self.changed(lease)

    def _call_off(self, waiter: int) -> bool:
        """Free the jobs asked to shrink for a waiter that left; whether there were any. An ACK on its way is stale by
        then, and its job grows again."""
        asked = [lease for k in self.revoking if (lease := self.leases[k]).wanted_by == waiter]
        for lease in asked:
            self._tell(lease, self.covered(lease), GRANT, lease.since)
        return bool(asked)

    def _admit(self, now: Seconds) -> set[str]:
        """Admit waiters; the resources reserved for those that remain."""
        behind: set[str] = set()
        held_back: set[str] = set()
        for lease in [*self.queue]:
            if not lease.touched.isdisjoint(behind):
                behind |= lease.touched
                continue
            floor = lease.needs[lease.low]
            beside_floors = self.floors.fits(lease.id, lease.resources, floor)
            if beside_floors and self.ledger.fits(lease.id, lease.resources, floor):
                self.queue.remove(lease)
                self.ledger.put(lease.id, lease.resources, floor)
                self._tell(lease, lease.low, GRANT, now)
                if self.revoking and self._call_off(lease.id):
                    return self._admit(now)  # those before it may have counted on that
                continue
            behind |= lease.touched
            if beside_floors:
                held_back |= lease.touched
                extra = dict(zip(lease.resources, floor, strict=True))
                self._shrink(now, lease.touched, extra, lease.id)
            if len(behind) == len(self.ledger.accounts):
                break
        return held_back

    def _has_held(self, lease: Lease, now: Seconds, priority: int | None) -> bool:
        return now >= lease.since + self.settings.min_hold or (priority is not None and lease.priority < priority)

    def _promised(self, lease: Lease) -> tuple[Charge, ...]:
        """The charge after the job has done what it was told."""
        return lease.needs[lease.rung] if lease.state is REVOKING else self.charged(lease)

    def _shrink(
        self,
        now: Seconds,
        resources: Collection[str],
        extra: Mapping[str, Charge],
        waiter: int | None,
        going: Mapping[int, tuple[Charge, ...]] = MappingProxyType({}),
        tries: int = TRIES,
    ) -> bool:
        """Ask jobs to shrink until ``extra`` fits on ``resources``; whether any was asked, or earlier orders suffice.

        ``going``: the charges that leases need on their way down. The minimum hold does not protect against a waiter,
        which has nothing and runs no step.

        Jobs whose ways need the same bytes may find none left: they are divided again, beside those told. If too few
        have a way, the division assumes that all do, and room for the ways is made first.
        """
        asked = [self.leases[k] for k in sorted(self.above | self.revoking)]
        touching = [a for a in asked if not a.touched.isdisjoint(resources)]
        promised = {a.id: going.get(a.id) or self._promised(a) for a in touching}
        coming: dict[str, dict[int, Charge]] = {name: {} for name in resources}
        for k, names, charges in [
            *((a.id, a.resources, promised[a.id]) for a in touching if a.state is REVOKING or a.id in going),
            *([] if waiter is None else [(waiter, extra, extra.values())]),
        ]:
            for name, charge in zip(names, charges, strict=True):
                if name in coming:
                    coming[name][k] = charge
        accounts = self.ledger.accounts
        exceeded = {n for n, c in coming.items() if accounts[n].used_instead(c, turns=False) > accounts[n].limit}
        if not exceeded:
            return True  # when those have shrunk that were told to
        waits = waiter is not None
        every = [
            a for a in touching if a.id in self.above and a.id not in going and (waits or self._has_held(a, now, None))
        ]
        able = self._close(every, exceeded)
        while True:
            ids = {a.id for a in able}
            rooms = self._rooms(able, {k: c for k, c in promised.items() if k not in ids}, extra, resources)
            claims = [self._claim(a, (*self._lower(a), self._way(a).stay)) for a in able]
            divides = tries > 0 and _least_fit((), rooms)
            shares = divide(claims, rooms, self.settings.policy) if divides else None
            if shares is not None or able is every or (not divides and _least_fit(claims, rooms)):
                break
            able = every
        closed = divides and waits and shares is None and not _least_fit(claims, rooms)
        if closed:
            rooms = self._rooms(able, going, extra, accounts, self.floors)
            claims = [self._claim(a, (*self._lower(a, closed), self._way(a).stay)) for a in able]
            shares = divide(claims, rooms, self.settings.policy)
        if shares is None:
            if waits and not _least_fit(claims, rooms):
                return False
            shares = {c.id: 0 for c in claims}
        options = [c.options[shares[c.id]] for c in claims]
        downward = [(a, o) for a, o in zip(able, options, strict=True) if o.rung < a.rung]
        blocked = [(a, o) for a, o in downward if not self._revoke(a, o.rung, now, waiter)]
        told = len(blocked) < len(downward)
        if blocked and tries and not closed:
            return self._shrink(now, resources, extra, waiter, going, tries - 1) or told
        for lease, option in blocked[: WAYS if tries else 0]:
            both = self.ledger.wider(lease.resources, self.charged(lease), option.needs)
            if self._shrink(now, lease.touched, {}, waiter, {**going, lease.id: both}, tries - 1):
                return True
        return told

    def _close(self, able: Sequence[Lease], exceeded: Collection[str]) -> Sequence[Lease]:
        """Of many leases those that can make room on ``exceeded`` at once: all on these devices; and, for host bytes,
        some of the lowest class in turn."""
        if len(able) <= self.rota.at_once:
            return able
        first = [a for a in able if any(name in exceeded for name in a.devices)]
        if len(first) >= self.rota.at_once or not any(a.resources[-1] in exceeded for a in able):
            return first
        ids = {a.id for a in first}
        for priority in sorted({a.priority for a in able}):
            if len(ids) >= self.rota.at_once:
                break
            ids.update(a.id for a in self.rota.next([a for a in able if a.priority == priority])[0])
        return [a for a in able if a.id in ids]

    def _rooms(
        self,
        deciding: Sequence[Lease],
        instead: Mapping[int, Sequence[Charge]],
        extra: Mapping[str, Charge],
        exceeded: Collection[str] = (),
        ledger: Ledger | None = None,
    ) -> dict[str, Room]:
        """Room on each resource for the ``deciding`` leases, beside ``extra``.

        Other leases keep their charges in ``ledger`` (default: the arbiter's), or have those in ``instead``. Resources
        not in ``exceeded`` have room for at least the present charges, even above the limit.
        """
        ids = {a.id for a in deciding}
        promised: dict[str, list[Charge]] = {}
        for k, charges in instead.items():
            for name, charge in zip(self.leases[k].resources, charges, strict=True):
                promised.setdefault(name, []).append(charge)
        rooms: dict[str, Room] = {}
        for name in {r for a in deciding for r in a.resources} | extra.keys():
            account = (ledger or self.ledger).accounts[name]
            others, mine = [extra.get(name, NOTHING), *promised.get(name, ())], list[Charge]()
            for k, charge in account.charges.items():
                if k in ids:
                    mine.append(charge)
                elif k not in instead:
                    others.append(charge)
            if account.gated:
                temp = max([c.temp for c in others])
                free = account.limit - sum([c.persistent for c in others])
                now = sum([c.persistent for c in mine]) + max([c.temp for c in mine], default=0)
                now = max(now, sum([c.persistent for c in mine]) + temp)
            else:
                temp = 0
                free = account.limit - sum([c.persistent + c.temp for c in others])
                now = sum([c.persistent + c.temp for c in mine])
            rooms[name] = Room(free if name in exceeded else max(free, now), account.gated, temp)
        return rooms

    def _revoke(self, lease: Lease, rung: int, now: Seconds, waiter: int | None = None) -> bool:
        """Ask a job to go down, if there is a way. Until its ACK it is charged to cover both rungs."""
        charges = lease.needs[rung]
        if self.rules.charge_until_ack:
            charges = self.ledger.wider(lease.resources, self.charged(lease), charges)
        more = self.rules.charge_until_ack and charges != self.charged(lease)
        if not self.ledger.fits(lease.id, lease.resources, charges) or (more and not self.grants):
            return False
        self.ledger.charge(lease.id, lease.resources, charges)
        lease.wanted_by = waiter
        self._tell(lease, rung, REVOKE, now)
        return True

    # The surplus.

    def _spread(self, now: Seconds, held_back: set[str]) -> bool:
        """Give free bytes to jobs that they speed up, or ask others to shrink where that gains more; whether any got
        more.

        A resource is left alone while a job shrinks on it: those bytes are for another job. Among many jobs only some
        are asked to shrink, and others in the next turn, after a rest.
        """
        for k in self.revoking:
            lease = self.leases[k]
            charges, promised = self.charged(lease), lease.needs[lease.rung]
            rows = zip(lease.resources, charges, promised, strict=True)
            held_back |= {name for name, charge, need in rows if need.level < charge.level}
        given, rests, shifted = False, now < self._rest, 0
        for part in self._parts([a for a in self.leases.values() if a.state is HELD], held_back):
            ways = [self._way(a) for a in part]
            if not any(way.higher for way in ways):
                continue
            # Nobody is given or told anything where nothing has changed since that was so.
            accounts = [self.ledger.accounts[name] for name in {r: None for a in part for r in a.resources}]
            seen = ways, [(a.limit, a.persistent, a.temps, (*a.turns,) if len(a.turns) > 1 else ()) for a in accounts]
            known = self._settled.get(part[0].id)
            if known is None or known.seen != seen or -inf < known.until <= now:
                known = _Settled(seen, self.rota.turn, now, -inf)
            elif now < known.until:
                continue
            among: Sequence[Lease] = ()
            if shifted < self.rota.at_once and not (rests and len(part) > self.rota.at_once):
                among, names = self.rota.next(part)
                self.rota.took(names)
                shifted += len(among) * (BESIDE if self._copying else 1)
            given |= self._divide(part, among, now)
            all_had = len(among) == len(part) or self.rota.all_had(part, known.turn)
            self._put_off |= not all_had
            if all(a.id in self._ways for a in part):
                # A hold that ended since the first turn is news to those that had it.
                ends = (a.since + self.settings.min_hold for a in part)
                until = min((end for end in ends if end > known.began), default=inf) if all_had else -inf
                self._put_off |= -inf < until <= now
                self._settled[part[0].id] = known._replace(until=until)
        if not rests and (self._put_off or shifted > self.rota.at_once):
            self._rest = now + REST * shifted  # during a rest it grows no longer
        return given

    def _with_neighbours(self, deciding: Collection[int], held: Sequence[Lease]) -> Sequence[Lease]:
        """The leases that are decided about. If steps run beside copies of others, also those on the same devices, on
        the other devices of these, and so on: what one's copies cost, others bear."""
        if not self._copying:
            return [a for a in held if a.id in deciding]
        numbers = {name: k for k, name in enumerate(self.ledger.accounts)}
        groups = Groups(len(numbers))
        for lease in held:
            groups.join([numbers[name] for name in lease.devices])
        there = {groups.of(numbers[name]) for a in held if a.id in deciding for name in a.devices}
        return [a for a in held if a.id in deciding or any(groups.of(numbers[name]) in there for name in a.devices)]

    def _parts(self, held: Sequence[Lease], held_back: Collection[str]) -> list[list[Lease]]:
        """Leases in groups that share resources, directly or through others, if one in the group wants more; those that
        waited longest for their turn first. Leases that touch ``held_back`` are left out."""
        numbers = {name: k for k, name in enumerate(self.ledger.accounts)}
        groups = Groups(len(numbers))
        touching = [(a, [numbers[name] for name in a.touched]) for a in held if a.touched.isdisjoint(held_back)]
        for _, ks in touching:
            if ks:
                groups.join(ks)
        parts: dict[int, list[Lease]] = {}
        for lease, ks in touching:
            parts.setdefault(groups.of(ks[0]) if ks else -1, []).append(lease)
        wanting = [part for part in parts.values() if any(a.id in self.hungry for a in part)]
        return sorted(wanting, key=self.rota.waits_since)

    def _divide(self, held: Sequence[Lease], among: Sequence[Lease], now: Seconds) -> bool:
        """Divide a part: give leases more, or ask some of ``among`` to shrink for others of these; whether any got
        more."""
        hungry = [a for a in held if a.id in self.hungry]
        given = self._all_get(hungry, now)
        if given is not None:
            return given
        ways = {a.id: self._way(a) for a in held}
        rungs = {k: way.stay for k, way in ways.items()}
        # Where nobody shrinks, what does not fit alone does not fit beside others.
        able = {
            a.id: options
            for a in held
            if (options := [o for o in ways[a.id].higher if self.ledger.fits(a.id, a.resources, o.needs)])
        }
        if able:
            growing = self._with_neighbours(able, held)
            claims = [self._claim(a, (ways[a.id].stay, *able.get(a.id, ()))) for a in growing]
            shares = divide(claims, self._rooms(growing, {}, {}), self.settings.policy)
            if shares is None:
                return False
            rungs.update({c.id: c.options[shares[c.id]] for c in claims})
        if among:
            rungs.update(self._shifted(now, held, among, ways, rungs, max(a.priority for a in hungry)))
        for lease in held:
            if rungs[lease.id].rung < lease.rung:
                self._revoke(lease, rungs[lease.id].rung, now)
        given = False
        for lease in held:
            option = rungs[lease.id]
            if option.rung > lease.rung and self.ledger.fits(lease.id, lease.resources, option.needs):
                self.ledger.charge(lease.id, lease.resources, option.needs)
                self._tell(lease, option.rung, GRANT, now)
                given = True
        return given

    def _all_get(self, hungry: Sequence[Lease], now: Seconds) -> bool | None:
        """Give each job its lowest fastest rung, if all fit: no division does better. True if any got more, None if
        they do not fit."""
        if self.settings.policy == "fair" or self._copying:
            return None  # which is about bytes; or what is fastest alone may not be beside others
        growing: list[tuple[Lease, int, tuple[Charge, ...]]] = []
        enough = 1 - self.settings.min_gain
        for lease in hungry:
            best = lease.best[lease.rung]
            then, now_ = lease.slowdowns[best], lease.slowdowns[lease.rung]
            if then < now_ and then <= now_ * enough:
                wider = self.ledger.wider(lease.resources, self.charged(lease), lease.needs[best])
                growing.append((lease, best, wider))
        if not self.ledger.fit([(lease.id, lease.resources, charges) for lease, _, charges in growing]):
            return None
        for lease, best, charges in growing:
            self.ledger.put(lease.id, lease.resources, charges)
            self._tell(lease, best, GRANT, now)
        return bool(growing)

    def _shifted(
        self,
        now: Seconds,
        held: Sequence[Lease],
        among: Sequence[Lease],
        ways: Mapping[int, _Ways],
        grown: Mapping[int, Option],
        top: int | None,
    ) -> dict[int, Option]:
        """A division in which some leases of ``among`` shrink for others, if it is better than ``grown``, in which none
        shrinks, by ``min_gain``; else nothing.

        A lease in its minimum hold shrinks only for a higher class, at most ``top``.
        """
        ids = {a.id for a in among}
        deciding = self._with_neighbours(ids, held)
        rooms: dict[str, Room] | None = None
        while lower := {
            a.id: options
            for a in among
            if a.id in self.above and self._has_held(a, now, top) and (options := self._lower(a))
        }:
            claims = [
                self._claim(
                    a, (*lower.get(a.id, ()), ways[a.id].stay, *ways[a.id].higher) if a.id in ids else (grown[a.id],)
                )
                for a in deciding
            ]
            stay = {c.id: [o.rung for o in c.options].index(grown[c.id].rung) for c in claims}
            if rooms is None:
                growing = {a.id: grown[a.id].needs for a in held if grown[a.id].rung > a.rung and a.id not in stay}
                rooms = self._rooms(deciding, growing, {})
            shares = divide(claims, rooms, self.settings.policy, stay, self.settings.min_gain)
            if shares is None or not ahead(claims, shares, stay, self.settings.policy, self.settings.min_gain):
                break
            wanted = {c.id: c.options[shares[c.id]] for c in claims}
            gaining = max((a.priority for a in deciding if wanted[a.id].rung > a.rung), default=None)
            if all(wanted[a.id].rung >= a.rung or self._has_held(a, now, gaining) for a in among):
                return wanted
            top = gaining  # lower than it was, so that this ends
        return {}

    def _way(self, lease: Lease) -> _Ways:
        """The rungs a lease can reach, cached until it changes."""
        known = self._ways.get(lease.id)
        if known is None:
            now, least = self.charged(lease), lease.slowdowns[lease.rung] * (1 - self.settings.min_gain)
            known = self._ways[lease.id] = _Ways(
                _option(lease, lease.rung, self._promised(lease)),
                tuple(
                    _option(lease, r, self.ledger.wider(lease.resources, now, lease.needs[r]))
                    for r in range(lease.rung + 1, lease.high + 1)
                    if lease.slowdowns[r] <= least or self._copies_less(lease, r)
                ),
            )
        return known

    def _copies_less(self, lease: Lease, rung: int) -> bool:
        """Whether a rung leaves more of a link to others, where steps run at once."""
        if lease.id not in self._copying or all(self.ledger.accounts[d].gated for d in lease.devices):
            return False
        old, new = lease.ladder[lease.rung], lease.ladder[rung]
        return new.into < old.into or new.out < old.out

    def _claim(self, lease: Lease, options: tuple[Option, ...]) -> Claim:
        beside: tuple[str, ...] = ()
        if self._copying:  # where jobs take turns, each copies alone
            beside = tuple([name for name in lease.devices if not self.ledger.accounts[name].gated])
        return Claim(
            id=lease.id,
            priority=lease.priority,
            weight=lease.weight,
            arrived=lease.id,
            resources=lease.resources,
            options=options,
            floor=lease.ladder[lease.low].level,
            beside=beside,
        )

    def _lower(self, lease: Lease, closed: bool = False) -> tuple[Option, ...]:
        """The lower rungs with a way: a charge covering both ends fits. A lower rung may need more host or gated bytes.
        ``closed``: also rungs without a way."""
        way = self._way(lease)
        if way.lower is None:
            now, rungs = self.charged(lease), range(lease.low, lease.rung)
            both = [self.ledger.wider(lease.resources, now, lease.needs[r]) for r in rungs]
            way.lower = tuple(
                (_option(lease, r, lease.needs[r]), None if wider == now else wider)
                for r, wider in zip(rungs, both, strict=True)
            )
        fits = self.ledger.fits
        return tuple([o for o, wider in way.lower if closed or wider is None or fits(lease.id, lease.resources, wider)])


def _least_fit(claims: Sequence[Claim], rooms: Mapping[str, Room]) -> bool:
    """Whether all claims fit on their first options. A division over several gated devices may miss that, as it takes
    the largest temp of any device for each."""
    left, temps = {name: r.free for name, r in rooms.items()}, {name: r.temp for name, r in rooms.items()}
    for c in claims:
        for name, need in zip(c.resources, c.options[0].needs, strict=True):
            left[name] -= need.persistent if rooms[name].gated else need.level
            if rooms[name].gated:
                temps[name] = max(temps[name], need.temp)
    return all(left[name] >= temps[name] for name in rooms)


def _option(lease: Lease, rung: int, needs: tuple[Charge, ...]) -> Option:
    return Option(rung, needs, lease.slowdowns[rung], lease.ladder[rung].level, loads_of(lease.ladder[rung]))
