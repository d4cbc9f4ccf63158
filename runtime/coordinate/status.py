"""The coordinator's state as a message.

Invariant: a message stays below the frame limit, for any number of leases and length of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxtensile.runtime.coordinate.chronicle import Chronicle
from jaxtensile.runtime.decide.arbiter import Arbiter
from jaxtensile.runtime.decide.leases import Lease, State
from jaxtensile.runtime.protocol.messages import DeviceView, EventView, LeaseView, Snapshot
from jaxtensile.units import KIB, Seconds

PAGE: Final = 64
"""Leases in one message. A guess: ``PAGE_BYTES`` bounds long names."""
PAGE_BYTES: Final = 32 * KIB
"""Bytes of leases in one message, approximate; one lease is always sent. Half of ``wire.LIMIT``, beside devices and
events."""
LETTER, KIND, LEASE = 4, 32, 256
"""Bytes, upper bounds: of a letter in UTF-8, of a resource's entry, of the rest of a lease."""
EVENTS: Final = 16
"""Recent events sent: twice what ``status`` shows. A guess."""
STATES: Final = (*(s.value for s in State if s is not State.FREED), "suspended")
"""The values of ``state_of``."""


def snapshot(
    arbiter: Arbiter,
    after: int,
    epoch: int,
    phase: str,
    counters: Mapping[str, int],
    chronicle: Chronicle,
    now: Seconds,
) -> Snapshot:
    """All devices, recent events, and the leases above ``after`` that fit."""
    later = sorted(k for k in arbiter.leases if k > after)
    page: list[LeaseView] = []
    size = 0
    for k in later[:PAGE]:
        lease = arbiter.leases[k]
        size += LETTER * len(lease.job) + sum(LETTER * len(name) + KIND for name in lease.resources) + LEASE
        if page and size > PAGE_BYTES:
            break
        page.append(view(arbiter, lease, now))
    last = [*chronicle.entries][-EVENTS:] if not after else []
    return Snapshot(
        epoch=epoch,
        phase=phase,
        policy=arbiter.settings.policy,
        devices=tuple(
            DeviceView(
                device=name,
                capacity=account.capacity.capacity,
                reserve=account.capacity.reserve,
                charged=account.used,
                guaranteed=arbiter.floors.accounts[name].used,
                temps=account.temps,
                turns=account.gated,
            )
            for name, account in sorted(arbiter.ledger.accounts.items())
        ),
        leases=tuple(page),
        more=len(later) > len(page),
        waiting=len(arbiter.queue),
        counters=dict(counters),
        events=tuple(
            EventView(
                ago=now - e.at,
                what=e.what,
                job=e.job,
                lease=e.lease,
                pid=e.pid,
                rung=e.rung,
                detail=e.detail,
                waited=e.waited,
                step=e.step,
                peak=e.peak,
            )
            for e in last
        ),
    )


def state_of(lease: Lease) -> str:
    """The state in one word, for people."""
    return "suspended" if lease.suspended and lease.state is State.HELD else lease.state.value


def turn_of(lease: Lease) -> str:
    """Where a lease is with its turns, in one word."""
    if lease.turn >= 0:
        return "ends" if lease.ending else "has"
    return "waits" if lease.asks >= 0 else ""


def view(arbiter: Arbiter, lease: Lease, now: Seconds) -> LeaseView:
    """What is known of one lease."""
    return LeaseView(
        lease=lease.id,
        job=lease.job,
        pid=lease.process.pid,
        state=state_of(lease),
        resources=lease.resources,
        charged=tuple(c.level for c in arbiter.charged(lease)),
        rung=lease.rung,
        rungs=len(lease.ladder),
        priority=lease.priority,
        weight=lease.weight,
        step=lease.step,
        step_us=lease.step_us,
        peak=lease.peak,
        waited=lease.waited if lease.rung >= 0 else now - lease.asked,
        in_use=lease.in_use,
        faults=tuple(sorted(lease.faults)),
        turn=turn_of(lease),
    )
