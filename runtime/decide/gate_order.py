"""The order of turns at the gate of one device, for jobs of one process.

Start-time fair queueing (Goyal, Vin, Cheng 1996). A turn's tag is max(virtual time, end of the member's last turn); the
lowest runs. A turn of t seconds ends t ÷ share after its tag. A member that uses less than its share waits for at most
the running turn, and no class starves.

Invariant: a value, without clock, locks or threads; ``runtime.client.gate`` puts threads to it, ``runtime.simulate``
a virtual clock.
"""

from __future__ import annotations

from bisect import insort
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from jaxtensile.units import Seconds

KEPT: Final = 0.1
"""Share of its last turn for which the next is kept for a member below its share that returns at once. Otherwise others
get every second turn, however long turns take. A guess."""
KEPT_MOST: Final[Seconds] = 2e-3
"""Seconds that a turn is kept at most: the device is idle meanwhile. A guess."""

T = TypeVar("T")
M = TypeVar("M", covariant=True)
"""What has a turn: a frame of a thread, or a simulated job."""


class Waiter(Protocol[M]):
    """Who waits for a turn."""

    @property
    def order(self) -> tuple[float, int, int]:
        """Tag, class and arrival; the least goes first."""
        ...

    @property
    def mark(self) -> M:
        """What has the turn then."""
        ...


W = TypeVar("W", bound=Waiter[object])


class Order(NamedTuple, Generic[T, W]):
    """``owner``: whose turn it is, None: nobody's; ``waiting``: in the order of their turns."""

    owner: T | None = None
    waiting: tuple[W, ...] = ()
    now: float = 0.0
    """Virtual time: the tag of the turn that runs, or ran last."""
    kept: object = None
    """The member that the next turn is kept for, unasked, until ``kept_until``."""
    kept_until: Seconds = 0.0

    def tag(self, served: float) -> float:
        """The tag of a member's next turn; ``served``: the virtual time at which its last one ended."""
        return max(self.now, served)

    def begins(self, member: object) -> bool:
        """Whether a member's turn begins as it asks."""
        return self.owner is None and (not self.waiting or self.kept is member)

    def begun(self, owner: T, tag: float) -> Order[T, W]:
        """After that turn has begun."""
        return self._replace(owner=owner, now=tag, kept=None)

    def joined(self, waiter: W) -> Order[T, W]:
        """With one more who waits."""
        found = [*self.waiting]
        insort(found, waiter, key=lambda w: w.order)
        return self._replace(waiting=tuple(found))

    def without(self, waiter: W) -> Order[T, W]:
        """Without one who waits no more."""
        return self._replace(waiting=tuple([w for w in self.waiting if w is not waiter]))

    def passes_on(self, served: float) -> bool:
        """Whether the next turn is for those who wait: the member whose turn ends has had as much as the first."""
        return not self.waiting or served >= self.waiting[0].order[0]

    def keeping(self, member: object, took: Seconds, now: Seconds) -> Order[T, W]:
        """After a turn of a member that has had less than its share and will be back in a moment."""
        return self._replace(owner=None, kept=member, kept_until=now + min(KEPT * took, KEPT_MOST))

    def following(self) -> Order[T, W]:
        """With the next turn begun, if anybody waits."""
        if not self.waiting:
            return self._replace(owner=None, kept=None)
        first, *others = self.waiting
        return self._replace(owner=first.mark, now=first.order[0], kept=None, waiting=tuple(others))
