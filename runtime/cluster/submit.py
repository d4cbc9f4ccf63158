"""``jaxtensile.Cluster``: submit jobs to a Ray cluster, and follow them.

Every call may be repeated: a coordinator that was killed is started again by Ray, and a job that it does not know any
more is submitted to it anew.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from jaxtensile.errors import ConfigError, CoordinatorError, UnreachableError
from jaxtensile.runtime.cluster.actors import CALLS, COORDINATOR, CoordinatorActor, ray
from jaxtensile.runtime.cluster.nearby import NAMESPACE, agent_name
from jaxtensile.runtime.cluster.records import ENDED, Record, Report, Spec, Submitted, Task, decode, encode
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.units import Bytes, Seconds, format_bytes, parse_bytes

RULES: Final = Rules()
PATIENCE: Final[Seconds] = 120.0
"""Seconds without an answer of the cluster's coordinator: it waits for nodes that are dead and not yet known to be,
some 15 s, and is placed anew if its node was one."""
_LOOK: Final[Seconds] = 0.25
"""Seconds between two looks at the jobs. A guess."""
_ONCE: Final[Seconds] = 45.0
"""Seconds for one answer: a submission is confirmed within ``actors._KEPT_WITHIN``."""


class Estimated(Protocol):
    """What ``jaxtensile.estimate`` returns."""

    @property
    def high(self) -> Bytes:
        """The most that XLA may need."""
        ...


class Cluster:
    """A Ray cluster, and the jobs in it. ``address``: as for ``ray.init``; None: ``$RAY_ADDRESS``, or the one here.

    ``rules``: of placing, for the coordinator that is started if there is none.
    """

    def __init__(self, address: str | None = None, *, rules: Rules = RULES) -> None:
        self._ray, self._rules = ray(), rules
        self._specs: dict[str, Spec] = {}
        if not self._ray.is_initialized():
            try:
                self._ray.init(
                    address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="error"
                )
            except (ConnectionError, ValueError) as error:
                said = str(error).strip().splitlines() or ["it said nothing"]
                raise UnreachableError(
                    f"no Ray cluster answers at {address or os.environ.get('RAY_ADDRESS') or 'this machine'} "
                    f"({said[0]}): start one with 'ray start --head', or name another with --address"
                ) from None
        self._handle: Any = None

    def submit(
        self,
        name: str,
        command: Sequence[str],
        *,
        floor: int | str | Estimated,
        want: int | str | None = None,
        devices: int = 1,
        kind: str = "",
        hosts: int = 1,
        priority: int = 0,
        retries: int = 0,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Submit one job, and return its name in the cluster.

        ``floor``: bytes on each device without which it is not started: its smallest plan or ``least``, or an estimate,
        whose ``high`` counts. ``devices`` of each of ``hosts`` machines. ``folder``: where the command is started, a
        path that all machines have; by default this process's. The other arguments are as in ``[jobs.NAME]``.
        """
        low = floor.high if not isinstance(floor, int | str) else parse_bytes(floor)
        spec = Spec(
            job=f"{name}-{uuid.uuid4().hex[:8]}",
            name=name,
            command=tuple(command),
            folder=folder or os.getcwd(),
            environment=dict(environment or {}),
            floor=low,
            want=None if want is None else parse_bytes(want),
            devices=devices,
            kind=kind,
            hosts=hosts,
            priority=priority,
            retries=retries,
        )
        self.submit_all([spec])
        return spec.job

    def submit_all(self, specs: Iterable[Spec]) -> None:
        """Submit jobs. Raises ``ConfigError``."""
        known = {spec.job: checked(spec) for spec in specs}
        self._call("submit", [encode(spec) for spec in known.values()])
        self._specs |= known

    def jobs(self, jobs: Sequence[str] | None = None) -> Submitted:
        """The state of jobs, of all in the cluster by default."""
        found = decode(self._call("jobs", None if jobs is None else [*jobs]), Submitted)
        there = {record.spec.job for record in found.records}
        lost = [self._specs[job] for job in jobs or () if job not in there and job in self._specs]
        if lost:  # with all nodes that kept them
            self._call("submit", [encode(spec) for spec in lost])
        return found

    def wait(self, jobs: Sequence[str], *, timeout: Seconds | None = None) -> tuple[Record, ...]:
        """The records of jobs once all have ended. Raises ``CoordinatorError`` after ``timeout`` seconds."""
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self.jobs(jobs).records
            if len(found) == len(set(jobs)) and all(record.state in ENDED for record in found):
                return found
            if ends is not None and time.monotonic() >= ends:
                states = ", ".join(f"{r.spec.job} {r.state}" for r in found if r.state not in ENDED)
                raise CoordinatorError(
                    f"not all jobs have ended within {timeout:g} s: {states}: wait longer, or cancel"
                )
            time.sleep(_LOOK)

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs."""
        self._call("cancel", [*jobs])

    def nodes(self) -> tuple[tuple[str, Report], ...]:
        """Ray's number and the last report of each node."""
        return tuple((number, decode(data, Report)) for number, data in self._call("nodes"))

    def output(self, node_id: str, job: str, attempt: int, offset: int) -> tuple[int, bytes]:
        """What a job has printed on a node from ``offset`` bytes on, and the offset of its end; nothing if lost."""
        try:
            agent = self._ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
            return tuple(self._ray.get(agent.output.remote(job, attempt, offset), timeout=_ONCE))
        except (self._ray.exceptions.RayError, ValueError):
            return offset, b""

    def coordinator_pid(self) -> int:
        """The process of the coordinator."""
        return self._call("pid")

    def _call(self, method: str, *arguments: object) -> Any:
        """Call the coordinator, started if it is not there. Raises ``UnreachableError`` after ``PATIENCE``."""
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                if self._handle is None:
                    self._handle = self._found()
                return self._ray.get(getattr(self._handle, method).remote(*arguments), timeout=_ONCE)
            except self._ray.exceptions.RayTaskError as error:
                raise CoordinatorError(f"the cluster's coordinator has failed: {error.cause}") from error
            except (self._ray.exceptions.RayError, ValueError) as error:
                self._handle = None
                if time.monotonic() >= ends:
                    raise UnreachableError(
                        f"the cluster's coordinator does not answer for {PATIENCE:.0f} s ({type(error).__name__}): see "
                        "'ray status', and whether the head node is there"
                    ) from None
                time.sleep(_LOOK)

    def _found(self) -> Any:
        made = self._ray.remote(CoordinatorActor).options(
            name=COORDINATOR,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=CALLS,
        )
        return made.remote(encode(self._rules))


def checked(spec: Spec) -> Spec:
    """The same job, if it can be one. Raises ``ConfigError``."""
    if not spec.command:
        raise ConfigError(f"job {spec.name!r} has no command: write command = ['python', 'train.py']")
    if spec.floor < 1:
        raise ConfigError(
            f"job {spec.name!r} has a floor of {format_bytes(spec.floor)}, and a machine is found for what it needs at "
            "least: write least = '4GiB', or give floor=; 'jaxtensile estimate' says what a step needs"
        )
    for what, value in (("hosts", spec.hosts), ("devices", spec.devices)):
        if value < 1:
            raise ConfigError(f"job {spec.name!r}: {what} = {value}: give a whole number from 1")
    if spec.retries < 0:
        raise ConfigError(f"job {spec.name!r}: retries = {spec.retries}: give a whole number from 0")
    return spec


__all__ = ["Cluster", "Record", "Spec", "Task"]
