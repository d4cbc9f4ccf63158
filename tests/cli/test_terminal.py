"""What terminals and shells see: no colours, lines that fit, completion, and JSON alone on standard output."""

import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from fcntl import ioctl

import pytest

from jaxtensile.cli import main as cli
from jaxtensile.cli.terminal.completion import SHELLS, commands_of
from paths import ROOT

FILE = """
import jax
import jaxtensile
def make(batch=8):
    return jaxtensile.Workload(fun=lambda x: (x @ x.T).sum(), args=(jax.ShapeDtypeStruct((batch, 64), "float32"),))
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "quick.py").write_text(FILE)
    return f"{tmp_path}/quick.py:make"


def on_a_terminal(columns, *arguments):
    """What a command writes to a terminal of so many columns, both streams, and its exit code."""
    main, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    seen = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment = {**seen, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NO_COLOR": "1", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtensile", *arguments], stdin=other, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    out = b""
    with suppress(OSError):  # a terminal reads on, to the end
        while more := os.read(main, 1 << 16):
            out += more
    os.close(main)
    return out.decode(), process.wait(60)


@pytest.mark.parametrize("columns", [80, 200])
def test_lines_fit_and_have_no_colours(file, columns):
    text, code = on_a_terminal(columns, "tune", file, "--budget", "64KiB", "--batches", "8,64,128")
    assert code == cli.DONE and "\x1b" not in text and "\rcompiling batch" in text, text
    lines = [line for written in text.splitlines() for line in written.split("\r")]
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    targets = ("--target", "nvidia-h100-80gb", "--target", "nvidia-a100-80gb")
    text, code = on_a_terminal(columns, "estimate", file, "--no-batch", *targets)
    assert code == cli.DONE and "\x1b" not in text, text
    table = text[text.index("\n") : text.index("\r\n\r\n")]
    assert max(map(len, table.splitlines())) <= columns, table
    assert ("needs" in table) == (columns == 80)


@pytest.mark.parametrize("columns", [80, 200])
def test_help_fits(columns):
    text, code = on_a_terminal(columns, "tune", "--help")
    assert code == 0 and max(len(line.rstrip()) for line in text.splitlines()) <= columns and "\x1b" not in text


def test_completion_knows_every_command_and_option(capsys):
    commands = commands_of(cli._parser())
    assert {"estimate", "plan", "tune", "run", "completion"} <= set(commands) and "keep" not in commands
    for shell in SHELLS:
        assert cli.main(["completion", shell]) == cli.DONE
        text = capsys.readouterr().out
        for name, command in commands.items():
            assert name in text
            assert all((o if shell != "fish" else o.lstrip("-")) in text for o in command.options)
        assert "nvidia-h200" in text and "SUPPRESS" not in text and "%(" not in text


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("jaxtensile", "es"), ["estimate"]),
        (("jaxtensile", "tune", "--bat"), ["--batches"]),
        (("jaxtensile", "plan", "--target", "tpu-v5"), ["tpu-v5e", "tpu-v5p"]),
        (("jaxtensile", "completion", "f"), ["fish"]),
    ],
)
def test_bash_completes(words, completed):
    array = " ".join(f"'{word}'" for word in words)
    asks = f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _jaxtensile; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = SHELLS["bash"](commands_of(cli._parser())) + "\n" + asks
    done = subprocess.run(("bash", "--norc", "-c", script), capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_theirs(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    script = SHELLS[shell](commands_of(cli._parser()))
    subprocess.run((shell, "-n"), input=script, text=True, check=True)


def test_json_alone_goes_to_standard_output(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # measured rates are no other test's
    for command in (
        ("estimate", file, "--no-batch"),
        ("plan", file),
        ("tune", file, "--batches", "8"),
        ("calibrate",),
    ):
        assert cli.main([*command, "--json", "-"]) == cli.DONE
        json.loads(capsys.readouterr().out)
    assert cli.main(["calibrate", "--json", str(tmp_path / "rates.json")]) == cli.DONE
    assert not re.match(r"\s*\{", capsys.readouterr().out)
    json.loads((tmp_path / "rates.json").read_text())


def test_a_pipe_that_nobody_reads_is_no_fault():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "jaxtensile", "completion", "bash"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")
