"""A forked child does nothing in the name of its parent: real daemons, real forks."""

import json
import os
import signal
import subprocess
import sys

import pytest

from daemons import LIMIT, Daemon, until

PARENT = """
import json, os, sys, threading, time
from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.client.socket_link import SocketLink

path, what = sys.argv[1:]
client = Client(Admit(job="a", devices=("cuda:0",), ladder=(Rung(persistent=8, seconds=1.0),)), SocketLink.to(path))
client.wait(60)
client._lock.acquire()  # as if another thread were at it
child = os.fork()
if not child:
    told = []
    if what == "ends":
        told = [client.release(), client.give_back(), client.pulse(), client.close()]
    elif what == "uses":
        client._due = True
        for use in (client.wait, client.boundary, client.moved, lambda: client.renew(client.admit, 0)):
            try:
                use()
            except CoordinatorError as error:
                told.append(str(error))
    elif what == "outlives":
        time.sleep(60)
    print(json.dumps(told), flush=True)
    os._exit(0)
client._lock.release()
if what == "outlives":
    print(child, flush=True)
else:
    os.waitpid(child, 0)
print("ready", flush=True)
sys.stdin.readline()
print(client.boundary(), client.release(), flush=True)
"""
JOB = """
import json, os, sys
import jax.numpy as jnp, jaxtensile
from jaxtensile.jobs import arbitration
from jaxtensile.runtime.client.holds import Hold

def told(use):
    try:
        return use()
    except jaxtensile.CoordinatorError as error:
        return str(error)

def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

x = jnp.ones(8)
with jaxtensile.job("a", config={"device": {"capacity": "64MiB"}}) as job:
    step = jaxtensile.jit(lambda x: x + 1, job=job)
    step(x), job.wait(60)
    states = lambda: [lease.state for lease in arbitration._local[1].status().leases]

    def use():
        with arbitration._lock:
            pass
        uses = [told(lambda: step(x)), told(lambda: job.suspend(x)), told(job.wait), told(job.close)]
        job.__exit__(None, None, None)
        print(json.dumps([*uses, arbitration._local, sorted(arbitration._jobs)]), flush=True)

    before = states()
    hold = Hold()
    job._steps._lock.take(hold.mark), arbitration._lock.acquire()
    child(use)
    job._steps._lock.give(hold.mark), arbitration._lock.release()
    print(json.dumps([before, states(), float(step(x)[0])]), flush=True)
"""


@pytest.fixture
def daemon():
    with Daemon(lease_ttl="2s") as it:
        yield it


def parent(daemon, what):
    command = [sys.executable, "-c", PARENT, str(daemon.path), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("what", ["ends", "uses", "is not told"])
def test_the_parent_keeps_its_lease(daemon, what):
    with parent(daemon, what) as process:
        told = json.loads(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        assert daemon.states() == {"a": "held"} and daemon.charged() == 8
        assert process.communicate("\n", LIMIT)[0] == "None True\n"
    assert daemon.states() == {}
    if what == "ends":
        assert told == [False, None, None, None]
    if what == "uses":
        assert len(told) == 4 and all(f"belongs to process {process.pid}, and this one" in line for line in told)


def test_a_child_that_outlives_its_parent_does_not_keep_its_lease(daemon):
    with parent(daemon, "outlives") as process:
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.stdin.close()
        until(lambda: daemon.states() == {})
        os.kill(child, 0)  # it is there
        os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore")
def test_a_child_has_no_jobs():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOB], env=environment, capture_output=True, text=True, timeout=4 * LIMIT
    )
    assert done.returncode == 0, done.stderr
    (*errors, ended, local, jobs), (before, after, value) = map(json.loads, done.stdout.splitlines())
    assert len(errors) == 3 and all("make a job of its own here" in error for error in errors)
    assert (ended, local, jobs) == (None, None, [])
    assert before == after == ["held"] and value == 2.0
