"""Who is charged how many bytes of what?

Invariant: no charge that is not measured raises a sum above its limit, capacity − reserve; a lease is charged on all
its resources at once or on none. There is one account per device and one for pinned host memory. An account is *gated*
where the jobs share a process and take turns with their steps: then only the largest temp counts, because XLA
allocates a step's temporaries when the step is launched and has one compute stream per device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.leases import NOTHING, Charge
from jaxtensile.units import Bytes, format_bytes


class OvercommitError(CoordinatorError):
    """A charge that does not fit; nothing was charged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What there is of one resource."""

    capacity: Bytes
    reserve: Bytes = 0
    """Never granted."""
    gated: bool = False
    """One step at a time."""

    @property
    def limit(self) -> Bytes:
        return max(self.capacity - self.reserve, 0)


class Account:
    """The charges of one resource."""

    __slots__ = ("capacity", "charges", "gated", "limit", "persistent", "temps")

    def __init__(self, capacity: Capacity) -> None:
        self.charges: dict[int, Charge] = {}
        self.persistent: Bytes = 0
        """Sum of what stays."""
        self.temps: Bytes = 0
        """Sum of the steps' temporaries."""
        self.resize(capacity)

    def resize(self, capacity: Capacity) -> None:
        """Another capacity; what is charged stays charged."""
        self.capacity, self.limit, self.gated = capacity, capacity.limit, capacity.gated

    @property
    def used(self) -> Bytes:
        """Bytes charged."""
        if self.gated:
            return self.persistent + max((c.temp for c in self.charges.values()), default=0)
        return self.persistent + self.temps

    @property
    def free(self) -> Bytes:
        """Bytes that may still be charged; negative while the limit is exceeded."""
        return self.limit - self.used

    def used_with(self, lease: int, charge: Charge) -> Bytes:
        """Bytes charged if that lease were charged this."""
        old = self.charges.get(lease, NOTHING)
        persistent = self.persistent - old.persistent + charge.persistent
        if self.gated:
            others = max((c.temp for k, c in self.charges.items() if k != lease), default=0)
            return persistent + max(others, charge.temp)
        return persistent + self.temps - old.temp + charge.temp

    def used_instead(self, charges: Mapping[int, Charge]) -> Bytes:
        """Bytes charged if those leases were charged this."""
        persistent, temps = self.persistent, self.temps
        for lease, charge in charges.items():
            old = self.charges.get(lease, NOTHING)
            persistent += charge.persistent - old.persistent
            temps += charge.temp - old.temp
        if not self.gated:
            return persistent + temps
        others = max((c.temp for k, c in self.charges.items() if k not in charges), default=0)
        return persistent + max([others, *(c.temp for c in charges.values())])

    def put(self, lease: int, charge: Charge) -> None:
        """Charge a lease this instead of what it was charged."""
        old = self.charges.get(lease, NOTHING)
        if old == charge:
            return
        self.persistent += charge.persistent - old.persistent
        self.temps += charge.temp - old.temp
        if charge.persistent or charge.temp:
            self.charges[lease] = charge
        else:
            self.charges.pop(lease, None)


class Ledger:
    """One account per resource."""

    __slots__ = ("accounts",)

    def __init__(self, capacities: Mapping[str, Capacity]) -> None:
        self.accounts = {name: Account(capacity) for name, capacity in capacities.items()}

    def resize(self, capacities: Mapping[str, Capacity]) -> None:
        """Other capacities. A resource that is not named any more has none, and keeps what is charged to it."""
        for name, account in self.accounts.items():
            account.resize(capacities.get(name) or Capacity(capacity=0, gated=account.gated))
        for name in capacities.keys() - self.accounts.keys():
            self.accounts[name] = Account(capacities[name])

    def know(self, resources: Iterable[str]) -> None:
        """Have an account for each resource, without capacity where it is a new one."""
        for name in resources:
            if name not in self.accounts:
                self.accounts[name] = Account(Capacity(capacity=0))

    def charged(self, lease: int, resources: Sequence[str]) -> tuple[Charge, ...]:
        """What a lease is charged of each resource."""
        accounts = self.accounts
        return tuple([accounts[r].charges.get(lease, NOTHING) for r in resources])

    def fits(self, lease: int, resources: Sequence[str], charges: Sequence[Charge]) -> bool:
        """May that lease be charged this, on all resources at once? A charge that adds nothing to a sum always may."""
        for name, charge in zip(resources, charges, strict=True):
            account = self.accounts[name]
            used = account.used_with(lease, charge)
            if used > account.limit and used > account.used:
                return False
        return True

    def fit(self, rows: Sequence[tuple[int, Sequence[str], Sequence[Charge]]]) -> bool:
        """May all these leases be charged this together?"""
        instead: dict[str, dict[int, Charge]] = {}
        for lease, resources, charges in rows:
            for name, charge in zip(resources, charges, strict=True):
                instead.setdefault(name, {})[lease] = charge
        return all(
            self.accounts[name].used_instead(mine) <= self.accounts[name].limit for name, mine in instead.items()
        )

    def charge(self, lease: int, resources: Sequence[str], charges: Sequence[Charge]) -> None:
        """Charge a lease this instead of what it was charged. Raises ``OvercommitError``, and nothing was charged."""
        if not self.fits(lease, resources, charges):
            name, charge = next(
                (r, c) for r, c in zip(resources, charges, strict=True) if not self.fits(lease, (r,), (c,))
            )
            account = self.accounts[name]
            raise OvercommitError(
                f"{format_bytes(charge.level)} for lease {lease} do not fit on {name}: "
                f"{format_bytes(account.used)} of {format_bytes(account.limit)} are charged; wait for others to shrink"
            )
        self.measured(lease, resources, charges)

    def measured(self, lease: int, resources: Sequence[str], charges: Sequence[Charge]) -> None:
        """Charge a lease what it really holds, whatever the limit: refusing it would not make it less."""
        for name, charge in zip(resources, charges, strict=True):
            self.accounts[name].put(lease, charge)

    def release(self, lease: int, resources: Sequence[str]) -> None:
        """Charge a lease nothing."""
        for name in resources:
            self.accounts[name].put(lease, NOTHING)

    def wider(self, resources: Sequence[str], old: Sequence[Charge], new: Sequence[Charge]) -> tuple[Charge, ...]:
        """What covers both charges, as while a job moves from one to the other: the larger level, and where steps
        take turns the larger of each part, because the other jobs' temporaries count with either."""
        return tuple(
            Charge(max(a.persistent, b.persistent), max(a.temp, b.temp))
            if self.accounts[name].gated
            else (b if b.level > a.level else a)
            for name, a, b in zip(resources, old, new, strict=True)
        )
