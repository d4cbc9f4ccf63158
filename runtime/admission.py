"""Can a job be admitted at all, and as what lease?

Invariant: a job that is not refused here is admitted as soon as nobody else is there.
"""

from __future__ import annotations

from itertools import pairwise

from jaxtensile.runtime.leases import HOST, Lease, Process, needs_of
from jaxtensile.runtime.ledger import Ledger
from jaxtensile.runtime.messages import Admit
from jaxtensile.units import format_bytes


def impossible(message: Admit, ledger: Ledger) -> str:
    """Why a job can never be admitted, in one sentence; empty if it can."""
    wrong = _wrong_with(message)
    if wrong:
        return wrong
    devices = sorted(ledger.accounts.keys() - {HOST})
    unknown = [d for d in message.devices if d not in devices]
    if unknown:
        return f"there is no device {unknown[0]!r} here, only {', '.join(devices) or 'none'}"
    rung = next(r for r in message.ladder if r.level >= message.floor)
    for name, need in (*((d, rung.level) for d in message.devices), (HOST, rung.host)):
        limit = ledger.accounts[name].limit if name in ledger.accounts else 0
        if need > limit:
            return (
                f"the smallest plan needs {format_bytes(need)} on {name}, which can ever grant {format_bytes(limit)}: "
                "bring a smaller plan"
            )
    return ""


def _wrong_with(message: Admit) -> str:
    levels = [r.level for r in message.ladder]
    if len(set(message.devices)) < len(message.devices):
        return "a device is named twice"
    if any(a >= b for a, b in pairwise(levels)):
        return f"the ladder's levels must ascend: {', '.join(map(format_bytes, levels[:8]))}"
    if levels[-1] < message.floor:
        return f"no plan reaches the floor of {format_bytes(message.floor)}: the largest has {format_bytes(levels[-1])}"
    if message.want < next(level for level in levels if level >= message.floor):
        return (
            f"no plan lies between the floor of {format_bytes(message.floor)} and the {format_bytes(message.want)} "
            "that are wanted"
        )
    return ""


def asked_for(message: Admit, number: int, process: Process) -> Lease:
    """The lease that a job asks for, which waits. Guaranteed is the lowest plan at or above the floor."""
    levels = [r.level for r in message.ladder]
    return Lease(
        id=number,
        process=process,
        job=message.job,
        resources=(*message.devices, HOST),
        ladder=message.ladder,
        low=next(k for k, level in enumerate(levels) if level >= message.floor),
        high=max(k for k, level in enumerate(levels) if level <= message.want),
        needs=needs_of(message.ladder, len(message.devices)),
        priority=message.priority,
        weight=message.weight,
    )
