"""A simulation as trace JSON, for ui.perfetto.dev: each machine a process, each job a thread, bytes a counter."""

from __future__ import annotations

import json
from typing import Any

from jaxtensile.units import Bytes, Seconds


class Trace:
    """The slices and counters of a simulation, in the order in which they end."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._machines: dict[str, int] = {}
        self._jobs: dict[tuple[str, str], int] = {}

    def slice(self, machine: str, job: str, what: str, began: Seconds, ended: Seconds, rung: int) -> None:
        """A job did something on a machine."""
        pid, tid = self._machine(machine), self._job(machine, job)
        about = {"name": what, "ph": "X", "pid": pid, "tid": tid, "ts": 1e6 * began, "dur": 1e6 * (ended - began)}
        self.events.append({**about, "args": {"rung": rung}})

    def bytes(self, machine: str, device: str, at: Seconds, used: Bytes) -> None:
        """The bytes in use on a device from now on."""
        about = {"name": f"{device} bytes", "ph": "C", "pid": self._machine(machine), "ts": 1e6 * at}
        self.events.append({**about, "args": {"used": used}})

    def to_json(self) -> str:
        """The trace as text."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": self.events}, separators=(",", ":"))

    def _machine(self, machine: str) -> int:
        if machine not in self._machines:
            self._machines[machine] = len(self._machines) + 1
            self._name("process_name", self._machines[machine], 0, machine)
        return self._machines[machine]

    def _job(self, machine: str, job: str) -> int:
        if (machine, job) not in self._jobs:
            self._jobs[machine, job] = len(self._jobs) + 1
            self._name("thread_name", self._machine(machine), self._jobs[machine, job], job)
        return self._jobs[machine, job]

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self.events.append({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
