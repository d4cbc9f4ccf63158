"""One machine of a cluster: its coordinator, the processes of its jobs, and reports on both. No Ray.

The machine's own coordinator (``jaxtensile serve``) stays the only authority over its devices. The agent uses the one
at this user's socket, or starts one there, and starts it again if it does not answer. That coordinator ends with Ray's
process on the machine. Jobs end with the agent: ``jaxtensile keep`` waits for the end of a pipe from it.

Invariant: an attempt of a job is started once. Orders of an epoch below the highest heard change nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from jaxtensile.errors import ConfigError, CoordinatorError
from jaxtensile.runtime.cluster.records import Launch, Record, Report, Task, Tick
from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.config import Config
from jaxtensile.runtime.daemon.endpoint import DEVICES_VARIABLE, JOB_VARIABLE, VARIABLE, socket_path
from jaxtensile.runtime.daemon.inquiry import Inquirer
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.placement.nodes import Room
from jaxtensile.runtime.protocol.messages import LeaseView, Snapshot
from jaxtensile.units import KIB, Bytes, Seconds

_OUTPUT: Final = 256 * KIB
"""Bytes kept of what a job has printed last. A guess."""
_CHUNK: Final = 64 * KIB
"""Bytes read at once: a pipe of Linux."""
_ANSWERS: Final[Seconds] = 2.0
"""Seconds in which the machine's coordinator answers before it counts as gone. A guess."""
_STARTS: Final[Seconds] = 20.0
"""Seconds for a coordinator that was started to answer, before another is started. As ``running._STARTS_WITHIN``."""
_RESTS: Final[Seconds] = 0.2
"""Seconds for the last words of a process that has ended to be read. A guess."""
_LINE: Final = 300
"""Letters of a last line that are told. A guess: some lines of a terminal."""


class FencedError(CoordinatorError):
    """Another coordinator of the cluster has taken over."""


class Agent:
    """One machine. ``node``: its name in the cluster; ``address``: where its processes are reached by others.

    ``environment``: of the machine, for the coordinator and the jobs. ``ends_with``: the process with which the
    coordinator ends.
    """

    def __init__(self, node: str, address: str, environment: Mapping[str, str], ends_with: int) -> None:
        self.node, self._address = node, address
        self._environment, self._ends_with = dict(environment), ends_with
        self._start, self._epoch = uuid.uuid4().hex, 0
        self._runs: dict[tuple[str, int], _Run] = {}
        self._records: dict[str, Record] = {}
        self._lock = threading.Lock()
        self._daemon = _Daemon(self._environment, ends_with)

    @property
    def socket(self) -> str:
        """The socket of the machine's coordinator."""
        return os.fspath(self._daemon.path)

    def tick(self, tick: Tick) -> Report:
        """Carry out orders, and say how things are. Raises ``FencedError``."""
        with self._lock:
            if tick.epoch and tick.epoch < self._epoch:
                raise FencedError(f"the orders are of epoch {tick.epoch}, and {self._epoch} was heard: ask that one")
            self._epoch = max(tick.epoch, self._epoch)
            for record in (*tick.keep, *(launch.record for launch in tick.launch)):
                known = self._records.get(record.spec.job)
                if known is None or known.revision < record.revision:
                    self._records[record.spec.job] = record
            for job in tick.drop:
                self._records.pop(job, None)
            for key in tick.stop:
                if key in self._runs:
                    self._runs[key].stop()
            for key in tick.forget:
                self._runs.pop(key, None)
            for launch in tick.launch:
                self._launch(launch)
            return self._report(everything=tick.everything)

    def output(self, job: str, attempt: int, offset: int) -> tuple[int, bytes]:
        """What a job has printed from ``offset`` bytes on, as far as it is kept, and the offset of its end."""
        run = self._runs.get((job, attempt))
        return (offset, b"") if run is None else run.printed(offset)

    def close(self) -> None:
        """End all jobs."""
        for run in self._runs.values():
            run.stop()

    def _launch(self, launch: Launch) -> None:
        job, attempt = launch.record.spec.job, launch.record.attempt
        if (job, attempt) in self._runs or any(j == job and not r.ended for (j, _), r in self._runs.items()):
            return  # it is there, or a former attempt still ends
        self._runs[job, attempt] = _Run(launch, self.node, self._address, self._environment, self.socket)

    def _report(self, *, everything: bool) -> Report:
        ended_before = {key for key, run in self._runs.items() if run.ended}
        snapshot = self._daemon.snapshot()
        leases: dict[int, LeaseView] = {}
        for lease in () if snapshot is None else snapshot.leases:
            leases.setdefault(_session(lease.pid), lease)  # the first one: others are asked for more, for a while
        rooms = () if snapshot is None else tuple(
            Room(d.device, max(d.capacity - d.reserve, 0), d.guaranteed) for d in snapshot.devices if d.device != HOST
        )  # fmt: skip
        tasks: list[Task] = []
        for key, run in self._runs.items():
            # One that has ended since may have been refused after that was asked: it is told the next time.
            ended = run.ended and (key in ended_before or snapshot is None)
            tasks.append(run.told(ended, leases.get(run.session), snapshot, rooms))
        return Report(
            node=self.node,
            start=self._start,
            epoch=self._epoch,
            serving=snapshot is not None,
            why=self._daemon.why,
            rooms=rooms,
            tasks=tuple(tasks),
            records=tuple(self._records.values()) if everything else (),
        )


class _Daemon:
    """The machine's coordinator, found or started."""

    def __init__(self, environment: Mapping[str, str], ends_with: int) -> None:
        self._environment, self._ends_with = environment, ends_with
        self.why = ""
        """Why it does not answer."""
        self._file = configs.find(None, None, environment)
        config = Config()
        if self._file is not None:
            try:
                config = configs.read(self._file, wait=configs.EMPTY)
            except ConfigError as error:
                self.why = str(error)
        self.path = socket_path(None, environment, config.socket, os.getuid())
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._inquirer: Inquirer | None = None

    def snapshot(self) -> Snapshot | None:
        """Its state; None: it does not answer, and is started if it is not there."""
        for _ in range(2):  # a connection that was lost says nothing of the coordinator that is there now
            try:
                self._inquirer = self._inquirer or Inquirer(self.path, _ANSWERS)
                found = self._inquirer.snapshot()
                self.why = ""
                return found
            except CoordinatorError as error:
                self.why = str(error)
                if self._inquirer is None:
                    break
                self._inquirer.close()
                self._inquirer = None
        self._started()
        return None

    def _started(self) -> None:
        now = time.monotonic()
        if self._process is not None and (status := self._process.poll()) is not None:
            log = self.path.with_name(f"{self.path.name}.log")
            with suppress(OSError):
                lines = log.read_text(errors="replace").strip().splitlines()
                self.why = f"it has ended with status {status}: {lines[-1] if lines else 'it said nothing'}"
        elif self._process is not None and now < self._began + _STARTS:
            return
        elif self._process is not None:
            self._process.kill()
            self._process.wait()
        if now < self._began + _RESTS:
            return
        self._began = now
        command = [sys.executable, "-m", "jaxtensile", "serve", "--socket", str(self.path), "--grace", "0"]
        command += ["--with-parent", str(self._ends_with)]
        command += ["--config", str(self._file)] if self._file is not None else []
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path.with_name(f"{self.path.name}.log"), "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                cwd=self.path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class _Run:
    """One attempt of a job on this machine."""

    def __init__(self, launch: Launch, node: str, address: str, environment: Mapping[str, str], socket_of: str) -> None:
        record, spec = launch.record, launch.record.spec
        self.job, self.attempt, self._name = spec.job, record.attempt, spec.name
        devices = next(place.devices for place in record.places if place.node == node)
        self._devices = devices
        self._began = time.monotonic()
        self._kept, self._end_of = bytearray(), 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._reason, self._stopped = "", False
        self.meet = launch.meet
        if spec.hosts > 1 and not launch.rank:
            self.meet = f"{address}:{_free_port()}"
        seen = {**environment, **spec.environment, VARIABLE: socket_of, JOB_VARIABLE: spec.name}
        seen |= {DEVICES_VARIABLE: ",".join(devices), "PYTHONUNBUFFERED": "1"}
        if spec.hosts > 1:
            seen |= {
                "JAX_COORDINATOR_ADDRESS": self.meet,
                "JAX_NUM_PROCESSES": str(spec.hosts),
                "JAX_PROCESS_ID": str(launch.rank),
            }
        command = [sys.executable, "-m", "jaxtensile", "keep", "--least", str(record.floor)]
        command += ["--want", str(spec.want)] if spec.want is not None else []
        self._begin([*command, "--", *spec.command], seen, spec.folder)

    def _begin(self, command: list[str], environment: Mapping[str, str], folder: str) -> None:
        if not os.path.isdir(folder):
            self._reason = f"there is no folder {folder} on this machine: jobs need the same files on all"
            return
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,  # its end is the end of the job
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"jaxtensile-reads-{self._name}", daemon=True)
        self._reader.start()

    @property
    def session(self) -> int:
        """The session of its processes."""
        return 0 if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def stop(self) -> None:
        """Let it end: nothing is ever written to the pipe, so that its end is all that is heard."""
        self._stopped = self._stopped or not self.ended
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with suppress(OSError, ValueError):
            while data := os.read(self._process.stdout.fileno(), _CHUNK):
                with self._lock:
                    self._kept += data
                    self._end_of += len(data)
                    del self._kept[:-_OUTPUT]

    def printed(self, offset: int) -> tuple[int, bytes]:
        """As ``Agent.output``."""
        with self._lock:
            new = min(self._end_of - offset, len(self._kept))
            return self._end_of, bytes(self._kept[len(self._kept) - new :]) if new > 0 else b""

    def told(self, ended: bool, lease: LeaseView | None, snapshot: Snapshot | None, rooms: Iterable[Room]) -> Task:
        """What is said of it."""
        if not ended:
            return Task(job=self.job, attempt=self.attempt, meet=self.meet, **_of_lease(lease))
        status, reason = self._why()
        rejected: Bytes | None = None
        if status and snapshot is not None:
            since = time.monotonic() - self._began
            for event in snapshot.events:
                if event.what == "rejected" and event.job == self._name and event.ago < since:
                    rejected = max((r.limit for r in rooms if r.device in self._devices), default=0)
                    reason = event.detail
        return Task(
            job=self.job,
            attempt=self.attempt,
            ended=True,
            status=status,
            stopped=self._stopped,
            reason=reason,
            rejected=rejected,
            meet=self.meet,
        )

    def _why(self) -> tuple[int, str]:
        """Its exit status, and the last line of one that has failed."""
        if self._process is None:
            return 1, self._reason
        status = self._process.returncode
        assert status is not None and self._reader is not None
        self._reader.join(_RESTS)
        self.stop()
        status = status if status >= 0 else 128 - status
        if not status:
            return 0, ""
        with self._lock:
            lines = self._kept.decode(errors="replace").strip().splitlines()
        return status, (lines[-1] if lines else "it printed nothing")[:_LINE]


def _of_lease(lease: LeaseView | None) -> dict[str, Any]:
    if lease is None:
        return {}
    return {
        "lease": "held" if lease.rung >= 0 else "waits",
        "waited": lease.waited,
        "granted": lease.charged[0] if lease.charged else 0,
        "rung": lease.rung,
        "rungs": lease.rungs,
        "step": lease.step,
    }


def _session(pid: int) -> int:
    try:
        return os.getsid(pid) if pid else 0
    except ProcessLookupError:
        return 0


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process of this user began."""
    data = Path(f"/proc/{pid}/environ").read_bytes()
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}
