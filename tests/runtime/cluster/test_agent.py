"""An agent with real processes: its machine's coordinator, jobs with leases, and what is left when one is killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from daemons import until
from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.cluster.agent import Agent, FencedError
from jaxtensile.runtime.cluster.records import Launch, Record, Spec, Tick
from jaxtensile.runtime.placement.asks import Place

CONFIG = """
[device."cuda:0"]
capacity = 20
[device]
host = 8
turns = false
"""
JOB = """
import os, signal, sys, time
from jaxtensile.errors import RejectedError
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.daemon.endpoint import DEVICES_VARIABLE, JOB_VARIABLE, VARIABLE
from jaxtensile.runtime.client.socket_link import SocketLink

need, steps, status = map(int, sys.argv[1:])
ladder = (Rung(persistent=need, seconds=0.01),)
admit = Admit(job=os.environ[JOB_VARIABLE], devices=(os.environ[DEVICES_VARIABLE],), ladder=ladder)
client = Client(admit, SocketLink.to(os.environ[VARIABLE]))
client.wait(60)
print("begins with process", os.getpid(), "in", os.getcwd(), flush=True)
for step in range(1, steps + 1):
    time.sleep(0.01)
    client.beat(step, 0.01, (), need)
client.release(timeout=1.0)
print("ends badly" if status else "ends")
sys.exit(status)
"""


@pytest.fixture
def agent(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "jaxtensile.toml").write_text(CONFIG)
    (tmp_path / "job.py").write_text(JOB)
    environment = {
        **os.environ,
        "JAXTENSILE_SOCKET": str(tmp_path / "s"),
        "JAXTENSILE_CONFIG": str(tmp_path / "jaxtensile.toml"),
        "PYTHONPATH": ":".join(p for p in sys.path if p),
    }
    found = Agent("here", "127.0.0.1", environment, os.getpid())
    yield found
    found.close()
    os.kill(daemon(found), signal.SIGTERM)
    until(lambda: not found_there(found))


def found_there(agent):
    return Path(agent.socket).exists()


def daemon(agent):
    return int(Path(f"{agent.socket}.lock").read_text())


def launch(agent, job, need, steps, status=0, attempt=1, **given):
    command = (sys.executable, "job.py", str(need), str(steps), str(status))
    folder = given.pop("folder", str(Path(agent.socket).parent))
    spec = Spec(job=job, name=job, command=given.pop("command", command), folder=folder, floor=4, **given)
    record = Record(spec=spec, order=1, floor=4, state="placed", attempt=attempt, places=(Place("here", ("cuda:0",)),))
    agent.tick(Tick(epoch=1, launch=(Launch(record=record),)))


def seen(agent, job, **wanted):
    """What is said of a job, once it is so."""
    agent.tick(Tick(epoch=1))

    def there():
        report = agent.tick(Tick(epoch=1))
        task = next(t for t in report.tasks if t.job == job)
        return (report, task) if all(getattr(task, k) == v for k, v in wanted.items()) else None

    return until(there)


def gone(pid):
    return not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]


def test_jobs_run_beside_each_other_under_the_machines_own_coordinator(agent):
    until(lambda: agent.tick(Tick(epoch=1)).serving)
    room = next(r for r in agent.tick(Tick(epoch=1)).rooms if r.device == "cuda:0")
    assert (room.device, room.limit, room.guaranteed) == ("cuda:0", 20, 0)
    launch(agent, "one", 12, 100_000)
    launch(agent, "two", 6, 20)
    launch(agent, "bad", 1, 5, 3)
    launch(agent, "large", 21, 5)
    launch(agent, "nowhere", 4, 5, folder="/no/such/folder")
    launch(agent, "nothing", 4, 5, command=("/no/such/program",))
    report, task = seen(agent, "one", lease="held")
    assert {r.device: r.guaranteed for r in report.rooms}["cuda:0"] >= 12 and task.granted == 12 and not task.ended
    assert seen(agent, "two", ended=True)[1].status == 0
    bad = seen(agent, "bad", ended=True)[1]
    assert (bad.status, bad.reason, bad.rejected) == (3, "ends badly", None)
    large = seen(agent, "large", ended=True)[1]
    assert large.rejected == 20 and "the smallest plan needs 21B on cuda:0" in large.reason
    assert "there is no folder /no/such/folder" in seen(agent, "nowhere", ended=True)[1].reason
    assert seen(agent, "nothing", ended=True)[1].reason.startswith("'/no/such/program' cannot be started")

    end, said = agent.output("one", 1, 0)
    assert said.startswith(b"begins with process ") and end == len(said)
    assert agent.output("one", 1, end) == (end, b"")
    pid = int(said.split()[3])

    os.kill(daemon(agent), signal.SIGKILL)
    until(lambda: not agent.tick(Tick(epoch=1)).serving)
    until(lambda: agent.tick(Tick(epoch=1)).serving)
    assert until(lambda: seen(agent, "one", lease="held")[1].step) and not gone(pid), (
        "it goes on, and another coordinator knows of it"
    )

    agent.tick(Tick(epoch=1, stop=(("one", 1),)))
    stopped = seen(agent, "one", ended=True)[1]
    assert stopped.stopped and stopped.status == 128 + signal.SIGTERM and gone(pid)
    agent.tick(Tick(epoch=1, forget=tuple((t.job, t.attempt) for t in agent.tick(Tick(epoch=1)).tasks)))
    assert agent.tick(Tick(epoch=1)).tasks == ()


def test_a_job_ends_with_its_agent_and_with_its_keeper(agent):
    launch(agent, "one", 4, 100_000)
    launch(agent, "two", 4, 100_000)
    pids = {}
    for job in ("one", "two"):
        seen(agent, job, lease="held")
        pids[job] = int(until(lambda job=job: agent.output(job, 1, 0)[1]).split()[3])
    os.kill(os.getsid(pids["one"]), signal.SIGKILL)  # the keeper leads its session
    until(lambda: gone(pids["one"]))
    assert seen(agent, "one", ended=True)[1].status == 128 + signal.SIGKILL
    agent._runs["two", 1]._process.stdin.close()  # as the kernel does when the agent dies
    until(lambda: gone(pids["two"]))


def test_only_the_newest_coordinator_is_heeded_and_a_launch_is_carried_out_once(agent):
    marks = ("sh", "-c", "echo here >> marks; sleep 600")
    for _ in range(3):
        launch(agent, "one", 4, 1, command=marks)
    file = Path(agent.socket).parent / "marks"
    until(file.exists)
    launch(agent, "one", 4, 1, command=marks, attempt=2)
    time.sleep(0.2)
    assert file.read_text() == "here\n"
    assert agent.tick(Tick(epoch=5)).epoch == 5
    with pytest.raises(FencedError, match="the orders are of epoch 4, and 5 was heard"):
        agent.tick(Tick(epoch=4, stop=(("one", 1),)))
    assert issubclass(FencedError, CoordinatorError)
    report = agent.tick(Tick(epoch=0, everything=True))
    assert [(r.spec.job, r.attempt) for r in report.records] == [("one", 1)]
    assert [(t.job, t.attempt, t.ended) for t in report.tasks] == [("one", 1, False)]
