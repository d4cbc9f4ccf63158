"""Processes of one program: one plan in all of them, or one error. More cases: ``benchmarks/processes``."""

import json
import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.xdist_group("processes")  # they take all cores that there are

TWO = """
import json, sys
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np, jaxtensile
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtensile.spmd.processes import keystore

address, me = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, me)
mesh = Mesh(np.array(jax.devices()), ("x",))

def put(a, spec, mesh=mesh):
    return jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i: a[i])

def step(w, x, scale):
    return jax.grad(lambda w: (jnp.tanh(jnp.sin(x @ w) * scale) ** 2).mean())(w)

def args(rows=64):
    return put(np.ones((32, 32), "f"), P()), put(np.ones((rows, 32), "f"), P("x")), jnp.float32(2)

told = {}
ours = jaxtensile.jit(step)
told["sum"] = float(ours(*args()).sum())
told["notes"] = ours.plan(*args()).notes
keystore.store().client.wait_at_barrier("all have read the verdict", 60_000)
told["left"] = list(keystore.store().below("jaxtensile"))

# What was agreed on needs no other process: not what is asked about it, and not once JAX has forgotten it.
if me == 1:
    jax.clear_caches()
    ours.plan(*args())
told["again"] = float(ours(*args()).sum())

# If what was agreed on has become another program, nothing runs.
((key, agreed),) = ours._agreed.items()
ours._agreed[key] = replace(agreed, digest="0" * len(agreed.digest))
if me == 1:
    jax.clear_caches()
    ours._entries.clear()
    try:
        ours(*args())
    except jaxtensile.AgreementError as e:
        told["another"] = str(e)
ours._agreed[key] = agreed

# Devices of one process are its own affair.
mine = Mesh(np.array(jax.local_devices()), ("x",))
if me == 0:
    own = put(np.ones((32, 32), "f"), P(), mine), put(np.ones((16, 32), "f"), P("x"), mine), jnp.float32(2)
    told["alone"] = jaxtensile.jit(step).plan(*own).notes

def error(call):
    try:
        call()
    except jaxtensile.JaxtensileError as e:
        return type(e).__name__, str(e)

with jaxtensile.job("train") as job:
    told["job"] = error(lambda: jaxtensile.jit(step, job=job)(*args()))
told["foreign"] = None
others = Mesh(np.array([d for d in jax.devices() if d.process_index == 0]), ("x",))
shapes = [jax.ShapeDtypeStruct((32, 32), "f", sharding=NamedSharding(others, P())) for _ in range(2)]
if me == 1:
    told["foreign"] = error(lambda: jaxtensile.jit(step).plan(*shapes, jnp.float32(2)))
told["constant"] = error(lambda: jaxtensile.jit(lambda w, x: (x @ w) * np.full(32, 1.0 + me, "f"))(*args()[:2]))
told["uneven"] = error(lambda: jaxtensile.jit(step)(*args(64 if me else 128)))
print(json.dumps(told), flush=True)
jax.distributed.shutdown()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two processes of two devices each tell."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"

    def started(me):
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
            "PYTHONPATH": ":".join(p for p in sys.path if p),
        }
        command = [sys.executable, "-c", TWO, address, str(me)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    processes = [started(me) for me in range(2)]
    try:
        out = [p.communicate(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, (_, err) in zip(processes, out, strict=True):
        assert p.returncode == 0, err[-3000:]
    return [json.loads(o.splitlines()[-1]) for o, _ in out]


def test_one_plan_and_nothing_is_left_in_the_store(told):
    assert told[0]["sum"] == told[1]["sum"]
    for here in told:
        assert "one plan for 2 processes, made by process 0" in here["notes"]
        assert not here["left"]


def test_what_was_agreed_on_is_not_asked_again(told):
    assert told[0]["again"] == told[1]["again"] == told[0]["sum"]


def test_a_program_that_has_become_another_does_not_run(told):
    assert "has become another program than the one that was agreed on" in told[1]["another"]
    assert "clear_cache()" in told[1]["another"]


def test_devices_of_one_process_need_no_agreement(told):
    assert not any("processes" in note for note in told[0]["alone"])


def test_a_job_of_several_processes_needs_a_coordinator_between_processes(told):
    """How it runs with one: ``test_together.py``."""
    kind, text = told[0]["job"]
    assert kind == "AgreementError" and "start 'jaxtensile serve' there" in text
    assert told[1]["job"] == told[0]["job"]


def test_a_process_without_a_device_of_the_program(told):
    assert told[1]["foreign"][0] == "AgreementError" and "has none of the devices of step" in told[1]["foreign"][1]


def test_a_constant_of_its_own_in_each_process(told):
    kind, text = told[0]["constant"]
    assert kind == "AgreementError" and "their programs differ" in text
    assert told[1]["constant"] == told[0]["constant"]


def test_other_shapes_in_each_process(told):
    kind, text = told[0]["uneven"]
    assert kind == "AgreementError" and "the traced program is one of" in text
    assert told[1]["uneven"] == told[0]["uneven"]


def test_random_cases_and_a_process_that_is_killed(monkeypatch):
    from benchmarks.processes.cases import Case
    from benchmarks.processes.run import Group

    monkeypatch.setenv("JAXTENSILE_AGREEMENT_TIMEOUT", "10")
    small = {"processes": 2, "program": "weights everywhere", "width": 32, "rows": 256, "layers": 2}
    more = {"objective": "time", "rates": (0.2, 6.0), "victim": 1}
    cases = [
        Case(number=0, share=0.85, **small, **more),
        Case(number=1, share=0.85, fault="order", **small, **more),
        Case(number=2, share=0.85, fault="kill", **small, **more),
    ]
    group = Group(2)
    try:
        rows = [group.run(case) for case in cases]
    finally:
        group.end()
    assert all(row["good"] for row in rows), rows
    assert [row["verdict"] for row in rows] == ["planned", "AgreementError", "AgreementError"], rows
