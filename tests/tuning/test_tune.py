"""``jaxtensile tune`` in real processes and by its parts: what fits is best by samples a second, and was compiled."""

import json
import os
import re
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from jaxtensile.cli import main as cli
from paths import ROOT

FILE = """
    import jax, jax.numpy as jnp
    import jaxtensile

    def loss(w, x):
        for _ in range(4):
            x = x + jnp.tanh(x @ w)
        return (x * x).sum()

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    def make(batch=8, width=64, dtype="float32"):
        args = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in ((width, width), (batch, width)))
        return jaxtensile.Workload(fun=step, args=args, jit_options={"donate_argnums": 0}, name="net")

    def fixed():
        return make()

    def needy(batch, depth):
        return make(batch)

    def slow(batch):
        import time
        print("asked", flush=True)
        time.sleep(0 if batch < 16 else 60)
        return make(batch)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(dedent(FILE))
    return path


def run(*arguments):
    return cli.main(["tune", *map(str, arguments)])


def test_the_best_was_compiled_and_is_told_in_every_form(file, tmp_path, capsys):
    page, data = tmp_path / "t.html", tmp_path / "t.json"
    command = (f"{file}:make", "--budget", "128KiB", "--vary", "dtype=float32,bfloat16")
    assert run(*command, "--batches", "16,32,64", "--json", data, "--html", page) == cli.DONE
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == "make on this machine" and lines[1].split()[:3] == ["batch", "dtype", "needs"]
    assert lines[-1].startswith("best: batch ") and lines[-1].endswith("compiled") and not told.err
    assert all(len(line) <= 100 for line in lines) and "\x1b" not in told.out
    found = json.loads(data.read_text())
    points, best = found["points"], found["best"]
    assert {(p["batch"], p["given"]["dtype"]) for p in points} == {
        (batch, dtype) for batch in (16, 32, 64) for dtype in ("float32", "bfloat16")
    }
    checked = [p for p in points if p["by"] == "XLA" and p["fits"]]
    assert len(checked) == 2 and best in checked and best["needs"] <= best["room"] == 128 << 10
    assert best["samples_per_second"] == max(p["samples_per_second"] for p in checked)
    assert any(p["planned"] for p in points) and any(not p["fits"] for p in points if not p["planned"])
    text = page.read_text()
    assert text.count("<circle") == len(points) and "<script" not in text and "http" not in text


def test_sizes_are_looked_for_and_the_best_two_run(file, capsys):
    assert run(f"{file}:make", "--budget", "96KiB", "--no-chunk", "--race", "--json", "-") == cli.DONE
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["whole"] and [p["by"] for p in found["points"]].count("clock") == 2
    assert found["best"]["by"] == "clock" and found["best"]["measured"] > 0
    sizes = [p["batch"] for p in found["points"] if not p["planned"]]
    assert sizes == sorted(sizes) and not all(p["fits"] for p in found["points"]) and "best: " in told.err


@pytest.mark.cuda_aot
def test_for_a_card_that_is_not_here(file, capsys):
    assert run(f"{file}:make", "--target", "nvidia-h100-80gb", "--batches", "64", "--json", "-") == cli.DONE
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["by"] == "XLA" and 0 < point["seconds"] < 1


def test_what_cannot_fit_ends_with_1(file, capsys):
    assert run(f"{file}:make", "--budget", "1KiB", "--batches", "8,16") == cli.DOES_NOT_FIT
    assert re.search(r"nothing fits: .*the least found is [\d.]+KiB at batch 8", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["step"], "step has no batch to tune"),
        (["slow", "--vary", "width=1"], "no parameter 'width' to vary"),
        (["needy", "--batches", "8"], "needs depth: a function that returns a jaxtensile.Workload takes nothing or a"),
        (["fixed"], "fixed has no batch to tune: give it a parameter named batch"),
        (["make", "--vary", "widht=1,2"], "no parameter 'widht' to vary: did you mean 'width'?"),
        (["make", "--vary", "batch=1,2"], "no parameter 'batch' to vary"),
        (["make", "--race", "--target", "nvidia-h200"], "nvidia-h200 is not here to race on"),
        (["make", "--target", "nvidia-h20"], "unknown target"),
        (["make", "--json", "-", "--html", "-"], "both take standard output"),
        (["make", "--json", "/nowhere/x"], "there is no folder"),
        (["make", "--budget", "much"], "cannot read 'much' as a size"),
        (["make", "--batches", "8", "--vary", "dtype=floot"], "raised TypeError"),
    ],
)
def test_mistakes_are_one_line(file, arguments, told, capsys):
    assert run(f"{file}:{arguments[0]}", *arguments[1:]) == cli.WRONG_USE
    said = capsys.readouterr()
    assert told in said.err and "Traceback" not in said.err and not said.out


@pytest.mark.parametrize("option", ["--batches=8,x", "--batches=0", "--vary=width", "--vary=width="])
def test_lists_are_checked_by_the_parser(file, option, capsys):
    with pytest.raises(SystemExit) as info:
        run(f"{file}:make", option)
    assert info.value.code == cli.WRONG_USE and "such as" in capsys.readouterr().err


def test_after_ctrl_c_what_is_known_is_told(file):
    command = [sys.executable, "-m", "jaxtensile", "tune", f"{file}:slow", "--budget", "1MiB", "--batches", "4,8,16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for _ in range(3):  # the third size is asked for, and takes a minute
        assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "best: batch 8, as it is" in out and out.rstrip().endswith("interrupted: there may be better ones")
    assert "Traceback" not in err
