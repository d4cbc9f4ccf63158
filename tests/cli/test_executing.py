"""``jaxtensile exec`` in real processes: scripts that know nothing of us print what they print without."""

import os
import signal
import subprocess
import sys
import tomllib

import pytest

from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.functions import KEYS
from paths import ROOT

SCRIPT = """
import functools, sys
import jax, jax.numpy as jnp
from jax import jit

def loss(weights, x):
    for w in weights:
        x = x + jnp.sin(x @ w)
    return jnp.mean(x**2)

@functools.partial(jit, donate_argnums=0)
def train_step(weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

def main():
    weights = [jnp.full((64, 64), 0.01 * i, jnp.float32) for i in range(6)]
    x = jnp.ones((2048, 64)) * 0.1
    for _ in range(3):
        weights, value = train_step(weights, x)
        print(float(value), flush=True)
    return weights, x

if __name__ == "__main__":
    main()
    exec(sys.argv[1] if sys.argv[1:] else "")
"""
LIMIT = 120
"""Seconds for one process: far more than any takes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("programs")
    (found / "train.py").write_text(SCRIPT)
    return found


@pytest.fixture(scope="module")
def expected(folder):
    return run(folder, sys.executable, "train.py").stdout


def environment(**more):
    seen = {k: v for k, v in os.environ.items() if k not in ("JAXTENSILE_STRICT", "JAXTENSILE_EXEC")}
    return {**seen, "JAX_PLATFORMS": "cpu", **more}


def run(folder, *command, **more):
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=LIMIT, check=False
    )


def ours(*options):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jaxtensile.cli.main import main; sys.exit(main())"
    return sys.executable, "-c", code, "exec", "--no-chunk", *options, "--"


def lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("jaxtensile: ")]


def test_the_same_losses_and_a_table(folder, expected):
    done = run(folder, *ours("--budget", "4MiB"), sys.executable, "train.py", "sys.exit(7)")
    assert (done.stdout, done.returncode) == (expected, 7), done.stderr
    said = lines(done)
    assert "planning train_step (train.py:11)" in said[0] and len(said) == 4, said
    assert said[1] == "jaxtensile: 1 of 1 program planned"
    assert "\x1b" not in done.stderr
    done = run(folder, *ours("--budget", "4GiB"), sys.executable, "train.py")
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
    assert lines(done) == ["jaxtensile: nothing was planned: 1 program had room as written"]


def test_modules_children_and_a_sitecustomize_of_the_users_own(folder, expected):
    """``python -m``, a child by ``spawn``, a script by its shebang, and what the environment had before."""
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_user = __file__\n")
    (folder / "family.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "if __name__ == '__main__':\n"
        "    assert of_the_user.endswith('sitecustomize.py') and not [p for p in sys.path if 'startup' in p]\n"
        "    assert 'jax' not in sys.modules and 'jaxtensile' not in sys.modules\n"
        "    import train\n"
        "    child = multiprocessing.get_context('spawn').Process(target=train.main)\n"
        "    child.start(); child.join()\n"
        "    subprocess.run(['./script'], check=True)\n"
    )
    (folder / "script").write_text(f"#!{sys.executable}\nprint('no JAX', of_the_user[-3:])\n")
    (folder / "script").chmod(0o755)
    path = os.pathsep.join(filter(None, (str(folder / "own"), os.environ.get("PYTHONPATH"))))
    done = run(folder, *ours("--budget", "4MiB"), sys.executable, "-m", "family", PYTHONPATH=path)
    assert (done.stdout, done.returncode) == (f"{expected}no JAX .py\n", 0), done.stderr
    said = lines(done)
    assert said.count("jaxtensile: 1 of 1 program planned") == 1  # of the child, which had a plan
    assert said.count("jaxtensile: nothing was planned: no jax.jit of this process was called") == 1


def test_ctrl_c(folder):
    endless = "print('ready', flush=True)\nwhile True: pass"
    command = (*ours("--budget", "4MiB"), sys.executable, "train.py", endless)
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said and "1 of 1 program planned" in said


def test_a_budget_that_cannot_be_met(folder):
    done = run(folder, *ours("--budget", "256KiB"), sys.executable, "train.py")
    assert (done.stdout, done.returncode) == ("", 1)
    assert "Traceback" not in done.stderr
    (error,) = [line for line in lines(done) if "budget" in line and "below the smallest" in line]
    assert error.startswith("jaxtensile: train.py:20: ") and "--best-effort" in error
    assert lines(done)[-1] == "jaxtensile: nothing was planned: train_step: does not fit"


def test_best_effort(folder, expected):
    done = run(folder, *ours("--budget", "256KiB", "--best-effort"), sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    found, wanted = (list(map(float, text.split())) for text in (done.stdout, expected))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert any("does not fit" in line and "the least that was found" in line for line in lines(done))


def test_out_of_memory(folder):
    """The traceback as ever, and behind it what lived, what programs need, and what helps."""
    then = "w, x = main(); jnp.zeros((1 << 44,))"
    done = run(folder, *ours("--budget", "1MiB", "--best-effort"), sys.executable, "train.py", then)
    assert done.returncode == 1 and "RESOURCE_EXHAUSTED" in done.stderr and "Traceback" in done.stderr
    told = [line.removeprefix("jaxtensile: ") for line in lines(done)]
    begin = next(i for i, line in enumerate(told) if line.startswith("out of memory: cpu:0"))
    assert any(line.strip().startswith("6 x f32[64,64], 96.00KiB") for line in told[begin:])
    assert any(line.strip().startswith("train_step at train.py:") and "as written" in line for line in told[begin:])
    assert any(line.startswith("what helps most: ") for line in told[begin:])


def test_a_fault_of_ours(folder, expected):
    """Planted where the process starts, as a broken installation would be."""
    (folder / "broken").mkdir()
    (folder / "broken" / "sitecustomize.py").write_text(
        "import sys\n"
        f"sys.path.append({str(ROOT)!r})\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jaxtensile.planner.page': raise ZeroDivisionError('planted')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    path = os.pathsep.join(filter(None, (str(folder / "broken"), os.environ.get("PYTHONPATH"))))
    done = run(folder, *ours("--budget", "4MiB"), sys.executable, "train.py", PYTHONPATH=path)
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
    assert len([line for line in lines(done) if "runs as it was written: planning it failed" in line]) == 1


def test_the_example_and_the_page_about_it():
    done = run(ROOT, *ours("--budget", "24MiB"), sys.executable, "examples/plain.py")
    assert done.stdout.startswith("loss 1.") and "jaxtensile: 1 of 1 program planned" in lines(done), done.stderr
    page = (ROOT / "docs" / "exec.md").read_text()
    table = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    assert set(table["exec"]) == {*KEYS, "best_effort"}
    configs.from_tables(table)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["nothing-of-this-name"], "there is no such command"),
        (["train.py"], "write python train.py"),
        ([], "exec has no command"),
    ],
)
def test_commands_that_cannot_be(folder, command, said):
    done = run(folder, *ours(), *command)
    assert done.returncode == 2 and len(lines(done)) == 1 and said in done.stderr


def test_options_that_cannot_be(folder):
    done = run(folder, *ours("--budget", "12Gib3"), sys.executable, "train.py")
    assert done.returncode == 2 and "cannot read '12Gib3' as a size" in done.stderr
    (folder / "wrong.toml").write_text('[exec]\nbudgte = "1GiB"\n')
    done = run(folder, *ours("--config", "wrong.toml"), sys.executable, "train.py")
    assert done.returncode == 2 and "did you mean 'budget'?" in done.stderr
