"""``jaxtensile run``: the config's jobs as processes, with a coordinator between them.

Invariant: everything started ends with this process, and nothing starts twice. What a job leaves behind ends with it,
also in its own session. A failed job is reported at once and in the final table, never restarted.
"""

from __future__ import annotations

import argparse
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Final

from jaxtensile.cli.adopted import PATIENCE, Adopted
from jaxtensile.cli.executing import environment
from jaxtensile.cli.serving import configured, place_of, reported
from jaxtensile.cli.watching import duration, table
from jaxtensile.cli.xla_memory import variables
from jaxtensile.errors import ConfigError, CoordinatorError, UnreachableError
from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.config import Config, JobConfig
from jaxtensile.runtime.daemon.endpoint import JOB_VARIABLE, VARIABLE
from jaxtensile.runtime.daemon.inquiry import Inquirer
from jaxtensile.runtime.protocol.messages import Snapshot
from jaxtensile.settings.wanted import VARIABLE as EXEC_VARIABLE
from jaxtensile.settings.wanted import wanted
from jaxtensile.units import KIB, Bytes, Seconds, format_bytes, format_seconds

_LOOK_EVERY: Final = 0.2
"""Seconds between two looks at the jobs and at the coordinator. A guess."""
_CHUNK: Final = 64 * KIB
"""Bytes read from one job before the next, and of a line printed without its end: a pipe of Linux."""
_LEFT: Final = 32
"""Chunks read from an ended job: what it left behind may write for ever. A guess: 2 MiB."""
_TELL_EVERY: Final = 10.0
"""Seconds between two lines about the steps of a job. A guess."""
_STARTS_WITHIN: Final = 20.0
"""Seconds in which a started coordinator must answer. A guess."""


@dataclass(slots=True)
class Job:
    """One process, and what is known of it."""

    name: str
    process: subprocess.Popen[bytes]
    began: Seconds
    ended: Seconds | None = None
    status: int | None = None
    rest: bytes = b""
    memory: Bytes = 0
    """Peak resident bytes of the process itself."""
    peak: Bytes = 0
    step: int = 0
    step_us: int = 0
    waited: Seconds = 0.0
    told: str = ""
    """The last message about its lease."""


def run(options: argparse.Namespace) -> bool:
    """Run the jobs to their ends and print a table; True if any failed.

    Raises ``ConfigError`` for jobs that cannot start, and ``CoordinatorError`` without a coordinator.
    """
    file, config = configured(options)
    jobs_of = chosen(options.jobs, file, config)
    with _coordinator(options, file, config) as socket, until_terminated(), Adopted() as adopted:
        inquirer = Inquirer(socket)
        jobs: list[Job] = []
        began = time.monotonic()
        try:
            seen = {name: _environment(name, job, config, file, socket) for name, job in jobs_of.items()}
            for name, job in jobs_of.items():
                _require_command(name, job, seen[name], file)
            for name, job in jobs_of.items():
                jobs.append(_start(name, job, seen[name], file))
            _watch(jobs, inquirer, adopted)
        except BaseException:
            _end(jobs)
            raise
        finally:
            inquirer.close()
            adopted.end_all([job.process.pid for job in jobs], PATIENCE)
            if jobs:
                print(f"\n{_summary(jobs, time.monotonic() - began)}", flush=True)
        return any(job.status for job in jobs)


def chosen(names: Sequence[str], file: Path | None, config: Config) -> dict[str, JobConfig]:
    """The jobs of the config that have these names, or all that have a command. Raises ``ConfigError``."""
    if file is None:
        raise ConfigError(
            f"there is no {configs.NAME} here or above: write one with [jobs.NAME] tables, or name it with --config"
        )
    able = [name for name, job in config.jobs.items() if job.command]
    for name in names:
        if name not in config.jobs:
            close = get_close_matches(name, config.jobs, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(config.jobs) or 'none'}"
            raise ConfigError(f"{file}: there is no job {name!r}: {hint}")
        if name not in able:
            raise ConfigError(f"{file}: job {name!r} has no command: write command = ['python', 'train.py']")
    if not able:
        raise ConfigError(f"{file}: no job has a command: write [jobs.NAME] with command = ['python', 'train.py']")
    return {name: config.jobs[name] for name in (dict.fromkeys(names) or able)}


# The coordinator.


@contextmanager
def _coordinator(options: argparse.Namespace, file: Path | None, config: Config) -> Iterator[Path]:
    """The socket of the running coordinator, or of one for these jobs alone that ends with them."""
    path = place_of(options, config)
    try:
        Inquirer(path).close()
    except UnreachableError:
        pass
    else:
        print(f"coordinator at {path}", flush=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxtensile-") as folder:
        path, log = Path(folder) / "coordinator.sock", Path(folder) / "log"
        command = [sys.executable, "-m", "jaxtensile", "serve", "--socket", str(path), "--with-parent"]
        command += ["--grace", "1"] + (["--config", str(file)] if file is not None else [])
        with log.open("wb") as errors:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            _wait_for(path, daemon, log)
            print(f"coordinator of these jobs: jaxtensile top --socket {path}", flush=True)
            yield path
        finally:
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(PATIENCE)
            daemon.kill()
            daemon.wait()


def _wait_for(path: Path, daemon: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + _STARTS_WITHIN
    while True:
        try:
            return Inquirer(path).close()
        except UnreachableError as error:
            if daemon.poll() is not None:
                said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise CoordinatorError(f"a coordinator could not be started: {said[-1]}") from None
            if time.monotonic() > ends:
                raise CoordinatorError(f"the coordinator that was started does not answer: {error}") from None
        time.sleep(0.02)


# The jobs.


def _environment(name: str, job: JobConfig, config: Config, file: Path | None, socket: Path) -> dict[str, str]:
    seen = dict(os.environ)
    gpus = [size for device, size in reported(config).items() if device.startswith("cuda:")]
    if gpus:
        turns = any(config.takes_turns(name) for name in reported(config) if name.startswith("cuda:"))
        seen |= variables(job.least, job.want, min(gpus), seen, turns=turns)
    seen |= {VARIABLE: str(socket), JOB_VARIABLE: name}
    if file is not None:
        seen[configs.VARIABLE] = str(file.absolute())
    if job.automatic:
        asked = replace(wanted({}, file), budget=None, job=name)
        seen |= {**environment(seen), EXEC_VARIABLE: asked.to_text()}
    seen.setdefault("PYTHONUNBUFFERED", "1")  # so that its lines are told when it says them
    # "python" is the one that has jaxtensile, whether its environment is activated or not.
    seen["PATH"] = os.pathsep.join(filter(None, (os.path.dirname(sys.executable), seen.get("PATH"))))
    return seen


def _require_command(name: str, job: JobConfig, environment: Mapping[str, str], file: Path | None) -> None:
    """Raise ``ConfigError`` for a command that is not there, before any other is started."""
    program = job.command[0]
    if os.path.dirname(program) and file is not None:
        program = str(file.absolute().parent / program)
    if shutil.which(program, path=environment["PATH"]) is None:
        raise ConfigError(f"job {name!r}: {job.command[0]!r} cannot be started: there is no such command")


def _start(name: str, job: JobConfig, environment: Mapping[str, str], file: Path | None) -> Job:
    try:
        process = subprocess.Popen(
            job.command,
            env=environment,
            cwd=file.absolute().parent if file is not None else None,  # wherever below it this was called
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the jobs in order
        )
    except OSError as error:
        raise ConfigError(f"job {name!r}: {job.command[0]!r} cannot be started: {error.strerror}") from None
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    _tell(name, f"started, process {process.pid}")
    return Job(name, process, time.monotonic())


def _watch(jobs: Sequence[Job], inquirer: Inquirer, adopted: Adopted) -> None:
    """Report the jobs' output and state until all have ended."""
    with selectors.DefaultSelector() as speaking:
        for job in jobs:
            assert job.process.stdout is not None
            speaking.register(job.process.stdout, selectors.EVENT_READ, job)
        _until_ended(jobs, inquirer, adopted, speaking)


def _until_ended(jobs: Sequence[Job], inquirer: Inquirer, adopted: Adopted, speaking: selectors.BaseSelector) -> None:
    tell_at, lost = time.monotonic() + _TELL_EVERY, False
    while True:
        alive = [job for job in jobs if not _reaped(job)]
        ended = [f"{JOB_VARIABLE}={job.name}".encode() for job in jobs if job.status is not None]
        adopted.end([job.process.pid for job in alive], ended)
        if not lost:
            try:
                _look(inquirer.snapshot(), jobs)
            except CoordinatorError as error:
                lost = True
                _tell("run", f"{error}; the jobs go on with what they hold")
        _hear(speaking, time.monotonic() + _LOOK_EVERY)
        if not alive:
            return
        if time.monotonic() >= tell_at:
            tell_at += _TELL_EVERY
            for job in alive:
                if job.step:
                    _tell(job.name, f"step {job.step}, {format_seconds(job.step_us / 1e6)} a step, {job.told}")


def _hear(speaking: selectors.BaseSelector, until: Seconds) -> None:
    """Repeat the jobs' output in turns, a chunk each, until ``until``."""
    while (left := until - time.monotonic()) > 0:
        if not speaking.get_map():
            time.sleep(left)
        for key, _ in speaking.select(left):
            if not _repeat(key.data):
                speaking.unregister(key.fileobj)


def _reaped(job: Job) -> bool:
    """Whether a job has ended; kills what it left in its process group."""
    if job.status is not None:
        return True
    pid, status, usage = os.wait4(job.process.pid, os.WNOHANG)
    if not pid:
        return False
    job.status = job.process.returncode = os.waitstatus_to_exitcode(status)
    with suppress(ProcessLookupError, PermissionError):  # now: later its number may be another one's
        os.killpg(pid, signal.SIGKILL)
    job.ended, job.memory = time.monotonic(), usage.ru_maxrss * KIB
    for _ in range(_LEFT):
        if not _repeat(job):
            break
    _tell(job.name, f"{'done' if not job.status else f'FAILED, {exit_text(job.status)}'} after {_time(job)}")
    return True


def _repeat(job: Job) -> bool:
    """Print a chunk of a job's output, each line with its name; False at its end."""
    assert job.process.stdout is not None
    try:
        data = os.read(job.process.stdout.fileno(), _CHUNK)
    except BlockingIOError:
        return True
    ended = not data
    *lines, job.rest = (job.rest + data).split(b"\n")
    if job.rest and (ended or len(job.rest) > _CHUNK):
        lines, job.rest = [*lines, job.rest], b""
    for line in lines:
        _tell(job.name, line.decode(errors="replace").rstrip())
    return not ended


def _look(snapshot: Snapshot, jobs: Sequence[Job]) -> None:
    """Update the jobs from the coordinator's snapshot. Each job's process leads its own session."""
    sessions = {job.process.pid: job for job in jobs}
    now = time.monotonic()
    for e in snapshot.events:
        if e.what != "freed":
            continue
        job = next((j for j in jobs if j.name == e.job and j.began < now - e.ago), None)
        if job is not None:
            job.step, job.peak, job.waited = max(job.step, e.step), max(job.peak, e.peak), max(job.waited, e.waited)
    for lease in snapshot.leases:
        job = sessions.get(_session(lease.pid))
        if job is None:
            continue
        job.step, job.step_us = max(job.step, lease.step), lease.step_us
        job.peak, job.waited = max(job.peak, lease.peak), max(job.waited, lease.waited)
        if lease.rung < 0:
            told = "waits for memory"
        else:
            told = f"{format_bytes(lease.charged[0])}, plan {lease.rung + 1} of {lease.rungs}"
            told += "" if lease.state == "held" else f" ({lease.state})"
        if told != job.told:
            job.told = told
            _tell(job.name, told)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid) if pid else 0
    except ProcessLookupError:
        return 0


def _end(jobs: Sequence[Job]) -> None:
    """End what still runs: first as Ctrl-C would, then harsher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        left = [job for job in jobs if not _reaped(job)]
        for job in left:
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, number)
        ends = time.monotonic() + PATIENCE
        while left and time.monotonic() < ends:
            left = [job for job in left if not _reaped(job)]
            time.sleep(0.02)


@contextmanager
def until_terminated() -> Iterator[None]:
    """SIGTERM, SIGQUIT and the end of the terminal act like Ctrl-C, unless ignored, as by jobs in the background."""

    def interrupt(number: int, stack: FrameType | None) -> None:
        raise KeyboardInterrupt

    ends = [n for n in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# What is told.


def _tell(name: str, text: str) -> None:
    print(f"{name} | {text}", flush=True)


def _time(job: Job) -> str:
    return duration((job.ended or time.monotonic()) - job.began)


def exit_text(status: int) -> str:
    """An exit status in words; negative: the signal that ended the process."""
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _summary(jobs: Sequence[Job], seconds: Seconds) -> str:
    rows = [
        (
            job.name,
            exit_text(job.status) if job.status is not None else "still there",
            _time(job),
            duration(job.waited),
            str(job.step) if job.step else "-",
            format_bytes(job.peak) if job.peak else "-",
            format_bytes(job.memory) if job.memory else "-",
            job.told,
        )
        for job in jobs
    ]
    failed = sum(bool(job.status) for job in jobs)
    head = ("job", "end", "time", "waited", "steps", "peak", "resident", "last had")
    verdict = f"{len(jobs) - failed} of {len(jobs)} jobs done in {duration(seconds)}"
    return "\n".join([*table(head, rows), verdict])
