"""Real jobs at a real daemon, all of which may be killed at any time, and an audit of what they held.

The moments are drawn from a seed; what happens at them is not repeatable, and need not be: whatever happens, the logs
that the jobs wrote must be those of a device that nobody overfilled.
"""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import msgspec

from chaos_jobs import MOST_STEPS, PROGRAMS, Ended, Fork, Forked, Order, Signal, Signalled, Spec, Told
from daemons import LIMIT, Daemon, until
from jaxtensile.runtime.decide.journal import decode, replay

HERE = Path(__file__).parent
MIB = 1 << 20
CAPACITY = {True: 64 * MIB, False: 170 * MIB}
"""With and without turns, of a device for jobs of 28 to 68 MiB, 4 of them for good: there are always some that wait,
and others that could be faster."""
SLOTS = 8
SEEDS = 2
LOWERED = 0.75
"""Of the capacity is there at times. Whoever has more then shrinks in its own time, so it is no bound for the audit."""
EVERY = 0.5
"""Seconds between two harms, in the mean; more where jobs are slow to come to something before the next one."""
TOLD = 60
"""Lines at most that tell how more was held than there is."""
JOB = re.compile(r"job=(\S+)")
LOOSE = 6 * MIB
"""By how much the kernel's count of a process may be off: it counts pages per thread, and Python has some itself."""
CONFIG = """
[device."cpu:0"]
capacity = {capacity}
reserve = 0
turns = {turns}
[coordinator]
min_hold = "150ms"
lease_ttl = "1500ms"
revoke_deadline = "60s"
max_clients = 64
"""


# What may be wrong with what was written.


class Held:
    """What the jobs held, as they wrote it; ``deaths``: when those that were killed still lived, by process."""

    def __init__(self, logs, deaths):
        self.problems, self.counts, self.losses = [], Counter(), {}
        self.exceeded = None
        """When more was held than there is for the first time, and by whom."""
        self.looseness = 0.0
        """Of the steps' measured bytes over those of their plans, the largest."""
        self._changes = []
        for name, text in sorted(logs.items()):
            self._read(name, [line.split(" ", 2) for line in text.splitlines()], deaths)

    def _read(self, name, lines, deaths):
        leases, losses, level, stays = set(), [], 0, 0
        held = measured = 0
        pid = int(lines[0][2])

        def hold(at, bytes_, seen):
            nonlocal held, measured
            self._changes.append((at, bytes_ - held, seen - measured, name))
            held, measured = bytes_, seen

        for at, what, *rest in lines:
            at, words = int(at), rest[0].split() if rest else []
            if what == "lease":
                leases.add(int(words[0]))
            elif what == "run":
                before, (level, stays) = level, map(int, words[:2])
                self.counts["changes of plan"] += bool(before) and before != level
                hold(at, level, level)
            elif what == "chooses":
                hold(at, stays, stays)
            elif what == "ran":
                self._measured(name, int(words[0]), level, stays)
                hold(at, stays, stays)
                self.counts["steps"] += 1
            elif what == "loss":
                losses.append(words[0])
            elif what == "done":
                hold(at, 0, 0)
            elif what == "error":
                self.problems.append(f"{name} ended by {rest[0][-400:]}")
        if pid in deaths:
            hold(deaths[pid], 0, 0)
        if len(leases) > 1:
            self.problems.append(f"{name} lost a lease: it had {sorted(leases)}")
        self.losses[name] = losses

    def _measured(self, name, rise, level, stays):
        if not rise:
            return
        self.counts["steps whose memory was measured"] += 1
        self.looseness = max(self.looseness, rise / (level - stays))
        if rise > level - stays + LOOSE:
            over = f"{rise / MIB:.1f} MiB beside a plan of {(level - stays) / MIB:.1f} MiB"
            self.problems.append(f"{name} took {over} for a step")

    def most(self, capacity):
        """The most that all held together at any instant; more than ``capacity`` is a problem each time."""
        total = most = 0
        holds = defaultdict(int)
        for at, change, _, name in sorted(self._changes, key=lambda c: (c[0], c[1])):
            total += change
            holds[name] += change
            most = max(most, total)
            if change > 0 and total > capacity:
                self.counts["overcommits"] += 1
                self.exceeded = self.exceeded or (at, {k for k, v in holds.items() if v})
                if self.counts["overcommits"] <= 3:
                    who = ", ".join(f"{k} {v / MIB:.1f}" for k, v in holds.items() if v)
                    self.problems.append(f"{total / MIB:.1f} of {capacity / MIB:.1f} MiB at {at}, MiB of each: {who}")
        return most


def timeline(logs, daemon, harms, epoch, at, names):
    """What some jobs, the daemon and who harms them did up to a moment, as lines in the order of time.

    ``epoch``: the time of day when the clock of all logs but the daemon's began, in nanoseconds."""

    def stamp(moment):
        return datetime.fromtimestamp((epoch + int(moment)) / 1e9, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"

    lines = [("daemon", *line.split(" ", 1)) for line in daemon.splitlines()]
    lines = [line for line in lines if "job=" not in line[-1] or not names.isdisjoint(JOB.findall(line[-1]))]
    lines += [("chaos", stamp(moment), what) for moment, what in harms]
    written = [(name, *line.split(" ", 1)) for name in sorted(names) for line in logs[name].splitlines()]
    lines += [(name, stamp(moment), what[:200]) for name, moment, what in written if not what.startswith("loss")]
    told = sorted((line for line in lines if line[1] <= stamp(at)), key=lambda line: line[1])
    return [f"{when} {who} {what}" for who, when, what in told[-TOLD:]]


# The world.


class ChaosDaemon(Daemon):
    """``broken``: what of ``broken_daemon.py`` is missing."""

    def __init__(self, capacity, turns, broken):
        self._turns = "true" if turns else "false"
        super().__init__(capacity=capacity)
        if broken:
            self.program = (str(HERE / "broken_daemon.py"), broken)

    def configure(self, capacity):
        (new := self.file.with_suffix(".new")).write_text(CONFIG.format(capacity=capacity, turns=self._turns))
        new.rename(self.file)  # a daemon that starts meanwhile reads the one or the other

    def known(self, copy):
        """What its journal says of its leases; the file goes to ``copy``."""
        try:
            copy.write_bytes(content := (self.folder / "s.journal").read_bytes())
        except FileNotFoundError:
            return "nothing"
        leases = replay(decode(content)).leases.values()
        return ", ".join(f"{a.job} {a.charges[0].level / MIB:.1f} MiB on rung {a.rung}" for a in leases) or "no lease"


class Zygote:
    """The process that has JAX imported, and what it tells."""

    def __init__(self, folder, socket, known):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(known / "xla"),
            "JAXTENSILE_PLAN_CACHE": str(known / "plans"),
            "JAXTENSILE_SOCKET": str(socket),
            "OPENBLAS_NUM_THREADS": "1",
            # What a step allocates goes back to the kernel at its end, so that what it took can be seen.
            "MALLOC_MMAP_THRESHOLD_": str(256 * 1024),
            "MALLOC_TRIM_THRESHOLD_": str(256 * 1024),
        }
        self._errors = (folder / "errors").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "chaos_jobs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=folder,
        )
        self._rest = b""
        self._poll = selectors.DefaultSelector()
        self._poll.register(self.process.stdout, selectors.EVENT_READ)

    def order(self, order: Order):
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()

    def told(self, wait):
        """What it has told, within ``wait`` seconds."""
        if not self._poll.select(wait):
            return []
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        assert data, "who forks the jobs has ended"
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [msgspec.json.decode(line, type=Told) for line in lines]

    def end(self):
        self.process.stdin.close()
        self.process.wait(LIMIT)
        self.process.stdout.close()
        self._poll.close()
        self._errors.close()


class Chaos:
    """``run`` for some seconds; then ``held`` says what was wrong. ``turns``: jobs take turns; ``broken``: see
    ``broken_daemon.py``; ``liars``: jobs that go on with plans they have given up; ``before``: another one that has
    run, whose plans and undisturbed losses are known."""

    def __init__(self, folder, seed, *, turns=True, broken="", liars=False, every=EVERY, before=None):
        self.folder, self.capacity, self._liars, self._every = folder, CAPACITY[turns], liars, every
        self._random = Random(seed)
        self.daemon = ChaosDaemon(self.capacity, turns, broken)
        (folder / "logs").mkdir()
        self.known = before.known if before else folder
        self.reference = before.reference if before else {}
        self.zygote = Zygote(folder, self.daemon.path, self.known)
        self.counts = Counter()
        self.specs, self.pids, self.deaths, self.ends = {}, {}, {}, {}
        self._arrivals = [0.0] * SLOTS
        self._again = {}
        """Stopped processes, and when they may go on."""
        self._restart_at = None
        self._early = 0
        """How many daemons in a row were killed before anybody could have reached them."""
        self._lowered = False
        self.problems = []
        self.harms = []
        """What was done to whom, and when."""
        self._epoch = time.time_ns() - time.monotonic_ns()

    # From beginning to end.

    def run(self, seconds):
        try:
            self._expect(lambda told: isinstance(told, Ended) and not told.pid)
            self.daemon.start()
            self._warm()
            self._until(seconds)
            self._finish()
            self._undisturbed()
        finally:
            self.zygote.end()
            (self.folder / "daemon").write_text(self.daemon.log())  # what was granted, to whom and when
            self.daemon.__exit__()
        return self

    def _until(self, seconds):
        ends = time.monotonic() + seconds
        harm = self._next_harm()
        while (now := time.monotonic()) < ends:
            self._hear(0.02)
            self._tend(now)
            for k, at in enumerate(self._arrivals):
                if at is not None and now >= at:
                    self._arrivals[k] = None
                    self._arrive(k)
            if now >= harm:
                self._harm(now)
                harm = self._next_harm()

    def _next_harm(self):
        return time.monotonic() + self._random.expovariate(1 / self._every)

    def _tend(self, now):
        """A daemon that was killed is started again, a process that was stopped goes on."""
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self._done("the daemon is started")
            self.daemon.start(wait=False)
        elif self._restart_at is None and self.daemon.process.poll() is not None:
            self.problems.append(f"the daemon ended by itself: {self.daemon.log()[-400:]}")
            self._restart_at = 0.0
        for pid in [p for p, at in self._again.items() if now >= at]:
            del self._again[pid]
            self._signal(pid, signal.SIGCONT)

    def _finish(self):
        """All that still run leave after their next step, and nothing of them stays."""
        self._tend(float("inf"))
        for pid in self.pids.values():
            if pid not in self.ends:
                self.zygote.order(Signal(pid, signal.SIGUSR2))
        ends = time.monotonic() + 3 * LIMIT
        while len(self.ends) < len(self.pids) and time.monotonic() < ends:
            self._hear(0.02)
            self._tend(time.monotonic())
        self.problems += [f"{n} does not end" for n, pid in self.pids.items() if pid not in self.ends]
        try:
            until(self.daemon.answers)
            until(lambda: not self.daemon.snapshot().leases, 5.0)
        except AssertionError:
            self.problems.append(f"leases of nobody are left: {self.daemon.states()}")

    # Jobs.

    def _spec(self, slot):
        chosen = self._random
        self.counts["arrivals"] += 1
        name = f"j{self.counts['arrivals']}"
        return Spec(
            name=name,
            program=chosen.choice([*PROGRAMS]),
            seed=chosen.randrange(SEEDS),
            steps=chosen.randint(8, MOST_STEPS),
            log=str(self.folder / "logs" / name),
            priority=chosen.choice((0, 0, 1)),
            measures=chosen.random() < 0.3,
            broken=self._liars and slot % 2 == 0,
        )

    def _arrive(self, slot):
        spec = self._spec(slot)
        self.specs[spec.name] = spec, slot
        self.zygote.order(Fork(spec))

    def _warm(self):
        """Plans of both programs, which those that come later find on disk; and steps beside which nothing compiles."""
        for name in PROGRAMS:
            log = str(self.folder / "logs" / f"first-{name}")
            spec = Spec(name=f"first-{name}", program=name, seed=0, steps=4, log=log, waits=True)
            self.specs[spec.name] = spec, 0
            self._one(spec)

    def _undisturbed(self):
        """The losses of ``jax.jit``, for as many steps as the longest job had."""
        for program in PROGRAMS if not self.reference else ():
            for seed in range(SEEDS):
                log = self.folder / f"plain {program} {seed}"
                self._one(Spec(name="plain", program=program, seed=seed, steps=MOST_STEPS, log=str(log), plain=True))
                lines = [line.split() for line in log.read_text().splitlines()]
                self.reference[program, seed] = [words[2] for words in lines if words[1] == "loss"]

    def _one(self, spec):
        self.zygote.order(Fork(spec))
        pid = self._expect(lambda told: isinstance(told, Forked)).pid
        ended = self._expect(lambda told: isinstance(told, Ended) and told.pid == pid)
        assert ended.status == 0, Path(spec.log).read_text()[-2000:]

    def _expect(self, condition):
        ends = time.monotonic() + 4 * LIMIT
        while time.monotonic() < ends:
            for told in self.zygote.told(0.1):
                if condition(told):
                    return told
        raise AssertionError("who forks the jobs did not answer")

    def _hear(self, wait):
        for told in self.zygote.told(wait):
            match told:
                case Forked():
                    self.pids[told.name] = told.pid
                case Signalled(number=signal.SIGKILL) if told.at:
                    self.deaths[told.pid] = told.at
                case Ended():
                    self._ended(told)
                case _:
                    pass

    def _ended(self, told):
        self.ends[told.pid] = told.status
        self._again.pop(told.pid, None)
        name = next(n for n, pid in self.pids.items() if pid == told.pid)
        killed = told.pid in self.deaths
        self.counts["jobs killed" if killed else "jobs done"] += 1
        if told.status not in ((-signal.SIGKILL, 0) if killed else (0,)):  # it may just have ended by itself
            self.problems.append(f"{name} ended with {told.status}")
        self._arrivals[self.specs[name][1]] = time.monotonic() + self._random.uniform(0.0, 0.8)

    # Harm.

    def _harm(self, now):
        running = [pid for pid in self.pids.values() if pid not in self.ends and pid not in self.deaths]
        what = self._random.choices(("kill", "daemon", "cut", "stop", "capacity"), (5, 3, 3, 6, 5))[0]
        if what == "daemon":
            if self._restart_at is None and self._may_kill():
                self.daemon.kill()
                self.counts["kills of the daemon"] += 1
                known = self.daemon.known(self.folder / f"journal {self.counts['kills of the daemon']}")
                self._done(f"the daemon is killed, its journal knows of {known}")
                self._restart_at = now + self._random.choice((0.0, self._random.uniform(0.0, 1.0)))
        elif what == "capacity":
            self._lowered = not self._lowered
            self._done(f"the capacity is {LOWERED if self._lowered else 1:.0%}")
            self.daemon.configure(int(self.capacity * (LOWERED if self._lowered else 1)))
            self.counts["changes of capacity"] += 1
            if self._restart_at is None and self.daemon.process.poll() is None and self.daemon.answers():
                self.daemon.process.send_signal(signal.SIGHUP)  # before it answers that would be its end
        elif running:
            pid = self._random.choice(running)
            if what == "kill":
                self._signal(pid, signal.SIGKILL)
            elif what == "cut":
                self._signal(pid, signal.SIGUSR1)
                self.counts["connections cut"] += 1
            elif pid not in self._again:
                self._signal(pid, signal.SIGSTOP)
                self.counts["jobs stopped for a while"] += 1
                self._again[pid] = now + self._random.choice((0.4, 0.8, 2.5))

    def _signal(self, pid, number):
        self._done(f"{next(n for n, p in self.pids.items() if p == pid)} is sent {number.name}")
        self.zygote.order(Signal(pid, number))

    def _done(self, what):
        self.harms.append((time.monotonic_ns(), what))

    def _may_kill(self):
        """At any moment, but jobs give up where no daemon answers for ten seconds."""
        answers = self.daemon.process.poll() is None and self.daemon.answers()
        self._early = 0 if answers else self._early + 1
        return self._early <= 1

    # What came of it.

    def audit(self):
        """All that was wrong, as text; what was counted is in ``counts``."""
        logs = {p.name: p.read_text() for p in (self.folder / "logs").iterdir()}
        held = Held({name: text for name, text in logs.items() if text}, self.deaths)
        most = held.most(self.capacity)
        problems = [*self.problems, *held.problems]
        if held.exceeded:
            daemon = (self.folder / "daemon").read_text()
            problems += timeline(logs, daemon, self.harms, self._epoch, *held.exceeded)
            problems.append(f"all logs, and the journal at each kill of the daemon: {self.folder}")
        for name, losses in held.losses.items():
            spec, _ = self.specs[name]
            if losses != self.reference[spec.program, spec.seed][: len(losses)]:
                problems.append(f"{name}: its losses are not those of an undisturbed run")
            self.counts["losses compared"] += len(losses)
        self.counts.update(held.counts)
        self.summary = f"at most {most / self.capacity:.1%} of the device, {held.looseness:.0%} of a plan"
        return problems
