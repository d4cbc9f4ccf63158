"""``jaxtensile run`` starts the config's jobs, shares a device between them, tells what becomes of each, and leaves
nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from daemons import LIMIT, Daemon, until
from jaxtensile.cli import main as cli
from jaxtensile.cli.running import until_terminated
from jaxtensile.cli.xla_memory import variables
from jaxtensile.units import GIB

JOB = """
import glob, os, sys, time
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.daemon.endpoint import JOB_VARIABLE, VARIABLE
from jaxtensile.runtime.client.socket_link import SocketLink

steps, status = int(sys.argv[1]), int(sys.argv[2])
ladder = (Rung(persistent=4, seconds=0.02), Rung(persistent=8, seconds=0.01))
admit = Admit(job=os.environ[JOB_VARIABLE], devices=("cuda:0",), ladder=ladder)
open(f"{admit.job}.asks", "w").close()
client = Client(admit, SocketLink.to(os.environ[VARIABLE]))
client.wait(60)
while len(glob.glob("*.asks")) < int(sys.argv[3]):
    time.sleep(0.01)
time.sleep(0.2)
print("begins with", os.environ["JAXTENSILE_CONFIG"], flush=True)
for step in range(1, steps + 1):
    if client.boundary() is not None:
        client.moved()
    time.sleep(0.01)
    client.beat(step, 0.01, (), 8)
if status < 0:
    os.kill(os.getpid(), -status)
client.release(timeout=1.0)
sys.exit(status)
"""
CONFIG = """
[device."cuda:0"]
capacity = 9
[coordinator]
min_hold = "0s"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXTENSILE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "job.py").write_text(dedent(JOB))
    return tmp_path


def write(folder, together=0, **jobs):
    """A config of jobs, each with the arguments of its script, or its whole command; so many are there at once."""
    text = CONFIG
    for name, arguments in jobs.items():
        command = (
            arguments
            if isinstance(arguments[0], str)
            else [sys.executable, "job.py", *map(str, arguments), str(together)]
        )
        text += f"[jobs.{name}]\ncommand = {json.dumps(command)}\n"
    (folder / "jaxtensile.toml").write_text(text)


def rows(printed):
    """The table at the end, by job."""
    table = printed[printed.rindex("\njob ") :].strip().splitlines()
    return {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in table[1:-1]}, table[-1]


def test_jobs_run_to_their_ends_and_the_table_says_how(folder, capfd):
    write(folder, 4, one=(40, 0), two=(40, 0), three=(5, 3), four=(5, -9))
    assert cli.main(["run"]) == 1
    printed = capfd.readouterr().out
    assert "coordinator of these jobs: jaxtensile top --socket " in printed
    assert f"one | begins with {folder}/jaxtensile.toml" in printed
    assert "three | FAILED, exit 3 after " in printed and "four | FAILED, SIGKILL after " in printed
    assert re.search(r"one \| 4B, plan 1 of 2", printed)
    found, verdict = rows(printed)
    assert {name: row[1] for name, row in found.items()} == {
        "one": "exit 0",
        "two": "exit 0",
        "three": "exit 3",
        "four": "SIGKILL",
    }
    assert found["one"][4:6] == found["two"][4:6] == ["40", "8B"]
    assert found["three"][4] == "5" and re.fullmatch(r"[\d.]+[MG]iB", found["one"][6])
    assert re.fullmatch(r"2 of 4 jobs done in [\d.]+s", verdict)
    # Four floors of 4 bytes, and room for 9: two have waited for those that were first.
    assert sorted(float(row[3].rstrip("s")) >= 0.1 for row in found.values())[2:] == [True, True]
    (socket,) = re.findall(r"--socket (\S+)", printed)
    assert not os.path.exists(os.path.dirname(socket))


def test_commands_run_where_the_config_is_with_the_python_that_runs_this(folder, capfd, monkeypatch):
    say = "import os, sys, jaxtensile; print('in', os.getcwd(), 'by', sys.executable)"
    write(folder, one=["python", "-c", say])
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert cli.main(["run"]) == 0
    assert f"one | in {folder} by {Path(sys.executable).parent}/python" in capfd.readouterr().out


def test_only_the_jobs_that_are_named_run_with_the_coordinator_that_is_there(folder, capfd):
    with Daemon(capacity=9) as daemon:
        write(folder, one=(3, 0), two=(3, 1))
        assert cli.main(["run", "one", "--socket", str(daemon.path)]) == 0
        printed = capfd.readouterr().out
        assert f"coordinator at {daemon.path}\n" in printed and "two" not in printed
        assert daemon.process.poll() is None and daemon.snapshot().counters["admitted"] == 1


def test_a_job_that_writes_for_ever_lets_the_others_be_heard(folder, capfd):
    """Its lines are repeated a piece at a time, and so is a line that does not end."""
    ticks = "import time\nfor k in range(5): print('tick', k, flush=True); time.sleep(0.1)"
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    write(folder, loud=["timeout", "1.5", "yes"], line=["timeout", "1.5", sys.executable, "-c", endless])
    with (folder / "jaxtensile.toml").open("a") as file:
        file.write(f"[jobs.quiet]\ncommand = {[sys.executable, '-c', ticks]!r}\n")
    cli.main(["run"])
    lines = capfd.readouterr().out.splitlines()
    told = [k for k, line in enumerate(lines) if line.startswith(("quiet | tick", "quiet | done"))]
    others = [k for k, line in enumerate(lines) if line.startswith(("loud | y", "line | x"))]
    assert len(told) == 6 and told[-1] < others[-1], "all of it was told while the others went on"
    assert max(map(len, lines)) < 150_000


def test_what_a_job_leaves_behind_ends_with_the_run(folder, capfd):
    write(folder, one=["sh", "-c", "yes & echo left $!"])
    assert cli.main(["run"]) == 0
    (pid,) = re.findall(r"one \| left (\d+)", capfd.readouterr().out)
    until(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2])


def test_what_a_job_leaves_behind_in_sessions_of_its_own_ends_with_the_job(folder, capfd):
    """Also what that has left behind; what other jobs have left goes on while they do."""
    one = """
        setsid sleep 600 & echo left $!; echo $! > new; mv new left
        (setsid sh -c 'sleep 600 & echo left $!; touch inner; exec sleep 600' &)
        until test -e inner; do sleep 0.01; done"""
    two = """
        (setsid sleep 600 & echo left $!; echo $! > mine)
        until test -e left; do sleep 0.01; done
        for k in $(seq 1000); do kill -0 $(cat left) 2> /dev/null || break; sleep 0.01; done
        kill -0 $(cat mine) && echo its own is there"""
    write(folder, one=["sh", "-c", one], two=["sh", "-c", two])
    assert cli.main(["run"]) == 0
    printed = capfd.readouterr().out
    pids = re.findall(r"left (\d+)", printed)
    assert "two | its own is there" in printed
    assert len(pids) == 3 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture
def terminal():
    """The end of a terminal is not ignored by a process that starts. It is under ``nohup``, and in every process that
    has loaded libtpu, which asks nobody: what Python says of the signal is then wrong."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_ends_the_jobs_and_their_coordinator(folder, number):
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)" if number == signal.SIGINT else ""
    stubborn = f"import signal, time; {ignored}; print('here'); time.sleep(600)".replace("; ;", ";")
    write(folder, one=(100_000, 0), two=[sys.executable, "-c", stubborn])
    command = [sys.executable, "-m", "jaxtensile", "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        said = ""
        while "two | here" not in said or "one | begins" not in said:
            line = run.stdout.readline()
            assert line, said
            said += line
        pids = [int(pid) for pid in re.findall(r"started, process (\d+)", said)]
        (socket,) = re.findall(r"--socket (\S+)", said)
        run.send_signal(number)
        rest = run.communicate(timeout=LIMIT)[0]
        assert run.returncode == 130
    found, verdict = rows(rest)
    assert (
        found["one"][1] in ("SIGINT", "exit 1")
        and found["two"][1] == ("SIGTERM" if ignored else "SIGINT")
        and "0 of 2 jobs" in verdict
    )
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids) and not os.path.exists(socket)


def test_sigquit_is_like_ctrl_c_where_it_is_not_ignored():
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell has its jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt), until_terminated():
            os.kill(os.getpid(), signal.SIGQUIT)
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_names_are_shown_where_the_terminal_has_no_such_letters(folder):
    write(folder, **{'"café"': [sys.executable, "-c", "pass"]})
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "jaxtensile", "run"]
    told = subprocess.run(command, env=ascii_only, capture_output=True, text=True, timeout=LIMIT)
    assert told.returncode == 0 and "caf\\xe9 | done" in told.stdout and not told.stderr


def test_jobs_go_on_when_their_coordinator_is_killed_and_it_is_said(folder):
    write(folder, one=(200, 0))
    with subprocess.Popen([sys.executable, "-m", "jaxtensile", "run"], stdout=subprocess.PIPE, text=True) as run:
        said = ""
        while "one | begins" not in said:
            said += run.stdout.readline()
        (socket,) = re.findall(r"--socket (\S+)", said)
        os.kill(int(Path(f"{socket}.lock").read_text()), signal.SIGKILL)
        rest = run.communicate(timeout=LIMIT)[0]
        assert run.returncode == 0
    assert "run | the coordinator at" in rest and "the jobs go on with what they hold" in rest
    assert rows(rest)[0]["one"][1] == "exit 0"


def test_the_private_coordinator_ends_when_its_jobs_starter_is_killed(folder):
    write(folder, one=(100_000, 0))
    with subprocess.Popen([sys.executable, "-m", "jaxtensile", "run"], stdout=subprocess.PIPE, text=True) as run:
        said = ""
        while "one | begins" not in said:
            said += run.stdout.readline()
        (socket,) = re.findall(r"--socket (\S+)", said)
        daemon = int(Path(f"{socket}.lock").read_text())
        run.kill()
        os.kill(int(re.findall(r"started, process (\d+)", said)[0]), signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{daemon}"))
    shutil.rmtree(os.path.dirname(socket))


@pytest.mark.parametrize(
    ("jobs", "arguments", "said"),
    [
        (None, [], "there is no jaxtensile.toml here or above"),
        ({"bert": (1, 0)}, ["bart"], "there is no job 'bart': did you mean 'bert'?"),
        ({"bert": ["/no/such/program"]}, [], "job 'bert': '/no/such/program' cannot be started"),
        ({"one": [sys.executable, "-c", "1"], "two": ["pyton"]}, [], "job 'two': 'pyton' cannot be started"),
        ({}, [], "no job has a command: write [jobs.NAME]"),
    ],
)
def test_a_mistake_is_one_line(folder, capfd, jobs, arguments, said):
    if jobs is not None:
        write(folder, **jobs)
    assert cli.main(["run", *arguments]) == 2
    err = capfd.readouterr().err
    assert err.startswith("jaxtensile: ") and err.count("\n") == 1 and said in err


def test_on_a_cluster_a_job_needs_a_floor_and_the_machine_ray(folder, capfd):
    write(folder, one=(1, 0))
    assert cli.main(["run", "--on", "ray"]) == 2
    err = capfd.readouterr().err
    assert "job 'one' has no least" in err and "write least = '4GiB'" in err and err.count("\n") == 1
    if find_spec("ray") is None:  # with it: tests/runtime/cluster/test_ray.py
        with open("jaxtensile.toml", "a") as config:
            config.write("least = 4\n")
        assert cli.main(["run", "--on", "ray"]) == 2
        assert capfd.readouterr().err == "jaxtensile: Ray is not installed here: pip install 'jaxtensile[ray]'\n"


def test_a_coordinator_that_cannot_start_says_why(folder, capfd):
    write(folder, one=(1, 0))
    with open("jaxtensile.toml", "a") as config:
        config.write("\n[device.cpu]\nreserve = '9TB'\n")
    assert cli.main(["run"]) == 2
    err = capfd.readouterr().err
    assert "a coordinator could not be started" in err and "leaves nothing of" in err and "Traceback" not in err


def test_xla_is_told_to_share():
    elastic = variables(4 * GIB, 12 * GIB, 80 * GIB, {})
    assert elastic == {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": "0.0500",
    }
    fixed = variables(20 * GIB, 20 * GIB, 80 * GIB, {})
    assert (fixed["XLA_PYTHON_CLIENT_ALLOCATOR"], fixed["XLA_CLIENT_MEM_FRACTION"]) == ("bfc", "0.2500")
    assert variables(0, None, 80 * GIB, {})["XLA_CLIENT_MEM_FRACTION"] == "0.0100"
    # What the user has set stays, under either name, and XLA refuses both names at once.
    assert "XLA_CLIENT_MEM_FRACTION" not in variables(1, 2, 8, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"})
    assert variables(1, 2, 8, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}) == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
