"""The turns of threads of one process in virtual time, by the order that real threads have theirs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtensile.runtime.decide.gate_order import Order
from jaxtensile.runtime.decide.turns import share
from jaxtensile.runtime.simulate.clock import Clock
from jaxtensile.units import Seconds


class Member:
    """One job's place at a gate."""

    __slots__ = ("priority", "served", "share", "since", "tag")

    def __init__(self, gate: SimulatedGate, priority: int, weight: float) -> None:
        self.priority, self.share = priority, share(priority, weight)
        self.tag, self.served = 0.0, gate.order.now
        self.since: Seconds = 0.0


class _Waiting(NamedTuple):
    order: tuple[float, int, int]
    mark: Member
    then: Callable[[], object]


class SimulatedGate:
    """The gate of one device: one turn at a time."""

    __slots__ = ("_clock", "_numbers", "order")

    def __init__(self, clock: Clock) -> None:
        self._clock, self._numbers = clock, 0
        self.order = Order[Member, _Waiting]()

    def take(self, member: Member, then: Callable[[], object]) -> None:
        """Call ``then()`` once it is the member's turn."""
        member.tag = self.order.tag(member.served)
        if self.order.begins(member):
            self.order = self.order.begun(member, member.tag)
            member.since = self._clock.now
            then()
            return
        self._numbers += 1
        self.order = self.order.joined(_Waiting((member.tag, -member.priority, self._numbers), member, then))

    def give(self, member: Member) -> None:
        """A member's turn is over."""
        now = self._clock.now
        took = now - member.since
        member.served = member.tag + took / member.share
        if self.order.passes_on(member.served):
            self._next()
        else:
            self.order = self.order.keeping(member, took, now)
            self._clock.at(self.order.kept_until, self._kept_over, self.order)

    def leave(self, member: Member) -> None:
        """A member has ended."""
        if self.order.owner is member:
            self._next()
            return
        for waiter in self.order.waiting:
            if waiter.mark is member:
                self.order = self.order.without(waiter)

    def _kept_over(self, order: Order[Member, _Waiting]) -> None:
        if self.order.kept is order.kept and self.order.kept_until == order.kept_until and self.order.owner is None:
            self._next()

    def _next(self) -> None:
        first = self.order.waiting[0] if self.order.waiting else None
        self.order = self.order.following()
        if first is not None:
            first.mark.since = self._clock.now
            first.then()
