"""The bytes charged to leases: one account per device and one for pinned host memory.

An account is *gated* if its jobs take turns with their steps: then the largest temp counts, or the temps of all whose
turn it is, where that is more (``runtime.client.gate`` says why; between processes, ``runtime.decide.turns``).

Invariant: only a measured charge raises a sum above its limit, capacity − reserve. A lease is charged on all resources
or on none. Whether jobs take turns changes only while nothing is charged: jobs know it of their lease.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.decide.leases import NOTHING, Charge
from jaxtensile.units import Bytes, format_bytes


class OvercommitError(CoordinatorError):
    """A charge that does not fit; nothing was charged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of one resource."""

    capacity: Bytes
    reserve: Bytes = 0
    """Never granted."""
    gated: bool = False
    """Steps take turns."""

    @property
    def limit(self) -> Bytes:
        return max(self.capacity - self.reserve, 0)


class Account:
    """The charges of one resource."""

    __slots__ = ("capacity", "charges", "gated", "limit", "persistent", "temps", "turns", "used")

    def __init__(self, capacity: Capacity) -> None:
        self.charges: dict[int, Charge] = {}
        self.turns: dict[int, None] = {}
        """Leases whose turn it is, in the order in which it came."""
        self.persistent: Bytes = 0
        """Sum of the persistent bytes."""
        self.temps: Bytes = 0
        """Temporary bytes: the sum; if gated, the largest, or the sum of those whose turn it is, whichever is more."""
        self.used: Bytes = 0
        """Bytes charged, the sum of both."""
        self.resize(capacity)

    def resize(self, capacity: Capacity) -> None:
        """Change the capacity; charges stay, and while there are any, so does whether jobs take turns."""
        gated = self.gated if self.charges else capacity.gated
        self.capacity, self.limit, self.gated = capacity, capacity.limit, gated
        self._add_up()

    @property
    def free(self) -> Bytes:
        """Bytes that may still be charged; negative above the limit."""
        return self.limit - self.used

    def used_with(self, lease: int, charge: Charge) -> Bytes:
        """Bytes charged if that lease had this charge."""
        return self.used + self.more(lease, self.charges.get(lease, NOTHING), charge)

    def more(self, lease: int, old: Charge, new: Charge) -> Bytes:
        """Bytes added if that lease's charge changed from ``old`` to ``new``."""
        more = new.persistent - old.persistent
        if not self.gated:
            return more + new.temp - old.temp
        if len(self.turns) > 1:
            return more + self._temps_instead({lease: new}) - self.temps
        if new.temp >= self.temps:
            return more + new.temp - self.temps
        return more if old.temp < self.temps else more + max(self._temps((lease,)), new.temp) - self.temps

    def allows(self, lease: int, old: Charge, new: Charge) -> bool:
        """Whether that lease's charge may change so; true if it adds nothing."""
        more = self.more(lease, old, new)
        if more > 0 and self.used + more > self.limit:
            return False
        if not self.gated or len(self.turns) < 2:
            return True
        # The turns may hide what it adds, and they end.
        then = self.persistent + new.persistent - old.persistent + max(self._temps((lease,)), new.temp)
        return then <= self.limit or then <= self.beside

    def used_instead(self, charges: Mapping[int, Charge], *, turns: bool = True) -> Bytes:
        """Bytes charged if those leases had these charges; ``turns``: while the same have their turns."""
        persistent, temps = self.persistent, self.temps
        for lease, charge in charges.items():
            old = self.charges.get(lease, NOTHING)
            persistent += charge.persistent - old.persistent
            temps += charge.temp - old.temp
        if not self.gated:
            return persistent + temps
        if turns and len(self.turns) > 1:
            return persistent + self._temps_instead(charges)
        return persistent + max([self._temps(charges), *(c.temp for c in charges.values())])

    def put(self, lease: int, charge: Charge) -> None:
        """Replace a lease's charge."""
        if not (charge.persistent or charge.temp):
            self.drop(lease)
            return
        old = self.charges.get(lease, NOTHING)
        self.charges[lease] = charge
        self.persistent = persistent = self.persistent + charge.persistent - old.persistent
        if not self.gated:
            self.temps = temps = self.temps + charge.temp - old.temp
        else:
            if len(self.turns) > 1:
                self.temps = self._temps_instead({})
            elif charge.temp >= self.temps:
                self.temps = charge.temp
            elif old.temp == self.temps:
                self.temps = self._temps(())
            temps = self.temps
        self.used = persistent + temps

    def drop(self, lease: int) -> None:
        """Remove a lease's charge."""
        old = self.charges.pop(lease, None)
        if old is not None:
            self.persistent -= old.persistent
            if not self.charges:
                self.gated = self.capacity.gated
            if not self.gated:
                self.temps -= old.temp
                self.used = self.persistent + self.temps
            else:
                self._add_up()

    # Turns.

    def agree(self, gated: bool) -> None:
        """Let jobs take turns, or not, as they were told."""
        if self.gated != gated:
            self.gated = gated
            self._add_up()

    def turn(self, lease: int, *, its: bool) -> None:
        """Whether it is that lease's turn, from now on."""
        if its:
            self.turns[lease] = None
        else:
            self.turns.pop(lease, None)
        self._add_up()

    @property
    def beside(self) -> Bytes:
        """Bytes charged if it were nobody's turn but one at a time."""
        return self.persistent + (self._temps(()) if self.gated else self.temps)

    def turn_fits(self, lease: int) -> bool:
        """Whether it may be that lease's turn beside those whose turn it is. Alone it may always."""
        mine = self.charges.get(lease, NOTHING).temp
        others = sum(self.charges[k].temp for k in self.turns if k != lease and k in self.charges)
        return not self.gated or not mine or not others or self.persistent + others + mine <= self.limit

    def _add_up(self) -> None:
        self.temps = self._temps_instead({}) if self.gated and len(self.turns) > 1 else self._temps(())
        self.used = self.persistent + self.temps

    def _temps_instead(self, charges: Mapping[int, Charge]) -> Bytes:
        """Temporary bytes where jobs take turns, if those leases had these charges."""
        largest = max([self._temps(charges), *(c.temp for c in charges.values())])
        return max(largest, sum((charges.get(k) or self.charges.get(k, NOTHING)).temp for k in self.turns))

    def _temps(self, without: Container[int]) -> Bytes:
        """Temporary bytes of the other leases: the sum, or the largest if gated."""
        temps = [c.temp for k, c in self.charges.items() if k not in without]
        return max(temps, default=0) if self.gated else sum(temps)


class Ledger:
    """One account per resource."""

    __slots__ = ("_charged", "_unsure", "accounts")

    def __init__(self, capacities: Mapping[str, Capacity]) -> None:
        self.accounts = {name: Account(capacity) for name, capacity in capacities.items()}
        self._charged: dict[int, tuple[Charge, ...]] = {}
        """By lease, in the order of its resources."""
        self._unsure = False
        """A sum may be above its limit."""

    def resize(self, capacities: Mapping[str, Capacity]) -> None:
        """Change the capacities. A resource that is no longer named has none, and keeps its charges."""
        for name, account in self.accounts.items():
            account.resize(capacities.get(name) or Capacity(capacity=0, gated=account.gated))
        for name in capacities.keys() - self.accounts.keys():
            self.accounts[name] = Account(capacities[name])
        self._unsure = True

    def know(self, resources: Iterable[str]) -> None:
        """Add missing accounts, without capacity."""
        for name in resources:
            if name not in self.accounts:
                self.accounts[name] = Account(Capacity(capacity=0))

    def charged(self, lease: int, resources: Sequence[str]) -> tuple[Charge, ...]:
        """A lease's charge on each resource."""
        return self._charged.get(lease) or (NOTHING,) * len(resources)

    def fits(self, lease: int, resources: Sequence[str], charges: Sequence[Charge]) -> bool:
        """Whether the lease may have these charges on all resources; true if they add nothing to a sum."""
        before = self._charged.get(lease)
        for k, new in enumerate(charges):
            old = before[k] if before else NOTHING
            if old is not new and not self.accounts[resources[k]].allows(lease, old, new):
                return False
        return True

    def fit(self, rows: Sequence[tuple[int, Sequence[str], Sequence[Charge]]]) -> bool:
        """Whether all these leases may have these charges together."""
        instead: dict[str, dict[int, Charge]] = {}
        for lease, resources, charges in rows:
            for k, charge in enumerate(charges):
                if (mine := instead.get(resources[k])) is None:
                    instead[resources[k]] = {lease: charge}
                else:
                    mine[lease] = charge
        for name, mine in instead.items():
            account = self.accounts[name]
            if account.used_instead(mine) > account.limit:
                return False
        return True

    def charge(self, lease: int, resources: Sequence[str], charges: tuple[Charge, ...]) -> None:
        """Replace a lease's charges. Raises ``OvercommitError`` and changes nothing if they do not fit."""
        if not self.fits(lease, resources, charges):
            name, charge = next(
                (r, c) for r, c in zip(resources, charges, strict=True) if not self.fits(lease, (r,), (c,))
            )
            account = self.accounts[name]
            raise OvercommitError(
                f"{format_bytes(charge.level)} for lease {lease} do not fit on {name}: "
                f"{format_bytes(account.used)} of {format_bytes(account.limit)} are charged; wait for others to shrink"
            )
        self.put(lease, resources, charges)

    def measured(self, lease: int, resources: Sequence[str], charges: tuple[Charge, ...]) -> None:
        """Charge a lease what it really holds, even above the limit: refusing would not reduce it."""
        self._unsure = True
        self.put(lease, resources, charges)

    def put(self, lease: int, resources: Sequence[str], charges: tuple[Charge, ...]) -> None:
        """Replace a lease's charges, which are known to fit or have no limit."""
        before = self._charged.get(lease)
        if before is charges:
            return
        self._charged[lease] = charges
        for k, new in enumerate(charges):
            if new is not (before[k] if before else NOTHING):
                self.accounts[resources[k]].put(lease, new)

    def over(self) -> set[str]:
        """The resources charged above their limits, also if turns are taken one at a time."""
        if not self._unsure:
            return set()
        found = {name for name, account in self.accounts.items() if account.beside > account.limit}
        self._unsure = bool(found)
        return found

    def release(self, lease: int, resources: Sequence[str]) -> None:
        """Remove a lease's charges, and its turn."""
        for name in resources:
            self.accounts[name].turns.pop(lease, None)
        for k, charge in enumerate(self._charged.pop(lease, ())):
            if charge is not NOTHING:
                self.accounts[resources[k]].drop(lease)

    def wider(self, resources: Sequence[str], old: Sequence[Charge], new: tuple[Charge, ...]) -> tuple[Charge, ...]:
        """A charge that covers both, for a move between them: the larger level. On gated resources the larger of each
        part, as other jobs' temporaries count with either."""
        wider: list[Charge] = []
        changed = False
        for name, a, b in zip(resources, old, new, strict=True):
            if a is b or (b.persistent >= a.persistent and b.temp >= a.temp):
                wider.append(b)
                continue
            changed = True
            if self.accounts[name].gated:
                wider.append(Charge(max(a.persistent, b.persistent), max(a.temp, b.temp)))
            else:
                wider.append(b if b.level > a.level else a)
        return tuple(wider) if changed else new
