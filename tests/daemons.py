"""Real daemons for tests: ``jaxtensile serve`` in processes of their own, and sockets that speak to them.

Waiting is for a condition, with a limit that only a broken program reaches.
"""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.socket_link import SocketLink
from jaxtensile.runtime.daemon.inquiry import ask
from jaxtensile.runtime.protocol.messages import VERSION, Admit, Hello, Reply, Rung, Welcome
from jaxtensile.runtime.protocol.wire import REPLIES, frame, take

LIMIT = 30.0
GPU = "cuda:0"
LADDER = (Rung(persistent=4, seconds=2.0), Rung(persistent=8, seconds=1.0))
CONFIG = """
[device."cuda:0"]
capacity = {capacity}
[device]
host = 8
[coordinator]
min_hold = "{min_hold}"
lease_ttl = "{lease_ttl}"
revoke_deadline = "{revoke_deadline}"
on_overdue = "{on_overdue}"
max_clients = {max_clients}
"""
DEFAULTS = {
    "capacity": 12,
    "min_hold": "0s",
    "lease_ttl": "10s",
    "revoke_deadline": "60s",
    "on_overdue": "wait",
    "max_clients": 1024,
}


def until(condition, limit=LIMIT, every=0.005):
    """The first true answer of a condition."""
    ends = time.monotonic() + limit
    while not (answer := condition()):
        assert time.monotonic() < ends, f"not within {limit:g} s: {condition.__name__}"
        time.sleep(every)
    return answer


class Daemon:
    """``jaxtensile serve`` in a folder of its own; started, killed and started again."""

    program = ("-m", "jaxtensile")

    def __init__(self, folder=None, *options, limits=None, **config):
        self._own = tempfile.TemporaryDirectory(prefix="jt-") if folder is None else None
        self.folder = Path(self._own.name if self._own else folder)
        self.folder.chmod(0o700)
        self.path = self.folder / "s"
        self.file = self.folder / "jaxtensile.toml"
        self.options, self.limits, self.processes = options, limits or {}, []
        self.configure(**config)

    def configure(self, **config):
        self.file.write_text(CONFIG.format(**{**DEFAULTS, **config}))

    def start(self, *, wait=True):
        def limit():
            for which, value in self.limits.items():
                resource.setrlimit(which, (value, value))

        command = [sys.executable, *self.program, "serve", "--config", self.file, "--socket", self.path]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=limit if self.limits else None,
            )
        self.processes.append(self.process)
        if wait:
            until(self.answers)
        return self

    def answers(self):
        assert self.process.poll() is None, self.log()
        try:
            return ask(self.path, 1.0).phase
        except CoordinatorError:
            return None

    def snapshot(self):
        return ask(self.path, LIMIT)

    def log(self):
        return (self.folder / "log").read_text()

    def leases(self):
        return {a.job: a for a in self.snapshot().leases}

    def states(self):
        return {a.job: a.state for a in self.snapshot().leases}

    def charged(self, device=GPU):
        return next(d.charged for d in self.snapshot().devices if d.device == device)

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        return self.process.wait(LIMIT)

    def client(self, job, ladder=LADDER, **given):
        return Client(Admit(job=job, devices=(GPU,), ladder=ladder, **given), SocketLink.to(str(self.path)))

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(LIMIT)
        if self._own:
            self._own.cleanup()


class Wire:
    """A raw connection: bytes out, messages in."""

    def __init__(self, path, *, hello=True):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(LIMIT)
        self.socket.connect(str(path))
        self.rest, self.messages = b"", []
        if hello:
            self.say(Hello(version=VERSION))
            self.hear(Welcome)

    def say(self, *messages):
        self.socket.sendall(b"".join(map(frame, messages)))

    def hear(self, kind: type = Reply):
        """The next message of a kind; None at the end of the connection."""
        while True:
            while self.messages:
                message = self.messages.pop(0)
                if isinstance(message, kind):
                    return message
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            taken = take(self.rest + data, REPLIES)
            assert taken.error is None
            self.rest, self.messages = taken.rest, [*taken.messages]

    def admit(self, job="a", ladder=LADDER, **given):
        self.say(Admit(job=job, devices=(GPU,), ladder=ladder, **given))
        return self.hear()

    def close(self):
        self.socket.close()


CHILD = """
import sys, time
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.client.socket_link import SocketLink
path, job, low, high = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ladder = (Rung(persistent=low, seconds=2.0), Rung(persistent=high, seconds=1.0))
client = Client(Admit(job=job, devices=("cuda:0",), ladder=ladder), SocketLink.to(path))
print("rung", client.wait(60), flush=True)
step = 0
while True:
    if client.boundary() is not None:
        client.moved()
        print("rung", client.rung, flush=True)
    step += 1
    client.beat(step, 0.01)
    time.sleep(0.01)
"""


class Child:
    """A job in a process of its own, which says the rungs it is on."""

    def __init__(self, daemon, job, low=4, high=8):
        command = [sys.executable, "-c", CHILD, str(daemon.path), job, str(low), str(high)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def rung(self):
        """The next rung that it says it is on."""
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        assert ready, f"it said nothing within {LIMIT:g} s"
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        return int(line.split()[1])

    def send(self, number):
        os.kill(self.pid, number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
