"""Among many jobs bytes are shifted by turns: those on some devices now, those on others next.

Invariant: the devices that waited longest are among the next, and half of each turn is left to chance, so that jobs of
all devices meet each other and what they share, as host bytes, goes from one to the other. Chance is that of the turn's
number: equal histories get equal turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from jaxtensile.runtime.decide.leases import Lease

RESTLESS: Final = 128
"""Jobs among which bytes are shifted whenever something changes: in some milliseconds. Among more, by turns."""


class Rota:
    """The turns of devices."""

    def __init__(self) -> None:
        self.at_once = RESTLESS
        """Jobs of one turn, unless one device has more."""
        self.turn = 0
        """Number of the last turn."""
        self._had: dict[str, int] = {}
        """The last turn of each device."""

    def next(self, held: Sequence[Lease]) -> tuple[Sequence[Lease], list[str]]:
        """The leases whose turn it is, and their devices: all leases if they are few."""
        there: dict[str, list[Lease]] = {}
        for lease in held:
            for name in lease.devices:
                there.setdefault(name, []).append(lease)
        if len(held) <= self.at_once:
            return held, [*there]
        chosen: dict[int, Lease] = {}
        names: list[str] = []
        order, mixed = sorted(there, key=self._waits_since), Random(self.turn)
        while order:
            name = order.pop(0 if len(chosen) <= self.at_once // 2 else mixed.randrange(len(order)))
            more = [a for a in there[name] if a.id not in chosen]
            if not chosen or len(chosen) + len(more) <= self.at_once:
                chosen.update((a.id, a) for a in more)
                names.append(name)
        return [*chosen.values()], names

    def took(self, names: Iterable[str]) -> None:
        """These devices had their turn."""
        self.turn += 1
        self._had.update(dict.fromkeys(names, self.turn))

    def all_had(self, part: Sequence[Lease], since: int) -> bool:
        """Whether all devices of a part had a turn after the one numbered ``since``."""
        return all(self._waits_since(name) > since for a in part for name in a.devices)

    def waits_since(self, part: Sequence[Lease]) -> int:
        """The last turn of the device of a part that waited longest."""
        return min((self._waits_since(name) for a in part for name in a.devices), default=-1)

    def _waits_since(self, name: str) -> int:
        return self._had.get(name, -1)
