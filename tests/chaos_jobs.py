"""Jobs as processes of their own, and what each does between its first line and its last.

Run as a program it has JAX imported, and forks a process for each job that it is told of on stdin, so that one comes
within milliseconds. It also is who sends signals: it alone knows which of its children are still there.

A job trains through the daemon and writes its own log, a line of words a thing that happened, with a time of the
monotonic clock that all processes share. What the audit of ``tests/chaos.py`` reads there nobody else had a hand in:
the bytes of a plan are those of XLA's allocation for it, and beside them stands what the kernel saw.
"""

import gc
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress

import msgspec

PROGRAMS = {"seven": (32768, 32, 7), "eight": (32768, 32, 8)}
"""Rows, columns and layers."""
MOST_STEPS = 40


class Spec(msgspec.Struct, kw_only=True):
    """A job: what it trains and how long. ``measures``: its ladder follows the times of its steps; ``plain``: with
    ``jax.jit``, and nobody is asked; ``waits``: after its first step, until all plans are compiled; ``broken``: it goes
    on with a plan that it said it had given up."""

    name: str
    program: str
    seed: int
    steps: int
    log: str
    priority: int = 0
    measures: bool = False
    plain: bool = False
    waits: bool = False
    broken: bool = False


class Fork(msgspec.Struct, tag=True):
    spec: Spec


class Signal(msgspec.Struct, tag=True):
    pid: int
    number: int


class Forked(msgspec.Struct, tag=True):
    name: str
    pid: int


class Signalled(msgspec.Struct, tag=True):
    """``at``: just before, so that what the process did until then it did alive; 0 if it had ended by itself."""

    pid: int
    number: int
    at: int


class Ended(msgspec.Struct, tag=True):
    pid: int
    status: int


Order = Fork | Signal
Told = Forked | Signalled | Ended


# One job.


class Log:
    """Lines that are in the file when the call returns, whatever becomes of the process."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, *words, at=None):
        line = " ".join(map(str, (at or time.monotonic_ns(), *words))) + "\n"
        os.write(self._file, line.encode())


def resident(what):
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Steps:
    """What the job's planned function dispatches by, with a line before and after each step, and the plan in it.

    Which plan a call runs is known before it begins, or chosen in it. While it is chosen nothing runs, and the job may
    say that it has given the former one up: it is none that it holds."""

    def __init__(self, job, planned, log):
        self._job, self._log, self._inner = job, log, planned._dispatch
        self._chose, self._choose = False, job.plan
        self._plan = (0, 0)
        self._rest = self._lease = 0
        planned._dispatch = self
        job.plan = self._chosen

    def _chosen(self, ladder, devices):
        self._log.tell("chooses")
        fitted = self._choose(ladder, devices)
        use = fitted.report.compiled
        stays = use.argument + use.output - use.alias
        self._plan, self._chose = (use.device, stays), True
        if (lease := self._job._tenancy.client._holder.lease) != self._lease:
            self._lease = lease
            self._log.tell("lease", lease)
        self._runs()
        return fitted

    def _runs(self, at=None):
        self._log.tell("run", *self._plan, self._job.rung, at=at)

    def __call__(self, *args):
        import jax

        self._chose, steps = False, self._job._steps
        compiled = steps.at_work  # it may end while the step runs
        forget_peak()
        self._rest = resident("VmRSS")
        began = time.monotonic_ns()
        if holds := 0 < self._plan[0] <= self._job.budget:
            self._runs()
        out = jax.block_until_ready(self._inner(*args))
        if not (holds or self._chose):
            self._runs(began)  # though it was given up
        unseen = self._chose or compiled or steps.at_work
        self._log.tell("ran", 0 if unseen else max(resident("VmHWM") - self._rest, 1))
        return out


def program(name, seed):
    """A training step and what it starts with: weights of -1, 0 and 1, activations up to 3, gradients up to 4.

    All numbers are integers, and no sum can be above 2^24: each is exact in float32, in whatever order it is made. So
    every plan of the step has to compute the same bits.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    rows, columns, layers = PROGRAMS[name]
    random = np.random.default_rng(seed)
    given = jnp.asarray(random.integers(-1, 2, size=(rows, columns)), jnp.float32)
    weights = [jnp.asarray(random.integers(-1, 2, size=(columns, columns)), jnp.float32) for _ in range(layers)]

    @jax.custom_vjp
    def bounded(x):
        return jnp.clip(x, -3, 3)

    def backward(x, g):
        return (jnp.clip(jnp.where(jnp.abs(x) < 3, g, 0), -4, 4),)

    bounded.defvjp(lambda x: (bounded(x), x), backward)

    def loss(weights, x):
        y = x
        for w in weights:
            x = bounded(x @ w)
        return jnp.sum((x - y) ** 2)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return [jnp.clip(w - jnp.trunc(g / 2**7), -1, 1) for w, g in zip(weights, grads, strict=True)], value

    return step, weights, given


def train(run, weights, given, spec, log, stop, after_first=lambda: None):
    for k in range(spec.steps):
        if k == 1:
            after_first()
        if stop:
            return
        weights, value = run(weights, given)
        log.tell("loss", float(value).hex())


def work(spec, log, stop):
    import jax

    import jaxtensile
    from jaxtensile.jobs.ladder import Ladder

    step, weights, given = program(spec.program, spec.seed)
    if spec.plain:
        train(jax.jit(step, donate_argnums=0), weights, given, spec, log, stop)
        return
    if not spec.measures:  # which plan is faster on a busy machine is luck
        Ladder.took = lambda *_: None
    with jaxtensile.job(spec.name, priority=spec.priority) as job:
        run = jaxtensile.jit(step, job=job, donate_argnums=0)
        Steps(job, run, log)
        if spec.broken:
            tenancy, put = job._tenancy, job._tenancy.put

            def keep(admit, rung):
                users, now = tenancy._users, tenancy.now
                tenancy._users = {} if now is not None and admit.ladder[rung].level < now.level else users
                put(admit, rung)
                tenancy._users = users

            tenancy.put = keep

        def cut(*_):
            if (client := job._tenancy.client) is not None and (line := client._link._line) is not None:
                line.stream.shutdown(2)

        signal.signal(signal.SIGUSR1, cut)

        def compiled():
            assert not spec.waits or job.wait(120.0)

        train(run, weights, given, spec, log, stop, compiled)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        switches = job.switches
        del weights, given
        gc.collect()
        log.tell("done", switches)
    log.tell("left")


ASKED = (signal.SIGUSR1, signal.SIGUSR2)
"""To cut its connection, and to leave."""


def be(spec):
    """What the forked process does; its exit status."""
    stop = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: stop.append(True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
    log = Log(spec.log)
    log.tell("begins", os.getpid())
    try:
        work(spec, log, stop)
    except BaseException:
        log.tell("error", repr(traceback.format_exc()))
        return 1
    return 0


# The process that forks them.


def say(message):
    os.write(1, msgspec.json.encode(message) + b"\n")


def fork(spec, children):
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)  # until the job says what they mean, they would be its end
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
    else:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)
            status = be(spec)
        finally:
            sys.stderr.flush()
            os._exit(status)
    children.add(pid)
    say(Forked(spec.name, pid))


def obey(order, children):
    if isinstance(order, Fork):
        fork(order.spec, children)
        return
    at = 0
    if order.pid in children:
        at = time.monotonic_ns()
        os.kill(order.pid, order.number)
    say(Signalled(order.pid, order.number, at))


def main():
    import jax

    import jaxtensile.api.jit
    import jaxtensile.jobs.job  # noqa: F401

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not come along when a process forks"
    children, rest = set(), b""
    say(Ended(0, 0))  # it is there
    try:
        while True:
            ready, _, _ = select.select([0], [], [], 0.01)
            if ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    obey(msgspec.json.decode(line, type=Order), children)
            for pid in [*children]:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    children.discard(pid)
                    say(Ended(pid, os.waitstatus_to_exitcode(status)))
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
