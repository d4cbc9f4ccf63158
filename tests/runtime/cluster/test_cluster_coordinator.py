"""Random walks over a cluster: nodes, agents and coordinators are killed, messages lost, jobs refused; nothing is lost.

The machines are models: what an agent does with its orders, and a device that admits what fits.
"""

from random import Random

import pytest
from msgspec import structs

from jaxtensile.runtime.cluster.coordinator import COPIES, ClusterCoordinator
from jaxtensile.runtime.cluster.records import ENDED, Report, Spec, Task, Tick, decode, encode
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.runtime.placement.nodes import Room

RULES = Rules(hold_after=50.0, refuse_after=30.0, move_after=5.0)


class Machine:
    """A node: its agent, its coordinator and the processes there."""

    def __init__(self, name, limit, rnd):
        self.name, self.limit, self.rnd = name, limit, rnd
        self.start, self.foreign, self.serving = 0, 0, True
        self.restarted()

    def restarted(self):
        """The agent is killed, its jobs end, and Ray starts it again."""
        self.start += 1
        self.epoch, self.tasks, self.records, self.held = 0, {}, {}, {}

    def admit(self):
        """The machine's own coordinator: first come, first served, within its bytes."""
        for key, task in self.tasks.items():
            need = self.needs(key)
            if task.ended or key in self.held:
                continue
            if need > self.limit:
                self.end(key, 1, "the smallest plan does not fit", self.limit)
            elif sum(self.held.values()) + self.foreign + need <= self.limit:
                self.held[key] = need

    def needs(self, key):
        """What a job turns out to need, which its floor may be below."""
        spec = self.records[key[0]].spec
        return spec.floor + int(spec.environment.get("more", 0))

    def end(self, key, status, reason="", rejected=None):
        self.tasks[key] = structs.replace(
            self.tasks[key], ended=True, status=status, reason=reason, rejected=rejected, lease=""
        )
        self.held.pop(key, None)

    def tick(self, data):
        tick = decode(data, Tick)
        if tick.epoch and tick.epoch < self.epoch:
            return None
        self.epoch = max(self.epoch, tick.epoch)
        for record in (*tick.keep, *(launch.record for launch in tick.launch)):
            if record.spec.job not in self.records or self.records[record.spec.job].revision < record.revision:
                self.records[record.spec.job] = record
        for job in tick.drop:
            self.records.pop(job, None)
        for key in tick.stop:
            if key in self.tasks and not self.tasks[key].ended:
                self.end(key, 143)
                self.tasks[key] = structs.replace(self.tasks[key], stopped=True)
        for key in tick.forget:
            self.tasks.pop(key, None)
        for launch in tick.launch:
            key = launch.record.spec.job, launch.record.attempt
            if not any(j == key[0] and not t.ended for (j, _), t in self.tasks.items()) and key not in self.tasks:
                self.tasks[key] = Task(job=key[0], attempt=key[1], meet="here:1" if not launch.rank else launch.meet)
        if self.serving:
            self.admit()
        return encode(self.report(tick.everything))

    def report(self, everything=False):
        tasks = [
            t if t.ended else structs.replace(t, lease="held" if key in self.held else "waits", waited=6.0)
            for key, t in self.tasks.items()
        ]
        return Report(
            node=self.name,
            start=str(self.start),
            epoch=self.epoch,
            serving=self.serving,
            rooms=(Room("cuda:0", self.limit, sum(self.held.values()) + self.foreign),) if self.serving else (),
            tasks=tuple(tasks),
            records=tuple(self.records.values()) if everything else (),
        )


class World:
    def __init__(self, seed, faults=True):
        self.rnd, self.faults, self.now = Random(seed), faults, 0.0
        self.machines = {f"n{k}": Machine(f"n{k}", 8 + 4 * k, self.rnd) for k in range(4)}
        self.made = len(self.machines)
        self.submitted, self.confirmed, self.refused = {}, set(), set()
        self.coordinator = None
        self.begin()

    def begin(self):
        """A coordinator starts: it asks all that live."""
        self.coordinator = ClusterCoordinator(RULES)
        reports = [decode(m.tick(encode(Tick(epoch=0, everything=True))), Report) for m in self.machines.values()]
        self.coordinator.recover(reports, self.now)
        self.tell()

    def tell(self):
        for m in self.machines.values():
            m.epoch = max(m.epoch, self.coordinator.epoch)

    def submit(self, **given):
        job = f"j{len(self.submitted)}"
        spec = Spec(job=job, name=job, command=("x",), folder="/", **{"floor": self.rnd.randint(1, 9), **given})
        self.submitted[job] = spec
        self.coordinator.submit(spec, self.now)

    def exchange(self, name, *, lose=""):
        if name not in self.machines:
            return
        tick = self.coordinator.orders(name)
        if lose == "order":
            return
        data = self.machines[name].tick(encode(tick))
        assert data is not None, "it is the only coordinator"
        if lose != "report":
            self.coordinator.told(name, tick)
            self.coordinator.report(decode(data, Report), self.now)
            self.coordinator.decide(self.now)

    def step(self):
        rnd = self.rnd
        self.now += rnd.choice([0.0, 0.3, 1.0])
        what = rnd.random()
        name = rnd.choice(sorted(self.machines))
        machine = self.machines[name]
        if what < 0.5:
            self.exchange(name, lose=rnd.choice(["", "", "", "order", "report"]) if self.faults else "")
        elif what < 0.6:
            self.submit(
                hosts=rnd.choice([1, 1, 1, 2]),
                retries=rnd.randint(0, 1),
                priority=rnd.choice([0, 0, 1]),
                environment={"more": str(rnd.choice([0, 0, 0, 4, 30]))},
            )
        elif what < 0.75 and machine.held:
            key = rnd.choice(sorted(machine.held))
            self.ends(machine, key, rnd.choice([0, 0, 0, 0, 1, 137]))
        elif what < 0.8:
            self.coordinator.decide(self.now)
        elif what < 0.84:
            machine.foreign = rnd.choice([0, 0, 3]) if sum(machine.held.values()) + 3 <= machine.limit else 0
        elif not self.faults:
            pass
        elif what < 0.88:
            machine.restarted()
        elif what < 0.91:
            machine.serving = not machine.serving
        elif what < 0.94:
            self.begin()
        elif what < 0.96 and len(self.machines) > 2:
            del self.machines[name]
            self.coordinator.lost(name, self.now)
        elif len(self.machines) < 5:
            self.made += 1
            self.machines[f"n{self.made}"] = Machine(f"n{self.made}", rnd.choice([8, 12, 16, 20]), rnd)
            self.coordinator.report(self.machines[f"n{self.made}"].report(), self.now)
        self.check()

    def ends(self, machine, key, status):
        """A process ends; those of a job of several hosts end well together."""
        spec = self.submitted[key[0]]
        group = [m for m in self.machines.values() if key in m.tasks and not m.tasks[key].ended]
        if status == 0 and (len(group) < spec.hosts or not all(key in m.held for m in group)):
            return
        for m in group if status == 0 else [machine]:
            m.end(key, status, "it failed")

    def check(self):
        for machine in self.machines.values():
            assert sum(machine.held.values()) <= machine.limit
            alive = [j for (j, _), t in machine.tasks.items() if not t.ended]
            assert len(alive) == len(set(alive)), "two attempts of a job on one machine"
        for job in self.submitted:
            attempts = {}
            for machine in self.machines.values():
                for (j, attempt), task in machine.tasks.items():
                    if j == job and not task.ended:
                        attempts.setdefault(attempt, []).append(machine.name)
            spec = self.submitted[job]
            assert all(len(names) <= spec.hosts for names in attempts.values()), "one attempt on too many machines"
            current = {r.attempt for r in self.coordinator.jobs([job]) if r.state == "placed"}
            assert len(attempts.keys() & current) <= 1
        for record in self.coordinator.jobs():
            if record.state == "refused" and record.spec.job not in self.refused:
                self.refused.add(record.spec.job)
                limits = [room.limit for report in self.coordinator.nodes() for room in report.rooms]
                able = sum(limit >= record.floor for limit in limits)
                assert able < record.spec.hosts, "refused, and there are machines for it"
        kept = [job for job in self.submitted if self.coordinator.is_kept(job)]
        self.confirmed |= set(kept)

    def settle(self):
        """No more faults: everything ends, well or with a reason."""
        self.faults = False
        for machine in self.machines.values():
            machine.serving, machine.foreign = True, 0
        for _ in range(600):
            self.now += 1.0
            for name in sorted(self.machines):
                self.exchange(name)
            for machine in self.machines.values():
                for key in sorted(machine.held):
                    if key in machine.held and self.rnd.random() < 0.5:
                        self.ends(machine, key, 0)
            self.check()
            if all(r.state in ENDED for r in self.coordinator.jobs()):
                break
        else:
            raise AssertionError([r for r in self.coordinator.jobs() if r.state not in ENDED])
        for _ in range(3):
            for name in sorted(self.machines):
                self.exchange(name)


@pytest.mark.parametrize("seed", range(60))
def test_every_job_ends_or_is_refused_with_a_reason(seed):
    world = World(seed)
    for _ in range(250):
        world.step()
    before = {r.spec.job for r in world.coordinator.jobs()}
    world.settle()
    for record in world.coordinator.jobs():
        assert record.state in ENDED
        assert (record.state == "done") != bool(record.reason)
    assert before <= {r.spec.job for r in world.coordinator.jobs()}
    for machine in world.machines.values():
        assert not machine.tasks and not machine.held, "nothing is left behind"


def test_a_confirmed_job_outlives_the_coordinator_and_all_but_one_of_its_keepers():
    world = World(1, faults=False)
    for _ in range(20):
        world.submit(floor=3)
    for name in world.machines:
        world.exchange(name)
    assert all(world.coordinator.is_kept(job) for job in world.submitted)
    for name in sorted(world.machines)[: COPIES - 1]:
        del world.machines[name]
    world.begin()
    assert {r.spec.job for r in world.coordinator.jobs()} == world.submitted.keys()
    world.settle()
    assert {r.state for r in world.coordinator.jobs()} == {"done"}


def test_a_job_that_runs_goes_on_while_the_coordinator_is_killed():
    world = World(2, faults=False)
    world.submit(floor=3)
    for _ in range(2):
        for name in world.machines:
            world.exchange(name)
    (before,) = world.coordinator.jobs()
    world.begin()
    for name in world.machines:
        world.exchange(name)
    (after,) = world.coordinator.jobs()
    assert (after.state, after.attempt, after.places) == ("placed", before.attempt, before.places)
    assert [t.job for t in world.coordinator.tasks()] == ["j0"]


def test_an_older_coordinator_changes_nothing_any_more():
    world = World(3, faults=False)
    old = world.coordinator
    world.begin()
    world.exchange("n0")
    assert world.machines["n0"].tick(encode(old.orders("n0"))) is None


def test_hosts_are_started_once_the_first_has_said_where_they_meet():
    world = World(4, faults=False)
    world.submit(floor=3, hosts=3)
    world.coordinator.decide(0.0)
    (record,) = world.coordinator.jobs()
    first, *others = [place.node for place in record.places]
    assert all(not world.coordinator.orders(name).launch for name in others)
    world.exchange(first)
    launches = [world.coordinator.orders(name).launch[0] for name in others]
    assert [(launch.rank, launch.meet) for launch in launches] == [(1, "here:1"), (2, "here:1")]


def test_one_host_that_fails_ends_the_others_before_all_begin_again():
    world = World(5, faults=False)
    world.submit(floor=3, hosts=2, retries=1)
    for _ in range(3):
        for name in sorted(world.machines):
            world.exchange(name)
    (record,) = world.coordinator.jobs()
    a, b = [place.node for place in record.places]
    world.machines[b].end(("j0", 1), 1, "boom")
    world.exchange(b)
    (record,) = world.coordinator.jobs()
    assert record.attempt == 2 and record.failures == 1 and record.reason == "boom"
    assert not any(world.coordinator.orders(p.node).launch for p in record.places), "the first attempt still runs"
    world.exchange(a)
    assert any(world.coordinator.orders(p.node).launch for p in record.places)
    world.settle()
    assert [r.state for r in world.coordinator.jobs()] == ["done"]


def test_what_no_machine_can_grant_is_refused_with_what_they_said():
    world = World(6, faults=False)
    world.submit(floor=2, environment={"more": "100"})
    world.settle()
    (record,) = world.coordinator.jobs()
    assert record.state == "refused" and record.moves == len(world.machines)
    assert record.reason.startswith("n3 refused it: the smallest plan does not fit; then it needs 21B on a device")


def test_a_job_that_waits_for_its_lease_goes_where_there_is_room():
    world = World(7, faults=False)
    world.machines = {name: world.machines[name] for name in ("n0", "n1")}
    world.coordinator.lost("n2", 0.0), world.coordinator.lost("n3", 0.0)
    world.submit(floor=8)
    world.coordinator.decide(0.0)
    world.machines["n0"].foreign = 3  # of a task that came meanwhile
    world.exchange("n0")
    (record,) = world.coordinator.jobs()
    assert [p.node for p in record.places] == ["n1"] and "waited for its lease on n0 for 6 s" in record.reason
    world.settle()


def test_a_cancelled_job_is_ended_where_it_runs():
    world = World(8, faults=False)
    world.submit(floor=3)
    world.coordinator.decide(0.0)
    world.exchange("n0")
    assert world.machines["n0"].tasks
    world.coordinator.cancel("j0", 1.0)
    for _ in range(2):
        world.exchange("n0")
    assert not world.machines["n0"].tasks and [r.state for r in world.coordinator.jobs()] == ["cancelled"]
