"""``jaxtensile run`` with programs that never heard of us: they share a device, and print what they print alone."""

import json
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from paths import ROOT

TRAIN = """
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
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, grads), value

    weights = [jnp.full((64, 64), 1e-3 * (i + float(sys.argv[1])), jnp.float32) for i in range(12)]
    x = jnp.ones((2048, 64)) * 0.1
    for _ in range(int(sys.argv[2])):
        weights, value = train_step(weights, x)
        print("loss", float(value), flush=True)
"""
KNOWS = """
    import jax, jax.numpy as jnp
    import jaxtensile

    double = jax.jit(lambda x: 2 * x)
    x = double(jnp.ones((512, 512)))
    with jaxtensile.job() as job:
        step = jaxtensile.jit(lambda x: jnp.sin(x).sum(), job=job)
        print("of its own", float(step(x)), job.name, job.steps)
"""
LATE = KNOWS.replace("\n    import jaxtensile\n", "\n").replace("    with", "    import jaxtensile\n    with")
CAPACITY = 12 << 20
CONFIG = f"""
[device."cpu:0"]
capacity = {CAPACITY}
reserve = 0
turns = false
[coordinator]
min_hold = "0s"
"""
LIMIT = 180


@pytest.fixture
def folder(tmp_path):
    for name, text in (("train.py", TRAIN), ("knows.py", KNOWS), ("late.py", LATE)):
        (tmp_path / name).write_text(dedent(text))
    return tmp_path


def environment(folder):
    seen = {k: v for k, v in os.environ.items() if k not in ("JAXTENSILE_EXEC", "JAXTENSILE_SOCKET")}
    return {**seen, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder)}


def run(folder, *command):
    return subprocess.run(
        (sys.executable, *command), cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=LIMIT
    )


def config(folder, **jobs):
    text = CONFIG
    for name, (arguments, more) in jobs.items():
        text += f"[jobs.{name}]\ncommand = {json.dumps(['python', *arguments.split()])}\n{more}\n"
    (folder / "jaxtensile.toml").write_text(text)


def losses(text, name=""):
    head = f"{name} | loss " if name else "loss "
    return [float(line.removeprefix(head)) for line in text.splitlines() if line.startswith(head)]


def charged(status):
    (device,) = [d for d in status["devices"] if d["device"] == "cpu:0"]
    return device["charged"], device["capacity"] - device["reserve"]


def test_two_plain_scripts_share_a_device_with_room_for_one_and_a_half(folder):
    """As it is, one of them needs 8.25 MiB of 12."""
    alone = {name: losses(run(folder, "train.py", number, "20").stdout) for name, number in (("a", "1"), ("b", "2"))}
    assert all(len(found) == 20 for found in alone.values())
    config(folder, a=("train.py 1 20", ""), b=("train.py 2 20", ""))
    command = [sys.executable, "-m", "jaxtensile", "run"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said, together = "", set()  # both at once only where the first is not done yet when it is asked
    for line in process.stdout:  # at each line, what is granted
        said += line
        found = re.search(r"--socket (\S+)", said)
        if found and re.match(r"[ab] \| (loss|[\d.]+MiB)", line) and len(together) < 2:
            status = run(folder, "-m", "jaxtensile", "status", "--json", "--socket", found[1])
            if status.returncode == 0:
                now, room = charged(json.loads(status.stdout))
                assert 0 <= now <= room == CAPACITY
                together |= {lease["job"] for lease in json.loads(status.stdout)["leases"]}
    assert process.wait(LIMIT) == 0, said
    assert "2 of 2 jobs done" in said and together
    assert {name: len(losses(said, name)) for name in "ab"} == {"a": 20, "b": 20}
    for name, expected in alone.items():
        assert losses(said, name) == pytest.approx(expected, rel=1e-5)
    assert re.search(r"[ab] \| [\d.]+MiB, plan \d of \d", said), said
    table = said[said.rindex("\njob ") :].splitlines()[2:4]
    assert all(re.split(r"\s{2,}", row)[4] == "20" for row in table), table


def test_who_knows_of_us_decides_alone_and_others_may_be_left_alone(folder):
    config(
        folder,
        knows=("knows.py", ""),
        late=("late.py", ""),
        off=("train.py 1 2", "automatic = false"),
    )
    done = run(folder, "-m", "jaxtensile", "run")
    assert done.returncode == 0, done.stdout
    assert len(losses(done.stdout, "off")) == 2 and not re.search(r"off \| .*plan", done.stdout)
    for name in ("knows", "late"):
        assert re.search(rf"{name} \| of its own [\d.]+ {name} 1", done.stdout), done.stdout


def test_what_can_never_fit_is_one_line(folder):
    config(folder, a=("train.py 1 2", 'want = "1MiB"'))
    done = run(folder, "-m", "jaxtensile", "run")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout and re.search(r"a \| jaxtensile: train.py:\d+: .* needs .*MiB", done.stdout)
