"""The coordinator's state for Prometheus.

Invariant: text exposition format 0.0.4; sizes in exact bytes, times in seconds. One request per connection; only GET is
answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.coordinate.status import STATES, state_of, view
from jaxtensile.units import Seconds

LONGEST_REQUEST: Final = 8192
"""Bytes of an HTTP request that are read: the usual limit of servers for its head."""
_PHASES: Final = ("starting", "recovering", "serving", "draining")


def answer(request: bytes, text: str) -> bytes:
    """The response to an HTTP request; ``text``: the metrics."""
    method, _, rest = request.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method != b"GET":
        return _response("405 Method Not Allowed", "only GET\n")
    if path not in (b"/metrics", b"/"):
        return _response("404 Not Found", "see /metrics\n")
    return _response("200 OK", text)


def _response(status: str, text: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def exposition(coordinator: Coordinator, now: Seconds, more: Mapping[str, float]) -> str:
    """All metrics; ``more``: gauges of the daemon itself."""
    arbiter = coordinator.arbiter
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, rows: Iterable[tuple[Mapping[str, object], float]]) -> None:
        lines.append(f"# HELP jaxtensile_{name} {text}")
        lines.append(f"# TYPE jaxtensile_{name} {kind}")
        for labels, value in rows:
            inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
            lines.append(f"jaxtensile_{name}{f'{{{inside}}}' if inside else ''} {value!r}")

    accounts = sorted(arbiter.ledger.accounts.items())
    floors = arbiter.floors.accounts
    for name, text, values in (
        ("capacity_bytes", "What there is.", [a.capacity.capacity for _, a in accounts]),
        ("reserve_bytes", "What is never granted.", [a.capacity.reserve for _, a in accounts]),
        ("charged_bytes", "What leases are charged.", [a.used for _, a in accounts]),
        ("guaranteed_bytes", "What cannot be taken from anyone.", [floors[d].used for d, _ in accounts]),
    ):
        metric(name, "gauge", text, [({"device": d}, v) for (d, _), v in zip(accounts, values, strict=True)])
    states = Counter(state_of(lease) for lease in arbiter.leases.values())
    rows = [({"state": s}, states[s]) for s in STATES]
    metric("leases", "gauge", "Leases by state.", rows)
    phases = [({"phase": p}, int(p == coordinator.phase)) for p in _PHASES]
    metric("phase", "gauge", "1 for the phase the coordinator is in.", phases)
    metric("epoch", "counter", "Starts of the coordinator.", [({}, coordinator.epoch)])
    counters = [({"what": k}, v) for k, v in sorted(coordinator.counters.items()) if k != "waited_us"]
    metric("events_total", "counter", "What was counted since the start.", counters)
    waited = coordinator.counters["waited_us"] / 1e6
    metric("admission_wait_seconds_sum", "counter", "Seconds that admitted jobs waited.", [({}, waited)])
    admitted = coordinator.counters["admitted"]
    metric("admission_wait_seconds_count", "counter", "Jobs that were admitted.", [({}, admitted)])
    views = [view(arbiter, lease, now) for lease in arbiter.leases.values()]
    labels = [{"job": v.job, "lease": v.lease, "pid": v.pid} for v in views]
    for name, text, values in (
        ("job_charged_bytes", "Charged on its first device.", [v.charged[0] for v in views]),
        ("job_peak_bytes", "Its measured peak.", [v.peak for v in views]),
        ("job_rung", "The plan it was told; -1 while it waits.", [v.rung for v in views]),
        ("job_step", "Steps it has done.", [v.step for v in views]),
        ("job_step_seconds", "Its last step.", [v.step_us / 1e6 for v in views]),
        ("job_wait_seconds", "How long it waited to be admitted.", [v.waited for v in views]),
    ):
        metric(name, "gauge", text, [*zip(labels, values, strict=True)])
    for name, value in more.items():
        metric(name, "gauge", "Of the daemon.", [({}, value)])
    return "\n".join(lines) + "\n"


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
