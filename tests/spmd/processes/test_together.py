"""Processes of one job change plans before the same step: as threads over a store in memory, and as two real ones."""

import json
import os
import socket
import subprocess
import sys
import threading
from random import Random

import pytest

from daemons import until
from jaxtensile.errors import AgreementError
from jaxtensile.runtime.daemon.inquiry import ask
from jaxtensile.spmd.processes.together import Together
from paths import ROOT

LIMIT = 30.0


class MemoryStore:
    """What ``keystore.Store`` does, in one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def put(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key, wait=0.0):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, wait)
            return self.values.get(key)

    def below(self, folder):
        with self.changed:
            return {k.removeprefix(f"{folder}/"): v for k, v in self.values.items() if k.startswith(f"{folder}/")}

    def delete(self, folder):
        with self.changed:
            for key in [k for k in self.values if k == folder or k.startswith(f"{folder}/")]:
                del self.values[key]


@pytest.mark.parametrize("seed", range(4))
def test_all_run_one_rung_in_every_step_and_none_above_what_it_may(seed):
    """A step ends in none before it has begun in all, as one with collectives; leases go up and down meanwhile."""
    count, store = 2 + seed % 3, MemoryStore()
    ran: list[list[int]] = [[] for _ in range(count)]
    errors, over = [], []

    def ended():
        if len(set(ran[0])) > 2 or len(ran[0]) > 100_000:
            over.append(len(ran[0]))

    there = threading.Barrier(count, action=ended)

    def process(me):
        rnd = Random(100 * seed + me)
        others = Together(store, "job", me, range(count), LIMIT, "a")
        may = rnd.randint(0, 3)
        others.may(may)
        others.begin()
        rung, pending = others.rung, None
        try:
            while not over:
                if ran[me]:
                    rung = others.step()
                if pending is not None and others.allows(pending):
                    may, pending = pending, None  # only now the lease goes down
                assert rung <= may
                ran[me].append(rung)
                there.wait(LIMIT)
                if pending is None and rnd.random() < 0.1:
                    told = rnd.randint(0, 3)
                    others.may(told)
                    may, pending = (told, None) if told >= may else (may, told)
                if rnd.random() < 0.3:
                    threading.Event().wait(rnd.random() * 0.01)
        except BaseException as error:
            errors.append(error)
            there.abort()
            raise
        finally:
            others.close()

    threads = [threading.Thread(target=process, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert all(ran[0] == other for other in ran) and len(set(ran[0])) > 2


def test_they_are_admitted_one_after_the_other_or_none_is():
    store, order, said = MemoryStore(), [], {}

    def process(me, fails):
        others = Together(store, f"job{fails}", me, range(3), LIMIT, "a")

        def act():
            order.append((fails, me))
            if me == fails:
                raise ValueError("there is no room")

        try:
            others.in_turn(act)
        except (AgreementError, ValueError) as error:
            said[fails, me] = str(error)

    for fails in (-1, 1):
        threads = [threading.Thread(target=process, args=(me, fails)) for me in (2, 1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    assert order == [(-1, 0), (-1, 1), (-1, 2), (1, 0), (1, 1)]
    refused = "job 'a' is not admitted by process 1: there is no room"
    assert said == {(1, 0): refused, (1, 1): "there is no room", (1, 2): refused}


def test_a_process_that_is_not_there_is_missed():
    store = MemoryStore()
    others = Together(store, "job", 0, (0, 1), 0.3, "a")
    store.put("job/may/1", b"1")
    others.may(1)
    others.begin()
    assert others.rung == 1
    others.may(0)
    until(lambda: others._pending is not None)
    with pytest.raises(AgreementError, match=r"waits for 0\.3 s for all of processes 0, 1 to say"):
        others.step()
    others.close()


# Two processes, each with a coordinator of its machine's own.

CONFIG = """
[device."cpu:0"]
capacity = "{mib}MiB"
reserve = 0
[device]
turns = false
[coordinator]
min_hold = "0s"
"""
OTHER = """
import sys, time
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.client.socket_link import SocketLink
ladder = (Rung(persistent=int(sys.argv[2]), seconds=1.0),)
client = Client(Admit(job="other", devices=("cpu:0",), ladder=ladder), SocketLink.to(sys.argv[1]))
client.wait(60)
print("{}", flush=True)
sys.stdin.readline()
client.release()
"""


@pytest.fixture
def two(tmp_path):
    """Two machines: daemons, and a process of the job on each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    started = []

    def start(command, **environment):
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": ":".join(p for p in sys.path if p),
            **environment,
        }
        out = tmp_path / f"out{len(started)}"
        with out.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)], stdin=subprocess.PIPE, stdout=file, env=env
            )
        started.append(process)
        return process, lambda: [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]

    sockets = []
    for k in range(2):
        place = tmp_path / f"m{k}"
        place.mkdir(mode=0o700)
        (place / "c.toml").write_text(CONFIG.format(mib=40))
        sockets.append(place / "s")
        start(["-m", "jaxtensile", "serve", "--socket", sockets[k], "--config", place / "c.toml"])
    until(lambda: all(path.exists() for path in sockets))
    jobs = [
        start(
            [ROOT / "tests" / "job_of_two.py", tmp_path / "stop"],
            JAXTENSILE_SOCKET=str(sockets[k]),
            JAX_COORDINATOR_ADDRESS=address,
            JAX_PROCESS_ID=str(k),
        )
        for k in range(2)
    ]
    yield tmp_path, sockets, jobs, start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.xdist_group("processes")
def test_a_job_of_two_machines_changes_plans_in_both_before_the_same_step(two):
    folder, sockets, jobs, start = two
    levels = [until(told, limit=4 * LIMIT)[0]["levels"] for _, told in jobs]
    assert levels[0] == levels[1] and len(levels[0]) >= 2

    def charged(k):
        return next((lease.charged[0] for lease in ask(sockets[k]).leases if lease.job == "both"), 0)

    until(lambda: [charged(k) for k in range(2)] == [levels[0][-1]] * 2)
    # Another job wants so much on the second machine that the first plan does not fit there any more.
    other, there = start(["-c", OTHER, sockets[1], (40 << 20) - levels[0][0] - 1])
    until(there)
    until(lambda: charged(1) == levels[0][0], limit=2 * LIMIT)
    other.communicate(b"\n", timeout=LIMIT)
    until(lambda: charged(1) == levels[0][-1])
    (folder / "stop").touch()
    assert [job.wait(4 * LIMIT) for job, _ in jobs] == [0, 0]
    told = [told()[-1] for _, told in jobs]
    assert told[0] == told[1], "the same plan in the same step, in both"
    assert {levels[0][0], levels[0][-1]} <= set(told[0]["rungs"]) and told[0]["switches"] >= 1
