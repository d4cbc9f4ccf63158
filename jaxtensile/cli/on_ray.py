"""``jaxtensile run --on ray``: the config's jobs on the machines of a Ray cluster.

Invariant: Ctrl-C ends the jobs. If this process is killed, they go on, and the cluster knows of them.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jaxtensile.cli.adopted import SIGNALLED
from jaxtensile.cli.running import chosen, exit_text, until_terminated
from jaxtensile.cli.serving import configured
from jaxtensile.cli.watching import duration, table
from jaxtensile.errors import ConfigError
from jaxtensile.runtime.cluster.records import ENDED, Record, Spec, Submitted, Task
from jaxtensile.runtime.cluster.submit import Cluster
from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.config import JobConfig
from jaxtensile.units import Seconds, format_bytes

_LOOK: Final[Seconds] = 0.3
"""Seconds between two looks at the jobs. A guess."""
_ENDS: Final[Seconds] = 15.0
"""Seconds for cancelled jobs to end: the patience of ``keep``, and some ticks. A guess."""


@dataclass(slots=True)
class _Followed:
    """One job, and what was told of it."""

    name: str
    began: Seconds
    record: Record | None = None
    told: str = ""
    had: str = ""
    steps: int = 0
    attempt: int = 0
    offset: int = 0
    rest: bytes = b""
    ended: Seconds | None = None


def run(options: argparse.Namespace) -> bool:
    """Submit the jobs, follow them to their ends and print a table; True if any did not end well.

    Raises ``ConfigError`` for jobs that cannot be submitted, and ``CoordinatorError`` without a cluster.
    """
    file, config = configured(options)
    jobs = chosen(options.jobs, file, config)
    assert file is not None
    specs = [_spec(name, job, file) for name, job in jobs.items()]
    cluster = Cluster(options.address or config.cluster.address, rules=config.cluster.rules)
    began = time.monotonic()
    followed = {spec.job: _Followed(spec.name, began) for spec in specs}
    with until_terminated():
        try:
            cluster.submit_all(specs)
            _follow(cluster, followed)
        except BaseException:
            cluster.cancel([*followed])
            _follow(cluster, followed, _ENDS)
            raise
        finally:
            print(f"\n{_summary([*followed.values()], time.monotonic() - began)}", flush=True)
    return any(f.record is None or f.record.state != "done" for f in followed.values())


def _spec(name: str, job: JobConfig, file: Path) -> Spec:
    if not job.least:
        raise ConfigError(
            f"{file}: job {name!r} has no least, and on a cluster a machine is found for what it needs at least: write "
            "least = '4GiB'; 'jaxtensile estimate' says what a step needs"
        )
    return Spec(
        job=f"{name}-{uuid.uuid4().hex[:8]}",
        name=name,
        command=job.command,
        folder=str(file.absolute().parent),
        environment={configs.VARIABLE: str(file.absolute())},
        floor=job.least,
        want=job.want,
        devices=job.devices,
        kind=job.kind,
        hosts=job.hosts,
        priority=job.priority,
        retries=job.retries,
    )


def _follow(cluster: Cluster, followed: Mapping[str, _Followed], within: Seconds | None = None) -> None:
    """Tell what becomes of the jobs until all have ended, or for so many seconds."""
    ends = None if within is None else time.monotonic() + within
    numbers: dict[str, str] = {}
    while True:
        found = cluster.jobs([*followed])
        if {p.node for r in found.records for p in r.places} - numbers.keys():
            numbers = {report.node: number for number, report in cluster.nodes()}
        _look(found, followed)
        for job, mine in followed.items():
            _repeat(cluster, numbers, job, mine)
        for mine in followed.values():
            if mine.record is not None and mine.record.state in ENDED and mine.ended is None:
                mine.ended = time.monotonic()
                _tell(mine.name, f"{_end(mine.record)} after {duration(mine.ended - mine.began)}")
        if all(f.ended is not None for f in followed.values()) or (ends is not None and time.monotonic() >= ends):
            return
        time.sleep(_LOOK)


def _look(found: Submitted, followed: Mapping[str, _Followed]) -> None:
    for record in found.records:
        mine = followed[record.spec.job]
        before, mine.record = mine.record, record
        if record.state == "placed" and (before is None or before.attempt != record.attempt):
            where = ", ".join(f"{p.node} ({', '.join(p.devices)})" for p in record.places)
            again = f", attempt {record.attempt}: {record.reason}" if record.attempt > 1 else ""
            _tell(mine.name, f"placed on {where}{again}")
        elif record.state == "waiting" and before is not None and before.state == "placed":
            _tell(mine.name, f"waits again: {record.reason}")
    for task in found.tasks:
        mine = followed[task.job]
        mine.steps = max(mine.steps, task.step)
        if (said := _lease(task)) and said != mine.told:
            mine.told = mine.had = said
            _tell(mine.name, said)


def _lease(task: Task) -> str:
    if task.lease == "waits":
        return "waits for memory"
    return f"{format_bytes(task.granted)}, plan {task.rung + 1} of {task.rungs}" if task.lease else ""


def _repeat(cluster: Cluster, numbers: Mapping[str, str], job: str, mine: _Followed) -> None:
    """Print what a job has printed since, on its first machine."""
    record = mine.record
    if (
        record is None
        or not record.places
        or mine.ended is not None
        or not (node := numbers.get(record.places[0].node))
    ):
        return
    if record.attempt != mine.attempt:
        mine.attempt, mine.offset, mine.rest = record.attempt, 0, b""
    mine.offset, data = cluster.output(node, job, record.attempt, mine.offset)
    *lines, mine.rest = (mine.rest + data).split(b"\n")
    for line in lines:
        _tell(mine.name, line.decode(errors="replace").rstrip())


def _end(record: Record) -> str:
    match record.state:
        case "done":
            return "done"
        case "failed":
            return f"FAILED, {_status(record)}: {record.reason}"
        case "refused":
            return f"REFUSED: {record.reason}"
        case state:
            return state


def _status(record: Record) -> str:
    status = record.status or 0
    return exit_text(status if status <= SIGNALLED else SIGNALLED - status)


def _tell(name: str, text: str) -> None:
    print(f"{name} | {text}", flush=True)


def _summary(jobs: Sequence[_Followed], seconds: Seconds) -> str:
    rows: list[tuple[str, ...]] = []
    for mine in jobs:
        record = mine.record
        state = "unknown" if record is None else _status(record) if record.state == "failed" else record.state
        rows.append(
            (
                mine.name,
                state,
                duration((mine.ended or time.monotonic()) - mine.began),
                str(record.attempt) if record is not None else "-",
                str(mine.steps) if mine.steps else "-",
                mine.had,
            )
        )
    done = sum(m.record is not None and m.record.state == "done" for m in jobs)
    lines = table(("job", "end", "time", "attempts", "steps", "last had"), rows)
    return "\n".join([*lines, f"{done} of {len(jobs)} jobs done in {duration(seconds)}"])


__all__ = ["run"]
