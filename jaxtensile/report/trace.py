"""A report as trace JSON, for ui.perfetto.dev or chrome://tracing: bytes over predicted time.

Each program is a process, to overlay the two: a counter of live device bytes beside the budget, a slice per op, and a
slice per stage of repeated ops. Format: JSON trace events, microseconds.
"""

from __future__ import annotations

import json
from typing import Any

from jaxtensile.ir.timeline import BARRIER, Track
from jaxtensile.places import short_place
from jaxtensile.report.facts import Facts

_OPS, _STAGES = 1, 2
"""Thread ids of the slices: any two numbers, shown in this order."""


def as_trace(report: Facts) -> str:
    """The plain and the planned program, each as a process."""
    events: list[dict[str, Any]] = []
    if report.timeline is not None:
        tracks = [("plain", report.timeline.plain), ("planned", report.timeline.planned)]
        for pid, (name, track) in enumerate(tracks, 1):
            if track is not None:
                events += _process(pid, name, track, report.budget)
    about = {"name": report.name, "target": report.target, "budget": report.budget, "times": "predicted"}
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, separators=(",", ":"))


def _process(pid: int, name: str, track: Track, budget: int) -> list[dict[str, Any]]:
    starts = [round(1e6 * s, 3) for s in track.starts()]
    events = [
        _named("process_name", pid, 0, f"{name}, predicted times"),
        _named("process_sort_index", pid, 0, pid),
        _named("thread_name", pid, _OPS, "ops"),
    ]
    stages = track.stages()
    if stages:
        events.append(_named("thread_name", pid, _STAGES, "stages: ops that run again"))
    again = track.repeats()
    at, most = 0.0, -1
    for step, nbytes in enumerate(track.device):
        start, stop = starts[step], starts[step + 1]
        # Several steps at one time are one sample: the most of them.
        if most >= 0 and start > at:
            events.append(_counter(pid, at, most, budget))
            most = -1
        at, most = start, max(most, nbytes)
        if stop > start and track.origin[step] != BARRIER:
            events.append(_slice(pid, track, step, start, stop, again[step]))
    if most >= 0:
        events.append(_counter(pid, at, most, budget))
        events.append(_counter(pid, starts[-1], track.base, budget))
    for number, stage in enumerate(stages, 1):
        start, stop = starts[stage.start], starts[stage.stop]
        told = {"ops": stage.repeated, "first step": stage.start, "last step": stage.stop - 1}
        events.append(
            {
                "name": f"stage {number}",
                "ph": "X",
                "pid": pid,
                "tid": _STAGES,
                "ts": start,
                "dur": round(stop - start, 3),
                "args": told,
            }
        )
    return events


def _slice(pid: int, track: Track, step: int, start: float, stop: float, again: bool) -> dict[str, Any]:
    o = track.origin[step]
    told: dict[str, Any] = {"at": short_place(track.sites.sources[o]), "step": step, "bytes": track.device[step]}
    if again:
        told["again"] = True
    return {
        "name": track.sites.primitives[o],
        "cat": "again" if again else "op",
        "ph": "X",
        "pid": pid,
        "tid": _OPS,
        "ts": start,
        "dur": round(stop - start, 3),
        "args": told,
    }


def _counter(pid: int, at: float, nbytes: int, budget: int) -> dict[str, Any]:
    return {"name": "device bytes", "ph": "C", "pid": pid, "ts": at, "args": {"live": nbytes, "budget": budget}}


def _named(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}}
