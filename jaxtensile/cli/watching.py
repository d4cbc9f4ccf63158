"""``jaxtensile status`` and ``jaxtensile top``: the coordinator's state as text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

from jaxtensile.cli.serving import configured, place_of
from jaxtensile.errors import CoordinatorError, UnreachableError
from jaxtensile.runtime.daemon.inquiry import Inquirer, ask
from jaxtensile.runtime.protocol.messages import DeviceView, LeaseView, Snapshot
from jaxtensile.units import Seconds, format_bytes, format_seconds

_BAR: Final = 32
"""Letters of a device's bar: a third of a line."""
_EVENTS: Final = 8
"""Lines of recent events: the state is one screen."""
_CLEAR: Final = "\x1b[H\x1b[J"


def status(options: argparse.Namespace) -> tuple[Snapshot, Path]:
    """The coordinator's state, and its socket. Raises ``UnreachableError``."""
    _, config = configured(options)
    path = place_of(options, config)
    return ask(path), path


def top(options: argparse.Namespace) -> None:
    """Print the state repeatedly until Ctrl-C; without a terminal, once or ``--count`` times."""
    if not options.every > 0:
        raise CoordinatorError(f"--every {options.every:g}: give a number of seconds above 0")
    _, config = configured(options)
    path = place_of(options, config)
    screen = sys.stdout.isatty()
    left = options.count if options.count is not None else (None if screen else 1)
    inquirer: Inquirer | None = None
    while left is None or left > 0:
        try:
            inquirer = inquirer or Inquirer(path)
            text = as_text(inquirer.snapshot(), path)
        except UnreachableError as error:
            if left is not None and not screen:
                raise
            if inquirer is not None:
                inquirer.close()
            inquirer, text = None, str(error)
        print(_CLEAR + text if screen else text, flush=True)
        left = None if left is None else left - 1
        if left is None or left > 0:
            time.sleep(options.every)
    if inquirer is not None:
        inquirer.close()


def as_json(snapshot: Snapshot, path: Path) -> str:
    """Everything as JSON; sizes in bytes, times in seconds or as their names say."""
    told: dict[str, Any] = to_builtins(snapshot)
    del told["type"], told["more"]
    return json.dumps({"socket": str(path), **told}, indent=1)


def as_text(snapshot: Snapshot, path: Path) -> str:
    """Devices, jobs and recent events, for people."""
    states = f"{len(snapshot.leases)} jobs, {snapshot.waiting} of them waiting"
    lines = [f"coordinator at {path}: {snapshot.phase}, policy {snapshot.policy}, start {snapshot.epoch}; {states}", ""]
    lines += _devices(snapshot.devices)
    if snapshot.leases:
        lines += ["", *table(_JOBS, [_job(lease) for lease in snapshot.leases])]
    if snapshot.events:
        lines += ["", "lately"]
        for e in snapshot.events[: -_EVENTS - 1 : -1]:
            rung = f" rung {e.rung}" if e.rung >= 0 and e.what in ("granted", "revoked", "shrunk") else ""
            who = f" {e.job}" if e.job else ""
            detail = f": {e.detail}" if e.detail else ""
            lines.append(f"{format_seconds(e.ago):>8} ago  {e.what}{who}{rung}{detail}")
    return "\n".join(lines)


def _devices(devices: Sequence[DeviceView]) -> list[str]:
    width = max((len(d.device) for d in devices), default=0)
    lines: list[str] = []
    for d in devices:
        limit = max(d.capacity - d.reserve, 1)
        share = d.charged / limit
        floor = min(round(_BAR * d.guaranteed / limit), _BAR)
        full = min(round(_BAR * share), _BAR)
        bar = "#" * min(full, floor) + "=" * max(full - floor, 0) + "." * (_BAR - full)
        lines.append(
            f"{d.device:<{width}}  [{bar}] {share:4.0%}  {format_bytes(d.charged)} of {format_bytes(limit)} granted, "
            f"{format_bytes(d.guaranteed)} of that for good{', steps take turns' if d.turns else ''}"
        )
    return lines


_JOBS: Final = ("job", "lease", "pid", "state", "plan", "granted", "in use", "peak", "step", "s/step", "waited", "")


def _job(lease: LeaseView) -> tuple[str, ...]:
    plan = "-" if lease.rung < 0 else f"{lease.rung + 1} of {lease.rungs}"
    in_use = format_bytes(lease.in_use[0]) if lease.in_use else "-"
    return (
        lease.job,
        str(lease.lease),
        str(lease.pid),
        f"{lease.turn} turn" if lease.turn and lease.state == "held" else lease.state,
        plan,
        format_bytes(lease.charged[0]),
        in_use,
        format_bytes(lease.peak) if lease.peak else "-",
        str(lease.step) if lease.step else "-",
        format_seconds(lease.step_us / 1e6) if lease.step_us else "-",
        duration(lease.waited),
        "; ".join(lease.faults),
    )


def duration(time: Seconds) -> str:
    """``0.04`` → ``'0.0s'``, ``4000.0`` → ``'1h07m'``."""
    if time < 60:
        return f"{time:.1f}s"
    minutes, seconds = divmod(int(time), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns: all but the first right-aligned, the last as long as it is."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    lines: list[str] = []
    for row in (head, *rows):
        cells = [
            f"{row[0]:<{widths[0]}}",
            *(f"{c:>{w}}" for c, w in zip(row[1:-1], widths[1:-1], strict=True)),
            row[-1],
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
