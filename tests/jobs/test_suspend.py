"""A suspended job: its state waits on the host, its device bytes are others', and it goes on as if nothing had been."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxtensile
import job_programs as programs
from daemons import Daemon
from jaxtensile.errors import CoordinatorError, NotAdmittedError, UnreachableError
from jaxtensile.jobs.suspension import Suspended
from jaxtensile.runtime.client.gate import GateError
from jaxtensile.runtime.decide.leases import HOST
from job_training import ROOM, WAIT, Training, charged, ladder, office, plans, refused, same, until
from paths import TESTS

pytestmark = pytest.mark.xdist_group("suspend")  # one process: what all of them need is made once

__all__ = ["ladder", "plans"]
DATA = programs.X.nbytes + programs.Y.nbytes


def on_host():
    return next(d for d in office().status().devices if d.device == HOST).charged


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_a_suspended_job_gives_its_bytes_back_and_goes_on_where_it_was(ladder):
    with jaxtensile.job("sleeps", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(3)
        assert job.wait(WAIT)
        top, before = job.budget, training.weights
        held = job.suspend(training.weights)
        assert kinds(held) == {"pinned_host"} and all(x.is_deleted() for x in before)
        assert job.budget == 0 and "suspended" in repr(job)
        assert [a.state for a in office().status().leases] == ["suspended"]
        # The batch may still be on the device: it stays charged, and what XLA returns beside the state.
        assert DATA <= charged() <= DATA + 4096
        assert on_host() == sum(x.nbytes for x in held)
        with pytest.raises(CoordinatorError, match=r"'sleeps' is suspended: call 'state = job.resume\(\)'"):
            training.run(1)
        training.weights = job.resume(held)
        assert kinds(training.weights) == {"device"} and all(x.is_deleted() for x in held)
        assert [x.committed for x in training.weights] == [x.committed for x in before]
        assert on_host() == 0 and job.suspended is None
        assert [a.state for a in office().status().leases] == ["held"]
        training.run(3)
        until(lambda: job.budget == top)
    assert charged() == on_host() == 0
    same(training.losses)


def test_jobs_that_take_turns_in_room_for_one(ladder):
    """Each suspends itself after every few steps; none has less than a lease while it runs, all losses are right."""
    room = ladder[0].level + 2 * 4096
    over, losses, stop = [], {}, threading.Event()

    def audit():
        while not stop.wait(0.002):
            if charged() > room:
                over.append(charged())

    def work(k):
        with jaxtensile.job(f"turns{k}", config=programs.config(room)) as job:
            training, x, y = Training(job, seed=k), jnp.array(programs.X), jnp.array(programs.Y)
            for _ in range(4):
                training.weights, value = training.step(training.weights, x, y)
                training.losses.append(float(value))
                job.suspend((training.weights, x, y))
                training.weights, x, y = job.resume(timeout=WAIT)
            losses[k] = training.losses

    watching = threading.Thread(target=audit)
    with jaxtensile.job("keeps the coordinator", config=programs.config(room)):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for t in (watching, *threads):
            t.start()
        for t in threads:
            t.join(WAIT)
        stop.set()
        watching.join(WAIT)
        assert not over and charged() == on_host() == 0
    assert sorted(losses) == [0, 1, 2]
    for k, got in losses.items():
        same(got, seed=k)


def test_resume_waits_for_its_turn_and_may_ask_again(ladder):
    room = ladder[0].level + DATA + 8192
    with jaxtensile.job("first", config=programs.config(room)) as first:
        one = Training(first)
        one.run(2)
        first.suspend(one.weights)
        with jaxtensile.job("second", config=programs.config(room)) as second:
            two = Training(second, seed=1)
            two.run(2)
            with pytest.raises(NotAdmittedError, match="'first' is still suspended: there was no room for it"):
                first.resume(timeout=0.05)
            assert kinds(first.suspended) == {"pinned_host"}
            two.run(1)
            got = []
            waiting = threading.Thread(target=lambda: got.append(first.resume()))
            waiting.start()
            two.run(1)
            assert not got and charged() <= room
        waiting.join(WAIT)
        (one.weights,) = got
        one.run(2)
    same(one.losses)
    same(two.losses, seed=1)


def test_without_room_on_the_host_nothing_moves(ladder):
    config = programs.config(ROOM)
    config["device"]["host"] = "10KiB"
    with jaxtensile.job("stays", config=config) as job:
        training = Training(job)
        training.run(1)
        with pytest.raises(NotAdmittedError, match=r"room for 24\.00KiB of pinned host.*raise 'host'"):
            job.suspend(training.weights)
        training.run(2)
        assert job.budget and on_host() == 0
    same(training.losses)


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_nothing_is_lost_when_it_is_interrupted(ladder, monkeypatch, way):
    move, moves = Suspended._move, []

    def interrupted(self, home, put):
        moves.append(home)
        if len(moves) == (3 if way == "to_host" else programs.LAYERS + 3):
            raise KeyboardInterrupt
        move(self, home, put)

    monkeypatch.setattr(Suspended, "_move", interrupted)
    with jaxtensile.job("interrupted", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(2)
        with pytest.raises(KeyboardInterrupt) as caught:
            job.resume(job.suspend(training.weights))
        assert "'state = job.resume()' gives its state back" in caught.value.__notes__[0]
        assert kinds(job.suspended) == {"pinned_host", "device"}
        assert charged() >= ladder[0].level, "what is on the device is charged"
        training.weights = job.resume()
        training.run(2)
        assert on_host() == 0
    same(training.losses)


def test_what_cannot_be_meant_is_said_and_changes_nothing(ladder):
    with jaxtensile.job("wrong", config=programs.config(ROOM)) as job:
        training = Training(job)
        with pytest.raises(CoordinatorError, match="'wrong' is not suspended"):
            job.resume()
        training.run(1)
        old = training.weights
        training.run(1)
        with pytest.raises(CoordinatorError, match=r"float32\[32, 32\]\) is deleted.*what the last step returned"):
            job.suspend(old)
        held = job.suspend({"weights": training.weights, "step": 2})
        with pytest.raises(CoordinatorError, match="is suspended already"):
            job.suspend(training.weights)
        for wrong, said in (
            ([1], "built otherwise"),
            ({**held, "weights": [x[:1] for x in held["weights"]]}, r"has float32\[1, 32\] where float32\[32, 32\]"),
            ({**held, "weights": [1] * programs.LAYERS}, "has int where float32"),
            ({**held, "weights": old}, "is deleted: give what"),
        ):
            with pytest.raises(CoordinatorError, match=said):
                job.resume(wrong)
        numbers = [np.asarray(x) for x in held["weights"]]  # as from a file
        training.weights = job.resume({"weights": numbers, "step": 2})["weights"]
        training.run(1)
    same(training.losses)
    with pytest.raises(CoordinatorError, match="has ended"):
        job.suspend(training.weights)


def test_what_waits_to_be_resumed_can_be_ended(ladder):
    room, said = ladder[0].level + DATA + 8192, []
    with jaxtensile.job("holds", config=programs.config(room)) as first:
        with jaxtensile.job("waits", config=programs.config(room)) as second:
            training = Training(second)
            training.run(1)
            second.suspend(training.weights)
            Training(first).run(1)

            thread = refused(second.resume, said)
            until(lambda: office().status().waiting == 1)
        thread.join(WAIT)
        assert said == ["job 'waits' has ended while it waited"]
        assert kinds(second.suspended) == {"pinned_host"}
    assert charged() == on_host() == 0


def test_a_step_does_not_suspend_its_own_job(ladder):
    with jaxtensile.job("inside", config=programs.config(ROOM)) as job:

        def look(x):
            with pytest.raises(GateError, match="'inside' was suspended inside one of its steps"):
                job.suspend(programs.start())
            with pytest.raises(GateError, match="'inside' was ended inside one of its steps"):
                job.close()
            return x

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        step = jaxtensile.jit(lambda x: jax.pure_callback(look, shape, x), job=job)
        np.testing.assert_allclose(step(jnp.float32(3)), 3)


def test_a_job_that_ends_suspended_leaves_its_state_to_be_had(ladder):
    with pytest.raises(ZeroDivisionError), jaxtensile.job("ends", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(2)
        job.suspend(training.weights)
        _ = 1 / 0
    assert charged() == on_host() == 0
    with pytest.raises(CoordinatorError, match=r"its state is 'job\.suspended'"):
        job.resume()
    training.weights = jax.device_put(job.suspended, SingleDeviceSharding(jax.devices()[0]))
    run = jax.jit(programs.step)
    training.weights, value = run(training.weights, programs.X, programs.Y)
    same([*training.losses, float(value)])


def test_before_its_first_step_a_job_has_nothing_to_give_back():
    with jaxtensile.job("early", config=programs.config(ROOM)) as job:
        weights = job.resume(job.suspend(programs.start()))
        assert kinds(weights) == {"device"} and charged() == 0


LEAVES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtensile.errors import CoordinatorError
from jaxtensile.jobs.suspension import Suspended

mesh = Mesh(np.array(jax.devices()), "a")
twice = jnp.ones(3)
state = {
    "plain": jnp.arange(6.0).reshape(2, 3), "twice": [twice, twice],
    "weak": jnp.sin(2.0), "empty": jnp.ones((0, 3)), "flag": jnp.asarray(True), "half": jnp.ones(3, jnp.bfloat16),
    "small": jnp.arange(-4, 5, dtype=jnp.int4), "float8": jnp.ones(5, jnp.float8_e4m3fn),
    "key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
    "sharded": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("a"))),
    "everywhere": jax.device_put(jnp.arange(3.0), NamedSharding(mesh, PartitionSpec())),
    "chosen": jax.device_put(jnp.ones(2), jax.devices()[1]), "numpy": np.ones(2), "number": 3, "none": None,
}

def facts(tree):
    def fact(x):
        if not isinstance(x, jax.Array):
            return str(x)
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return str(x.aval), getattr(x, "weak_type", None), x.sharding, x.committed, np.asarray(data).tolist()
    return jax.tree.map(fact, tree)

before = facts(state)
away = Suspended("job", state)
held = away.to_host()
for x in jax.tree.leaves(held):
    assert not isinstance(x, jax.Array) or x.sharding.memory_kind == "pinned_host"
assert all(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
back = away.to_device()
assert facts(back) == before, (facts(back), before)
assert all(x.is_deleted() for x in jax.tree.leaves(held) if isinstance(x, jax.Array))
assert back["twice"][0] is back["twice"][1]
jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(back["plain"])
# Of one buffer, two arrays that are given back as two.
away = Suspended("job", [twice := jnp.ones(3), jax.device_put(twice, twice.sharding)])
assert away.host_bytes == 12
held = away.to_host()
away.take([np.zeros(3, np.float32), np.ones(3, np.float32)])
assert [x.tolist() for x in away.to_device()] == [[0, 0, 0], [1, 1, 1]]
whole = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("a")))
try:
    Suspended("job 'x'", [whole, whole.addressable_data(0)])
except CoordinatorError as error:
    assert "job 'x': an array of the state is a part of another one" in str(error)
else:
    raise AssertionError
try:
    jax.jit(lambda x: Suspended("job 'x'", x))(whole)
except CoordinatorError as error:
    assert "not inside jit" in str(error)
else:
    raise AssertionError
"""


def test_every_kind_of_leaf_comes_back_as_and_where_it_was(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr


PROCESS = """
import sys
import jax.numpy as jnp, jaxtensile, job_programs as programs
seed = int(sys.argv[1])
with jaxtensile.job(f"p{seed}") as job:
    step = jaxtensile.jit(programs.step, job=job, donate_argnums=0)
    state = programs.start(seed), jnp.array(programs.X), jnp.array(programs.Y)
    for _ in range(4):
        weights, value = step(*state)
        print(float(value), flush=True)
        job.suspend((weights, *state[1:]))
        state = job.resume(timeout=300)
"""


def test_processes_that_take_turns_through_the_daemon(ladder, monkeypatch, tmp_path):
    """Two processes in room for one, each suspended after every step; the daemon has what is charged to nobody in the
    end, and a job without its daemon says so and loses nothing."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.chdir(tmp_path)
    daemon = Daemon()
    daemon.file.write_text(
        f"[device]\ncapacity = {ladder[0].level + 3 * 4096}\nreserve = 0\n[coordinator]\nmin_hold = 0\n"
    )
    with daemon:
        monkeypatch.setenv("JAXTENSILE_SOCKET", str(daemon.path))
        jobs = [
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(k)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for k in range(2)
        ]
        for k, job in enumerate(jobs):
            out, err = job.communicate(timeout=4 * WAIT)
            assert job.returncode == 0, err
            same([float(line) for line in out.split()], seed=k)
        until(lambda: all(d.charged == 0 for d in daemon.snapshot().devices))
        with jaxtensile.job("left") as job:
            training = Training(job)
            training.run(1)
            daemon.kill()
            with monkeypatch.context() as soon:
                soon.setattr("jaxtensile.jobs.waiting.PATIENCE", 0.2)
                with pytest.raises(UnreachableError, match="no coordinator answers job 'left'"):
                    job.suspend(training.weights)
            training.run(1)
            daemon.start()
            training.weights = job.resume(job.suspend(training.weights))
            training.run(1)
    same(training.losses)


def test_host_bytes_that_are_charged_still_are_there():
    """A job that is suspended again may not have been able to give them back yet."""
    with jaxtensile.job("again", config=programs.config(ROOM)) as job:
        jaxtensile.jit(lambda x: x + 1, job=job)(jnp.zeros(8))
        for _ in range(2):
            job._steps.waiting.charge_host(4096)
            assert job.ladder[0].host == 4096
        job._steps.waiting.uncharge_host()
        job._tenancy.boundary()
        assert job.ladder[0].host == 0


def test_what_was_resumed_is_given_again_until_the_next_step():
    """Whoever was interrupted between its return and his own variable would have lost his state."""
    with jaxtensile.job("again", config=programs.config(ROOM)) as job:
        step = jaxtensile.jit(lambda x: x + 1, job=job)
        x = step(jnp.zeros(8))
        job.suspend(x)
        x = job.resume()
        assert job.resume() is x
        x = step(x)
        assert float(x[0]) == 2
        with pytest.raises(CoordinatorError, match="nothing is to be resumed"):
            job.resume()
