"""``jaxtensile keep``: one job of a cluster as a process that does not outlive its agent.

Standard input is a pipe from the agent: its end, by the agent's will or death, ends the job. The kernel ends the job if
this process is killed.

Invariant: what the job leaves behind ends with it, also in its own session.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

from jaxtensile.cli.adopted import PATIENCE, SIGNALLED, Adopted
from jaxtensile.cli.serving import configured, reported
from jaxtensile.cli.xla_memory import variables
from jaxtensile.devices.backends import visible
from jaxtensile.runtime.config.config import Config
from jaxtensile.runtime.daemon.endpoint import DEVICES_VARIABLE

_CANNOT_START: Final = 127
"""Exit status of shells for a command that is not there."""
_SET_DEATH_SIGNAL: Final = 1
"""``PR_SET_PDEATHSIG`` of Linux (``linux/prctl.h``)."""


def keep(options: argparse.Namespace) -> int:
    """Run the command, and return its exit status; 128 and the number of a signal that ended it."""
    with Adopted() as adopted:
        try:
            process = subprocess.Popen(
                options.command_line,
                env=_environment(options),
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            print(f"{options.command_line[0]!r} cannot be started: {error.strerror}", flush=True)
            return _CANNOT_START
        _wait(process)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        adopted.end_all([process.pid], PATIENCE)
    return process.returncode if process.returncode >= 0 else SIGNALLED - process.returncode


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until the job has ended, and end it once nobody is at the other end of the pipe."""
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN)
        while process.poll() is None:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
                return _end(process)
    finally:
        os.close(pidfd)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        ends = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.02)
    process.wait()


def _end_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """The job's: XLA is told to share the devices, and to see those that are the job's."""
    seen = dict(os.environ)
    mine = [name for name in seen.get(DEVICES_VARIABLE, "").split(",") if name]
    _, config = configured(argparse.Namespace(config=None)) if any(map(visible, mine)) else (None, Config())
    there = reported(config)
    gpus = [there[name] for name in mine if visible(name) and name in there]
    if gpus:
        turns = any(config.takes_turns(name) for name in mine)
        seen |= variables(options.least, options.want, min(gpus), seen, turns=turns)
    for name in mine:
        if (variable := visible(name)) and variable not in seen and len(mine) < len(there):
            seen[variable] = ",".join(n.partition(":")[2] for n in mine if visible(n) == variable)
    seen["PATH"] = os.pathsep.join(filter(None, (os.path.dirname(sys.executable), seen.get("PATH"))))
    return seen
