"""What is the state of the coordinator, as a message?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxtensile.runtime.arbiter import Arbiter
from jaxtensile.runtime.leases import Lease
from jaxtensile.runtime.messages import DeviceView, LeaseView, Snapshot

PAGE: Final = 64
"""Leases in one message, so that it stays below the limit of a frame."""


def snapshot(arbiter: Arbiter, after: int, epoch: int, phase: str, counters: Mapping[str, int]) -> Snapshot:
    """All devices, and the leases with numbers above ``after``, ``PAGE`` at most."""
    later = sorted(k for k in arbiter.leases if k > after)
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
            )
            for name, account in sorted(arbiter.ledger.accounts.items())
        ),
        leases=tuple(_view(arbiter, arbiter.leases[k]) for k in later[:PAGE]),
        more=len(later) > PAGE,
        waiting=len(arbiter.queue),
        counters=dict(counters),
    )


def _view(arbiter: Arbiter, lease: Lease) -> LeaseView:
    return LeaseView(
        lease=lease.id,
        job=lease.job,
        pid=lease.process.pid,
        state=lease.state.value,
        resources=lease.resources,
        charged=tuple(c.level for c in arbiter.charged(lease)),
        rung=lease.rung,
        rungs=len(lease.ladder),
        priority=lease.priority,
        weight=lease.weight,
        step=lease.step,
        step_us=lease.step_us,
        peak=lease.peak,
        faults=tuple(sorted(lease.faults)),
    )
