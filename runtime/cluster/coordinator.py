"""The coordinator of a cluster: reports of agents in, orders for them out. No Ray, no clock: ``now`` is an argument.

Orders are derived from the difference between the records and the last report of an agent, and repeated until the
report shows the record's state. So a lost message, agent or coordinator loses no job.

    report    a process of a job has ended, waits for its lease, was refused it, or has ended with its agent
    decide    place waiting jobs
    orders    jobs that a node has to start or to end, and records that it has to keep

Invariant: a record is on ``COPIES`` nodes before its submission is confirmed, where there are so many. A job counts as
gone from a node only once the node says so or is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import nsmallest
from typing import Final

from msgspec import Struct, field, structs

from jaxtensile.runtime.cluster.records import ENDED, Launch, Record, Report, Spec, Task, Tick
from jaxtensile.runtime.placement.asks import Ask, Placed, Rules
from jaxtensile.runtime.placement.fleet import Fleet
from jaxtensile.units import Seconds

COPIES: Final = 3
"""Nodes that keep a record: two may be lost with the coordinator. A guess."""
KEPT: Final = 10_000
"""Records of ended jobs that are kept for those who ask. A guess: some megabytes."""


class _Node(Struct):
    report: Report
    copies: dict[str, int] = field(default_factory=dict[str, int])
    """The revision of each record that is kept there."""


class ClusterCoordinator:
    """All jobs and nodes of a cluster."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.epoch = 0
        self._fleet = Fleet(rules)
        self._records: dict[str, Record] = {}
        self._since: dict[str, Seconds] = {}
        self._last = 0
        """The order of the last job submitted."""
        self._nodes: dict[str, _Node] = {}
        self._ended: list[str] = []
        """Ended jobs, in the order in which they have ended."""
        self._done: dict[str, set[str]] = {}
        """The hosts on which a job of several has ended well."""
        self._unkept: set[str] = set()
        """Jobs whose records may not be where they are to be kept."""
        self._keepers: dict[str, frozenset[str]] = {}
        """The nodes that keep a record; empty once nodes have come or gone."""

    # After a start.

    def recover(self, reports: Sequence[Report], now: Seconds) -> None:
        """Take over what the agents of all living nodes know."""
        self.epoch = 1 + max((r.epoch for r in reports), default=0)
        for report in reports:
            for record in report.records:
                known = self._records.get(record.spec.job)
                if known is None or known.revision < record.revision:
                    self._records[record.spec.job] = record
        for report in reports:
            self._join(report).copies = {r.spec.job: r.revision for r in report.records}
            self._fleet.report(report.node, report.rooms, takes=report.serving)
        for record in sorted(self._records.values(), key=lambda r: r.order):
            job = record.spec.job
            self._since[job], self._last = now - record.waited, record.order
            if record.state == "placed":
                self._fleet.adopt(self._ask(record), record.places)
                if any(place.node not in self._nodes for place in record.places):
                    self._again(record, "one of its machines was lost", now)
            elif record.state == "waiting":
                self._fleet.submit(self._ask(record))
            else:
                self._ended.append(job)
        for report in reports:
            self.report(report, now)

    # Events.

    def submit(self, spec: Spec, now: Seconds) -> Record:
        """A job; the same one again changes nothing."""
        if spec.job not in self._records:
            self._last += 1
            self._since[spec.job] = now
            self._records[spec.job] = record = Record(spec=spec, order=self._last, revision=1, floor=spec.floor)
            self._unkept.add(spec.job)
            self._fleet.submit(self._ask(record))
        return self._records[spec.job]

    def cancel(self, job: str, now: Seconds) -> None:
        """End a job, wherever it is."""
        if (record := self._records.get(job)) is not None and record.state not in ENDED:
            self._end(record, now, state="cancelled")

    def report(self, report: Report, now: Seconds) -> None:
        """What an agent says."""
        node = self._nodes.get(report.node)
        if node is not None and node.report.start != report.start:
            for job in self._fleet.on(report.node):
                self._again(self._records[job], f"the agent of {report.node} has ended, and its jobs with it", now)
            node = None
        if node is None:
            node = self._join(report)
        if not report.serving and not report.rooms:
            report = structs.replace(report, rooms=node.report.rooms)
        node.report = report
        for task in report.tasks:
            self._heard(report, task, now)
        admitted = [t.job for t in report.tasks if t.lease == "held" and self._is_current(report.node, t)]
        self._fleet.report(report.node, report.rooms, admitted, takes=report.serving)

    def lost(self, name: str, now: Seconds) -> None:
        """A node is dead, and all processes there."""
        jobs = self._fleet.on(name)
        for job in jobs:
            self._again(self._records[job], f"machine {name} was lost", now)
        self._fleet.lost(name)
        if self._nodes.pop(name, None) is not None:
            self._keepers = {}
            self._unkept = {*self._records}

    def _join(self, report: Report) -> _Node:
        node = self._nodes[report.node] = _Node(report)
        self._keepers = {}
        self._unkept = {*self._records}
        return node

    def decide(self, now: Seconds) -> None:
        """Place what fits; move who waits too long for a lease."""
        for found in self._fleet.decide(now):
            record = self._records[found.job]
            if isinstance(found, Placed):
                self._change(record, now, state="placed", places=found.places, attempt=record.attempt + 1)
            else:
                before = f"{record.reason}; then " if record.floor > record.spec.floor else ""
                self._end(record, now, state="refused", reason=before + found.reason + self._not_serving())
        for node in [*self._nodes.values()]:
            for task in node.report.tasks:
                if task.lease == "waits" and task.waited > self._rules.move_after and not task.step:
                    self._move(node.report.node, task, now)

    def _not_serving(self) -> str:
        """Which nodes grant nothing, in words; empty: all do."""
        silent = [node.report for node in self._nodes.values() if not node.report.serving]
        more = f" ({len(silent) - 1} more like it)" if len(silent) > 1 else ""
        return f"; the coordinator of {silent[0].node} does not answer: {silent[0].why}{more}" if silent else ""

    def _move(self, name: str, task: Task, now: Seconds) -> None:
        if self._is_current(name, task) and (found := self._fleet.elsewhere(task.job)) is not None:
            record = self._records[task.job]
            why = f"it waited for its lease on {name} for {task.waited:.0f} s"
            moved = {"attempt": record.attempt + 1, "moves": record.moves + 1, "reason": why}
            self._change(record, now, places=found.places, **moved)

    # What follows from a report.

    def _heard(self, report: Report, task: Task, now: Seconds) -> None:
        if not task.ended or not self._is_current(report.node, task):
            return
        record = self._records[task.job]
        if task.stopped:  # by a coordinator that was killed before anybody else knew why
            self._again(record, f"it was ended on {report.node} by a former coordinator", now)
        elif task.rejected is not None:
            limit = max(record.floor, task.rejected) + 1
            self._again(record, f"{report.node} refused it: {task.reason}", now, floor=limit)
        elif task.status:
            failures = record.failures + 1
            record = self._change(record, now, failures=failures, status=task.status, reason=task.reason)
            if failures > record.spec.retries:
                self._end(record, now, state="failed")
            else:
                self._again(record, task.reason, now, moves=record.moves)
        else:
            done = self._done.setdefault(task.job, set())
            done.add(report.node)
            if len(done) == record.spec.hosts:
                self._end(record, now, state="done", status=None, reason="")

    def _is_current(self, node: str, task: Task) -> bool:
        """Whether an agent's task is what is to run there."""
        record = self._records.get(task.job)
        return (
            record is not None
            and record.state == "placed"
            and record.attempt == task.attempt
            and any(place.node == node for place in record.places)
        )

    def _again(
        self, record: Record, why: str, now: Seconds, *, floor: int | None = None, moves: int | None = None
    ) -> None:
        """A placed job waits again."""
        self._fleet.back(record.spec.job, floor)
        self._done.pop(record.spec.job, None)
        self._change(
            record,
            now,
            state="waiting",
            places=(),
            reason=why,
            floor=record.floor if floor is None else floor,
            moves=record.moves + 1 if moves is None else moves,
        )

    def _end(self, record: Record, now: Seconds, **changes: object) -> None:
        job = record.spec.job
        self._fleet.ended(job)
        self._done.pop(job, None)
        self._change(record, now, places=(), **changes)
        self._ended.append(job)
        for old in self._ended[:-KEPT]:
            del self._records[old], self._since[old]
            self._keepers.pop(old, None)
            self._unkept.discard(old)
        self._ended = self._ended[-KEPT:]

    def _change(self, record: Record, now: Seconds, **changes: object) -> Record:
        job = record.spec.job
        waited = now - self._since[job]
        found = structs.replace(record, revision=record.revision + 1, waited=waited, **changes)
        self._records[job] = found
        self._unkept.add(job)
        return found

    def _ask(self, record: Record) -> Ask:
        spec = record.spec
        return Ask(
            job=spec.job,
            floor=record.floor,
            devices=spec.devices,
            kind=spec.kind,
            hosts=spec.hosts,
            priority=spec.priority,
            order=record.order,
            since=self._since[spec.job],
        )

    # Orders.

    def orders(self, name: str) -> Tick:
        """What a node is to be told now."""
        node = self._nodes.get(name)
        if node is None:
            return Tick(epoch=self.epoch)
        tasks = {(t.job, t.attempt): t for t in node.report.tasks}
        launch: list[Launch] = []
        for job in self._fleet.on(name):
            record = self._records[job]
            if (job, record.attempt) not in tasks and (order := self._launch(record, name)) is not None:
                launch.append(order)
        others = [key for key, task in tasks.items() if not self._is_current(name, task)]
        return Tick(
            epoch=self.epoch,
            launch=tuple(launch),
            stop=tuple(key for key in others if not tasks[key].ended),
            forget=tuple(key for key in others if tasks[key].ended),
            keep=tuple(self._to_keep(name, node)),
            drop=tuple(job for job in node.copies if job not in self._records),
        )

    def has_orders(self, name: str) -> bool:
        """Whether a node is to do something that it has not been told, or does not do yet."""
        tick = self.orders(name)
        return bool(tick.launch or tick.stop or tick.forget or tick.keep or tick.drop)

    def told(self, name: str, tick: Tick) -> None:
        """A node has carried out what it was told."""
        if (node := self._nodes.get(name)) is not None:
            node.copies |= {r.spec.job: r.revision for r in tick.keep}
            for job in tick.drop:
                node.copies.pop(job, None)
            for record in tick.keep:
                job = record.spec.job
                now = self._records.get(job)
                if now is None or all(self._nodes[n].copies.get(job) == now.revision for n in self._kept_by(job)):
                    self._unkept.discard(job)

    def _launch(self, record: Record, name: str) -> Launch | None:
        """The order to start a job there; None: not yet, as a former attempt runs somewhere, or the first host has not
        said where its processes meet."""
        if record.attempt > 1 and self._runs_still(record):
            return None
        names = [place.node for place in record.places]
        rank, meet = names.index(name), ""
        if rank:
            first = (
                t for t in self._nodes[names[0]].report.tasks if (t.job, t.attempt) == (record.spec.job, record.attempt)
            )
            meet = next((t.meet for t in first), "")
            if not meet:
                return None
        return Launch(record=record, rank=rank, meet=meet)

    def _runs_still(self, record: Record) -> bool:
        """Whether a former attempt has not ended where it is told to."""
        tasks = (task for node in self._nodes.values() for task in node.report.tasks if not task.ended)
        return any(t.job == record.spec.job and t.attempt != record.attempt for t in tasks)

    def _to_keep(self, name: str, node: _Node) -> Iterable[Record]:
        for job in self._unkept:
            record = self._records[job]
            if node.copies.get(job, 0) < record.revision and name in self._kept_by(job):
                yield record

    def _kept_by(self, job: str) -> frozenset[str]:
        """The nodes that keep a record: few change when a node comes or goes."""
        found = self._keepers.get(job)
        if found is None:
            found = self._keepers[job] = frozenset(nsmallest(COPIES, self._nodes, key=lambda name: _mixed(job, name)))
        return found

    def is_kept(self, job: str) -> bool:
        """Whether a record is where it is to be kept, in whatever revision."""
        nodes = self._kept_by(job)
        return bool(nodes) and all(job in self._nodes[name].copies for name in nodes)

    # What is known.

    def jobs(self, jobs: Iterable[str] | None = None) -> tuple[Record, ...]:
        """Records, of all jobs by default; those that are not known are left out."""
        names = self._records if jobs is None else jobs
        return tuple(self._records[job] for job in names if job in self._records)

    def tasks(self, jobs: Iterable[str] | None = None) -> tuple[Task, ...]:
        """What runs of them, as agents have last said."""
        wanted = None if jobs is None else set(jobs)
        return tuple(
            task
            for name, node in self._nodes.items()
            for task in node.report.tasks
            if (wanted is None or task.job in wanted) and self._is_current(name, task)
        )

    def nodes(self) -> tuple[Report, ...]:
        """The last report of each node."""
        return tuple(node.report for node in self._nodes.values())


def _mixed(job: str, node: str) -> bytes:
    return blake2b(f"{job}\0{node}".encode(), digest_size=8).digest()
