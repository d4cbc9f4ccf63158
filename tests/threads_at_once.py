"""What ``test_threads.py`` starts: eight threads that plan, call, differentiate, clear, suspend and read, all at once.

``python threads_at_once.py SEED ROUNDS``: in each round all actions are dealt to the threads, by the seed; ``SEED
600s``: as many rounds as begin in so long. What is wrong is an error of the thread that sees it, told at the end; a
process that hangs says where.
"""

import faulthandler
import gc
import itertools
import logging
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque

THREADS = 8
PATIENCE = 300.0
"""Seconds after which what has not ended never will."""


class Unraised:
    """What nobody catches, in whatever thread or finalizer."""

    def __init__(self):
        self.told = []
        threading.excepthook = lambda x: self.tell(x.exc_value)
        sys.unraisablehook = lambda x: self.tell(x.exc_value, x.err_msg, repr(x.object))

    def tell(self, error, *more):
        self.told.append("".join([*map(str, more), *traceback.format_exception(error)]))


class Program:
    """A function, its arguments, what ``jax.jit`` makes of them, and budgets from ample to none that can be met."""

    def __init__(self, fun, *args):
        compiled = jax.jit(fun).lower(*args).compile()
        use = compiled.memory_analysis()
        whole = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes
        self.fun, self.args, self.wanted = fun, args, compiled(*args)
        self.budgets = [None, *(int(share * whole) for share in (1.0, 0.8, 0.2))]
        self.jits = [jaxtensile.jit(fun, budget=budget) for budget in self.budgets]
        self.slope = jax.jit(jax.grad(total(fun)))(*args)


def total(fun):
    return lambda *args: sum(x.sum() for x in jax.tree.leaves(fun(*args)))


def close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        largest = float(np.abs(np.asarray(b)).max())
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-4 * largest)


class Worker:
    """One thread: what it is dealt, by dice of its own."""

    def __init__(self, seed, number, more):
        self.dice, self.number, self.seed, self.more = random.Random(f"{seed} {number}"), number, seed, more
        self.jobs, self.done, self.failed = 0, Counter(), None
        self.thread = threading.Thread(target=self.run, name=f"stress-{number}")

    def run(self):
        try:
            START.wait()
            for action in self.dealt():
                if any(w.failed for w in WORKERS):
                    break
                action(self)
                self.done[action.__name__] += 1
        except BaseException as error:
            self.failed = "".join(traceback.format_exception(error))

    def dealt(self):
        for number in itertools.takewhile(self.more, itertools.count()):
            actions = [x for x, weight in WEIGHTS.items() for _ in range(weight)]
            random.Random(f"{self.seed} {number}").shuffle(actions)
            yield from actions[self.number :: THREADS]

    def program(self):
        program = self.dice.choice(PROGRAMS)
        k = self.dice.randrange(len(program.budgets))
        return program, program.budgets[k], program.jits[k]

    def plan(self):
        program, budget, jitted = self.program()
        with unless_too_small(budget):
            report = jitted.plan(*program.args)
            assert budget is None or report.compiled.device <= budget
            read = self.dice.choice([str, report.__class__.to_dict, report.__class__.to_html])
            assert read(report)

    def call(self):
        program, budget, jitted = self.program()
        with unless_too_small(budget):
            for _ in range(self.dice.randrange(1, 9)):  # the first ones are timed
                close(jitted(*program.args), program.wanted)

    def make(self):
        """Jits of one function that ask for the same share what is dispatched."""
        program, budget, _ = self.program()
        with unless_too_small(budget):
            made = jaxtensile.jit(program.fun, budget=budget)
            close(made(*program.args), program.wanted)

    def lower(self):
        program, budget, jitted = self.program()
        with unless_too_small(budget):
            close(jitted.lower(*program.args).compile()(*program.args), program.wanted)

    def differentiate(self):
        program, _, jitted = self.program()
        close(jax.grad(total(jitted))(*program.args), program.slope)

    def filtered(self):
        """What it donates it has made; that not all of it can be used is not told."""
        weights, x = jax.tree.map(jnp.copy, PROGRAMS[0].args)
        close(FILTERED((weights, "static"), x), PROGRAMS[0].wanted)

    def clear(self):
        self.program()[2].clear_cache()

    def estimate(self):
        program, _, _ = self.program()
        found = jaxtensile.estimate(program.fun, *program.args, target=self.dice.choice([None, "nvidia-h200", "cpu"]))
        assert found.device > 0 and str(found)

    def collect(self):
        gc.collect()

    def train(self):
        """Some steps as a job beside the others', with a rest on the host; any of them may end it."""
        self.jobs += 1
        with jaxtensile.job(f"{self.number}-{self.jobs}", config=CONFIG) as job:
            JOBS.append(job)
            step = jaxtensile.jit(train_step, job=job, donate_argnums=0)
            weights = start()
            try:
                for k in range(self.dice.randrange(1, 4)):
                    if self.dice.random() < 0.3:
                        weights = job.resume(job.suspend(weights))
                    weights, value = step(weights, X)
                    np.testing.assert_allclose(value, LOSSES[k], rtol=1e-4)
                assert step.plan(weights, X).compiled.device
            except jaxtensile.CoordinatorError:
                if job not in ENDED:
                    raise

    def watch(self):
        """What anybody may ask of a job that is another thread's."""
        for job in [*JOBS]:
            assert repr(job) and job.budget >= 0 and job.rung >= -1 and job.steps >= 0 and job.switches >= 0
            job.ladder, job.compiled, job.suspended  # noqa: B018
            job.wait(0)

    def end(self):
        if JOBS:
            ENDED.append(job := self.dice.choice(JOBS))
            job.close()


WEIGHTS = {
    Worker.plan: 4,
    Worker.call: 6,
    Worker.make: 3,
    Worker.lower: 1,
    Worker.differentiate: 2,
    Worker.filtered: 2,
    Worker.clear: 2,
    Worker.estimate: 2,
    Worker.collect: 1,
    Worker.train: 4,
    Worker.watch: 3,
    Worker.end: 1,
}


class unless_too_small:
    """A budget that cannot be met is an error that says what would do."""

    def __init__(self, budget):
        self.budget = budget

    def __enter__(self):
        pass

    def __exit__(self, kind, error, where):
        if kind is None or not issubclass(kind, jaxtensile.BudgetError):
            return False
        assert self.budget is not None and (error.needs is None or error.needs > self.budget)
        return True


def settings():
    """What belongs to the process, and is as it was when all is over."""
    log = logging.getLogger("jax._src.callback")
    output = os.fstat(1)
    return {
        "warnings": [f for f in warnings.filters if "donated" in str(f[1])],
        "log": [*log.filters],
        "garbage": gc.get_threshold(),
        "environment": dict(os.environ),
        "output": (output.st_dev, output.st_ino),
    }


def left():
    """What is still there when all is over, and should not be."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(PATIENCE)
    yield from (f"thread {t.name}" for t in threading.enumerate() if t is not threading.main_thread())
    if arbitration._jobs:
        yield f"jobs {arbitration._jobs}"
    if arbitration._local is not None:
        now = arbitration._local[1].status()
        yield from (f"lease {lease}" for lease in now.leases)
        yield from (f"{d.charged} bytes on {d.device}" for d in now.devices if d.charged)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    UNRAISED = Unraised()

    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxtensile
    from jaxtensile.jobs import arbitration

    X = jnp.asarray(np.random.default_rng(0).normal(size=(128, 16)), jnp.float32)
    CONFIG = {"device": {"capacity": "160KiB", "reserve": 0}, "coordinator": {"min_hold": 0}}
    JOBS, ENDED = deque(maxlen=6), deque(maxlen=1000)

    def start(layers=3):
        dice = np.random.default_rng(1)
        return [jnp.asarray(dice.normal(size=(16, 16)) / 16, jnp.float32) for _ in range(layers)]

    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - 1) ** 2)

    def train_step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    def scanned(weights, x):
        def body(x, w):
            return x + jnp.sin(x @ w), None

        return jax.grad(lambda w: jax.lax.scan(body, x, w)[0].sum())(weights)

    def checkpointed(weights, x):
        return jax.grad(jax.checkpoint(loss))(weights, x)

    warnings.simplefilter("error")
    warnings.simplefilter("ignore", jaxtensile.errors.IgnoredBudgetWarning)  # gradients through a planned function
    seed, much = sys.argv[1:]
    PROGRAMS = [
        Program(train_step, start(), X),
        Program(scanned, jnp.stack(start(6)), X),
        Program(checkpointed, start(), X),
    ]
    FILTERED = jaxtensile.filter_jit(lambda model, x: train_step(model[0], x), donate="all")
    LOSSES, weights = [], start()
    for _ in range(4):
        weights, value = jax.jit(train_step)(weights, X)
        LOSSES.append(float(value))
    before = settings()

    end = time.monotonic() + float(much[:-1]) if much.endswith("s") else None
    faulthandler.dump_traceback_later(PATIENCE + (0.0 if end is None else float(much[:-1])), exit=True)
    sys.setswitchinterval(1e-4)  # fifty times as often as usual
    START = threading.Barrier(THREADS)
    more = (lambda done: done < int(much)) if end is None else (lambda _: time.monotonic() < end)
    WORKERS = [Worker(seed, k, more) for k in range(THREADS)]
    for worker in WORKERS:
        worker.thread.start()
    for worker in WORKERS:
        worker.thread.join()
    for worker in WORKERS:
        if worker.failed:
            print(f"thread {worker.number} failed after {dict(worker.done)}:\n{worker.failed}", file=sys.stderr)
    problems = [*left(), *UNRAISED.told]
    after = settings()
    problems += [f"{name}: {after[name]} instead of {was}" for name, was in before.items() if after[name] != was]
    print(*problems, sep="\n", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    print(*(f"{count} {name}" for name, count in sorted(sum((w.done for w in WORKERS), Counter()).items())), sep=", ")
    sys.exit(bool(problems) or any(w.failed for w in WORKERS))
