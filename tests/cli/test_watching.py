"""``jaxtensile serve``, ``status`` and ``top`` say what there is, and a user's mistake is one line."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from daemons import LIMIT, Child, Daemon, until
from jaxtensile.cli import main as cli
from jaxtensile.cli.watching import duration


@pytest.fixture(scope="module")
def daemon():
    with Daemon(capacity=9) as daemon:
        yield daemon


def test_status_tells_devices_jobs_and_what_happened(daemon, capsys):
    with Child(daemon, "bert", 4, 8) as one:
        assert one.rung() == 1
        waiting = daemon.client("gpt", floor=8)
        until(lambda: daemon.states().get("gpt") == "queued" and daemon.leases()["bert"].step)
        assert cli.main(["status", "--socket", str(daemon.path)]) == 0
        said = capsys.readouterr().out
        assert f"coordinator at {daemon.path}: serving, policy slowdown, start 1; 2 jobs, 1 of them waiting" in said
        assert "cuda:0" in said and "8B of 9B granted, 4B of that for good" in said
        (bert,) = [line for line in said.splitlines() if line.startswith("bert")]
        assert " held " in bert and " 2 of 2 " in bert and " 8B " in bert and " 10ms " in bert
        (gpt,) = [line for line in said.splitlines() if line.startswith("gpt")]
        assert " queued " in gpt
        assert "ago  waits gpt: behind 0" in said and "ago  granted bert rung 1" in said

        assert cli.main(["status", "--json", "--socket", str(daemon.path)]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["devices"][1]["charged"] == 8 and data["counters"]["grants"] == 1
        assert {a["job"]: a["state"] for a in data["leases"]} == {"bert": "held", "gpt": "queued"}
        waiting.close()
    until(lambda: not daemon.snapshot().leases)


def test_top_prints_plainly_where_there_is_no_terminal(daemon, capsys):
    assert cli.main(["top", "--socket", str(daemon.path)]) == 0
    said = capsys.readouterr().out
    assert said.count("coordinator at") == 1 and "\x1b" not in said
    assert cli.main(["top", "--count", "3", "--every", "0.01", "--socket", str(daemon.path)]) == 0
    assert capsys.readouterr().out.count("coordinator at") == 3


def test_top_redraws_on_a_terminal_until_ctrl_c(daemon):
    main, other = pty.openpty()
    command = [sys.executable, "-m", "jaxtensile", "top", "--every", "0.05", "--socket", str(daemon.path)]
    with subprocess.Popen(command, stdout=other, stderr=subprocess.PIPE) as top:
        os.close(other)
        seen = b""
        while seen.count(b"\x1b[H\x1b[J") < 3:
            seen += os.read(main, 4096)
        top.send_signal(signal.SIGINT)
        with suppress(OSError):  # a terminal reads on, to the end
            while os.read(main, 4096):
                pass
        assert top.wait(LIMIT) == 130 and top.stderr.read() == b""
    assert b"serving" in seen
    os.close(main)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "--socket", "/tmp/there-is-nothing-here.sock"], "no coordinator answers at /tmp/there-is-nothing"),
        (["top", "--socket", "/tmp/there-is-nothing-here.sock"], "start one with 'jaxtensile serve'"),
        (["top", "--every", "0"], "--every 0: give a number of seconds above 0"),
        (["serve", "--socket", "/tmp/" + "x" * 120], "has 125 bytes, 107 at most"),
        (["serve", "--socket", "/proc/none/s"], "/proc/none cannot be made"),
        (["serve", "--config", "/nothing.toml"], "/nothing.toml: cannot be read"),
        (["serve", "--metrics", "123456"], "a port is a number from 0 to 65535"),
        (["serve", "--metrics", "-1"], "a port is a number from 0 to 65535"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, said):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxtensile: ") and err.count("\n") == 1 and said in err


def test_durations_are_short():
    assert [duration(t) for t in (0.04, 59.9, 60, 3599, 4000)] == ["0.0s", "59.9s", "1m00s", "59m59s", "1h06m"]
