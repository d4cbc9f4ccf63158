"""Whether a job can ever be admitted, and its demand.

Invariant: a job that is not refused here is admitted at once if it is alone.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from jaxtensile.runtime.decide.demand import KEPT, Demand, demand_of
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Ledger
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.units import Bytes, format_bytes


def demanded(
    ladder: tuple[Rung, ...], devices: tuple[str, ...], floor: Bytes, want: Bytes, ledger: Ledger
) -> Demand | str:
    """The job's demand, with the lowest plan at or above the floor as guarantee; or one sentence why it can never be
    admitted."""
    found = _chosen(ladder, (*devices, HOST), floor, want)
    if isinstance(found, str):
        return found
    accounts = ledger.accounts
    for name, need in found.least:
        if name not in accounts or need > accounts[name].limit:
            break
    else:
        if HOST not in devices:
            return found
    return _missing(devices, found, ledger) or found


def _missing(devices: tuple[str, ...], demand: Demand, ledger: Ledger) -> str:
    """The reason why the demand can never be met; empty if it can."""
    accounts = ledger.accounts
    there = sorted(accounts.keys() - {HOST})
    unknown = [name for name in devices if name not in there]
    if unknown:
        return f"there is no device {unknown[0]!r} here, only {', '.join(there) or 'none'}"
    for name, need in demand.least:
        limit = accounts[name].limit if name in accounts else 0
        if need > limit:
            return (
                f"the smallest plan needs {format_bytes(need)} on {name}, which can ever grant {format_bytes(limit)}: "
                "bring a smaller plan"
            )
    return ""


@lru_cache(KEPT)
def _chosen(ladder: tuple[Rung, ...], resources: tuple[str, ...], floor: Bytes, want: Bytes) -> Demand | str:
    """The demand of the rungs that a job may use, or the fault in its request."""
    levels = [r.level for r in ladder]
    if len(set(resources[:-1])) < len(resources) - 1:
        return "a device is named twice"
    if any(a >= b for a, b in pairwise(levels)):
        return f"the ladder's levels must ascend: {', '.join(map(format_bytes, levels[:8]))}"
    if levels[-1] < floor:
        return f"no plan reaches the floor of {format_bytes(floor)}: the largest has {format_bytes(levels[-1])}"
    low = next(k for k, level in enumerate(levels) if level >= floor)
    if want < levels[low]:
        return f"no plan lies between the floor of {format_bytes(floor)} and the {format_bytes(want)} that are wanted"
    return demand_of(ladder, resources, low, max(k for k, level in enumerate(levels) if level <= want))
