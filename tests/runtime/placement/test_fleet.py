"""Jobs are placed within the room that there is, all hosts of a job or none, and nobody waits who could run."""

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.runtime.placement.asks import Ask, Place, Placed, Refused, Rules
from jaxtensile.runtime.placement.fleet import Fleet
from jaxtensile.runtime.placement.nodes import Room

DEVICES = ("cuda:0", "cuda:1")


def rooms(*limits, guaranteed=0):
    return [Room(f"cuda:{k}", limit, guaranteed) for k, limit in enumerate(limits)]


def ask(job, floor, *, order=None, since=0.0, **given):
    return Ask(job=job, floor=floor, order=order if order is not None else int(job[1:] or 0), since=since, **given)


def fleet(nodes, **given):
    found = Fleet(Rules(**given))
    for name, limits in nodes.items():
        found.report(name, rooms(*limits))
    return found


def places(decided):
    return {d.job: {p.node: p.devices for p in d.places} for d in decided if isinstance(d, Placed)}


def test_a_job_goes_where_nothing_runs_then_to_the_fullest_node_that_has_room():
    here = fleet({"a": (10, 10), "b": (8,), "c": (12,)})
    order = []
    for k, floor in enumerate((5, 5, 5, 5, 3, 4, 5, 6)):
        here.submit(ask(f"j{k}", floor))
        order += [p.node + p.devices[0][-1] for found in here.decide(0.0) for p in found.places]
    assert order == ["b0", "c0", "a0", "a1", "b0", "c0", "a0"] and here.waiting == ("j7",)


def test_a_device_of_its_own_and_the_smaller_jobs_later():
    here = fleet({"a": (10, 10)})
    for k, floor in enumerate((4, 9, 5)):
        here.submit(ask(f"j{k}", floor))
    assert places(here.decide(0.0)) == {"j1": {"a": ("cuda:0",)}, "j2": {"a": ("cuda:1",)}, "j0": {"a": ("cuda:1",)}}
    assert not here.waiting and [free for _, free in here.rooms("a")] == [1, 1]


def test_hosts_are_had_together_in_the_order_of_their_names():
    here = fleet({"b": (8, 8), "a": (8, 8), "c": (8, 4)})
    here.submit(ask("j0", 5, devices=2, hosts=3))
    assert here.decide(0.0) == [] and here.waiting == ("j0",)
    assert all(free == room.limit for name in "abc" for room, free in here.rooms(name)), "who waits holds nothing"
    here.report("d", rooms(5, 6))
    (found,) = here.decide(1.0)
    assert [p.node for p in found.places] == ["a", "b", "d"] and {p.devices for p in found.places} == {DEVICES}


def test_what_is_reported_counts_instead_of_the_floor_once_a_job_is_admitted():
    here = fleet({"a": (10,)})
    here.submit(ask("j0", 6))
    here.decide(0.0)
    assert here.rooms("a")[0][1] == 4
    here.report("a", rooms(10, guaranteed=2))  # of somebody else: the job has not been admitted
    assert here.rooms("a")[0][1] == 2
    here.report("a", rooms(10, guaranteed=3), ["j0"])
    assert here.rooms("a")[0][1] == 7
    here.ended("j0")
    here.report("a", rooms(10))
    assert here.rooms("a")[0][1] == 10


def test_a_lost_node_gives_its_jobs_back_in_their_old_order():
    here = fleet({"a": (10, 10), "b": (10, 10)})
    here.submit(ask("j1", 9, devices=2, hosts=2))
    here.decide(0.0)
    here.submit(ask("j2", 9))
    assert here.lost("b") == ("j1",)
    assert here.waiting == ("j1", "j2") and here.where("j1") == () and here.on("a") == ()
    assert places(here.decide(1.0)) == {"j2": {"a": ("cuda:0",)}}
    here.report("b", rooms(10, 10))
    here.ended("j2")
    assert places(here.decide(2.0)) == {"j1": {"a": DEVICES, "b": DEVICES}}


def test_no_job_is_placed_on_a_node_that_takes_none():
    here = fleet({"a": (10,)})
    here.report("a", rooms(10), takes=False)
    here.submit(ask("j0", 1))
    assert here.decide(0.0) == here.decide(1e6) == [] and here.waiting == ("j0",)
    here.report("a", rooms(10))
    assert places(here.decide(1e6)) == {"j0": {"a": ("cuda:0",)}}


def test_what_no_node_is_large_enough_for_is_refused_with_the_bound_after_a_while():
    here = fleet({"a": (10, 10), "b": (8,)}, refuse_after=60.0)
    here.submit(ask("j0", 11, since=5.0))
    here.submit(ask("j1", 9, since=5.0, hosts=2))
    here.submit(ask("j2", 1, since=5.0, devices=2, hosts=2))
    assert here.decide(4.0) == [] and here.decide(64.0) == []
    refused = {r.job: r.reason for r in here.decide(65.0) if isinstance(r, Refused)}
    assert refused == {
        "j0": "it needs 11B on a device, and the cluster can grant 10B there: bring a smaller plan, or add larger "
        "machines",
        "j1": "it needs 9B on a device of each of 2 machines, and the cluster can grant 8B there: bring a smaller "
        "plan, or add larger machines",
        "j2": "it needs 1B on each of 2 devices of each of 2 machines, and 1 of the 2 machines have as many: bring a "
        "smaller plan, or add larger machines",
    }
    assert here.waiting == ()


def test_devices_of_a_kind():
    here = Fleet(Rules())
    here.report("a", [Room("cpu:0", 90), Room("cuda:0", 10), Room("cuda:1", 10)])
    here.submit(ask("j0", 5, devices=2, kind="cuda"))
    here.submit(ask("j1", 20, kind="cuda"))
    here.submit(ask("j2", 20))
    assert places(here.decide(0.0)) == {"j0": {"a": DEVICES}, "j2": {"a": ("cpu:0",)}}
    (refused,) = here.decide(60.0)
    assert refused.reason.startswith("it needs 20B on a cuda device, and the cluster can grant 10B there: ")


def test_a_larger_node_that_comes_in_time_takes_it():
    here = fleet({"a": (10,)})
    here.submit(ask("j0", 11))
    here.submit(ask("j1", 13))
    assert here.decide(0.0) == here.decide(59.0) == []
    here.report("b", rooms(12))
    assert places(here.decide(61.0)) == {"j0": {"b": ("cuda:0",)}}
    assert here.decide(120.0) == [], "a larger one has just come, and another may"
    assert [r.job for r in here.decide(121.0)] == ["j1"]


def test_a_higher_class_goes_first_whatever_its_size():
    here = fleet({"a": (10,)})
    here.submit(ask("j0", 9))
    here.submit(ask("j1", 2, priority=1))
    assert places(here.decide(0.0)) == {"j1": {"a": ("cuda:0",)}}


def stream(hold_after):
    """When a job of both nodes begins beside a stream of small ones that always has one waiting."""
    here = fleet({"a": (10,), "b": (10,)}, hold_after=hold_after)
    ends, running = [], 0
    for now in range(200):
        for end, job in [e for e in ends if e[0] <= now]:
            here.ended(job)
            ends.remove((end, job))
            running -= 1
        here.submit(ask(f"j{now + 1}", 6, since=float(now)))
        if now == 5:
            here.submit(ask("j0", 8, order=0, since=5.0, hosts=2))
        for found in here.decide(float(now)):
            if found.job == "j0":
                return now
            running += 1
            ends.append((now + 3 + running % 2, found.job))
    return None


def test_the_oldest_is_not_overtaken_for_ever():
    assert stream(float("inf")) is None, "without holding it never begins"
    assert 25 <= stream(20.0) <= 30


def test_nodes_are_held_for_one_job_and_free_again_when_it_has_gone():
    here = fleet({"a": (10,), "b": (10,), "c": (10,)}, hold_after=10.0)
    here.submit(ask("j1", 6))
    here.decide(0.0)
    here.submit(ask("j2", 9, hosts=3))
    here.submit(ask("j3", 3, since=10.0))
    assert here.decide(10.0) == [] and here.waiting == ("j2", "j3")
    here.submit(ask("j4", 3, priority=1, since=10.0))  # a higher class does not wait for that
    assert [*places(here.decide(11.0))] == ["j4"]
    here.ended("j2")
    assert [*places(here.decide(12.0))] == ["j3"]


def test_a_job_may_move_to_another_node_that_has_room_and_to_no_other():
    here = fleet({"a": (10,), "b": (12,)})
    here.submit(ask("j1", 9))
    here.submit(ask("j2", 5))
    here.submit(ask("j3", 5))
    here.decide(0.0)
    assert [here.where(f"j{k}") for k in (1, 2, 3)] == [("a",), ("b",), ("b",)]
    assert here.elsewhere("j1") is None and here.where("j1") == ("a",)
    here.ended("j2")
    assert here.elsewhere("j1") is None
    here.ended("j3")
    assert here.elsewhere("j1") == Placed("j1", (Place("b", ("cuda:0",)),))
    assert here.on("a") == () and here.rooms("a")[0][1] == 10 and here.rooms("b")[0][1] == 3


def test_a_refused_floor_is_raised_and_its_age_kept():
    here = fleet({"a": (10,), "b": (20,)})
    here.submit(ask("j1", 4))
    assert places(here.decide(0.0)) == {"j1": {"a": ("cuda:0",)}}
    here.back("j1", 11)
    assert places(here.decide(0.0)) == {"j1": {"b": ("cuda:0",)}}


def test_asking_again_changes_nothing():
    here = fleet({"a": (10,)})
    for _ in range(2):
        here.submit(ask("j1", 6))
        here.submit(ask("j2", 6))
    assert len(here.decide(0.0)) == 1 and here.decide(0.0) == []
    here.submit(ask("j1", 6))
    here.ended("j2")
    here.ended("j2")
    here.ended("j0")
    assert here.where("j1") == ("a",) and here.waiting == () and here.decide(1e9) == []


# By brute force.

LIMITS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3)
ASKS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2), st.integers(1, 2)), min_size=1, max_size=5)


def best(free, asks):
    """The most bytes of jobs that can run at once, of all ways to place them."""
    most = 0
    for k, (floor, devices, hosts) in enumerate(asks):
        able = {n: [d for d, room in enumerate(ds) if room >= floor] for n, ds in enumerate(free)}
        for nodes in combinations(able, hosts):
            for picks in ways([able[n] for n in nodes], devices):
                left = [[*ds] for ds in free]
                for n, ds in zip(nodes, picks, strict=True):
                    for d in ds:
                        left[n][d] -= floor
                most = max(most, floor * devices * hosts + best(left, asks[k + 1 :]))
    return most


def ways(able, devices):
    if not able:
        yield ()
        return
    for first in combinations(able[0], devices):
        for rest in ways(able[1:], devices):
            yield (first, *rest)


@settings(max_examples=150, deadline=None)
@given(LIMITS, ASKS)
def test_what_is_placed_is_within_a_factor_of_all_that_can_be(limits, asks):
    """Alone a job is placed if there is any way; together they have half of the bytes of the best way."""
    nodes = {f"n{k}": ls for k, ls in enumerate(limits)}
    for floor, devices, hosts in asks:
        alone = fleet(nodes)
        alone.submit(ask("j0", floor, devices=devices, hosts=hosts))
        assert bool(alone.decide(0.0)) == bool(best(limits, [(floor, devices, hosts)]))
    here = fleet(nodes)
    for k, (floor, devices, hosts) in enumerate(asks):
        here.submit(ask(f"j{k}", floor, devices=devices, hosts=hosts))
    here.decide(0.0)
    used = sum(room.limit - free for name in nodes for room, free in here.rooms(name))
    assert 2 * used >= best(limits, asks)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "end", "lose", "join", "admit", "wait", "move", "back"]), st.integers(0, 9)
    ),
    max_size=40,
)


class Model:
    """The same by the obvious means: who is where, as it was told."""

    def __init__(self):
        self.fleet = Fleet(Rules(hold_after=5.0, refuse_after=8.0))
        self.nodes, self.asks, self.at, self.admitted, self.now, self.count = {}, {}, {}, set(), 0.0, 0
        self.before, self.resized = {}, 0.0

    def do(self, what, k):
        jobs = sorted(self.at)
        job = jobs[k % len(jobs)] if jobs else None
        if what == "submit":
            self.count += 1
            new = ask(
                f"j{self.count}", 1 + k, since=self.now, devices=1 + k % 2, hosts=1 + (k > 7), priority=int(k == 3)
            )
            self.asks[new.job] = new
            self.fleet.submit(new)
        elif what == "join":
            self.nodes[f"n{k % 4}"] = [4 + k, 10][: 1 + k % 2]
        elif what == "lose" and self.nodes:
            name = sorted(self.nodes)[k % len(self.nodes)]
            gone = {j for j, ps in self.at.items() if name in ps}
            assert set(self.fleet.lost(name)) == gone
            del self.nodes[name]
            self.forget(gone)
        elif what == "wait":
            self.now += k
        elif job is not None:
            if what == "end":
                self.fleet.ended(job)
                del self.asks[job]
                self.forget({job})
            elif what == "admit":
                self.admitted.add(job)
            elif what == "back":
                self.fleet.back(job)
                self.forget({job})
            elif what == "move" and (found := self.fleet.elsewhere(job)):
                self.forget({job})
                self.take(found)
        self.report()
        for found in self.fleet.decide(self.now):
            if isinstance(found, Refused):
                old = self.asks.pop(found.job)
                assert (
                    found.reason and self.now - max(old.since, self.resized) >= 8.0 and not self.fits(old, empty=True)
                )
            else:
                self.take(found)
        self.report()

    def forget(self, jobs):
        for job in jobs:
            del self.at[job]
        self.admitted -= jobs

    def take(self, found):
        old = self.asks[found.job]
        assert found.job not in self.at and [p.node for p in found.places] == sorted({p.node for p in found.places})
        assert len(found.places) == old.hosts and {len(set(p.devices)) for p in found.places} == {old.devices}
        self.at[found.job] = {p.node: p.devices for p in found.places}

    def used(self, name, device, jobs):
        return sum(self.asks[j].floor for j in jobs if device in self.at[j].get(name, ()))

    def report(self):
        if self.nodes != self.before:
            self.before, self.resized = {**self.nodes}, self.now
        for name, limits in self.nodes.items():
            there = [
                Room(f"cuda:{k}", limit, self.used(name, f"cuda:{k}", self.admitted)) for k, limit in enumerate(limits)
            ]
            self.fleet.report(name, there, self.admitted)

    def free(self, name, empty=False):
        return [
            limit - (0 if empty else self.used(name, f"cuda:{k}", self.at)) for k, limit in enumerate(self.nodes[name])
        ]

    def fits(self, old, empty=False, without=()):
        able = [n for n in self.nodes if n not in without]
        return sum(sum(f >= old.floor for f in self.free(n, empty)) >= old.devices for n in able) >= old.hosts

    def check(self):
        for name in self.nodes:
            assert min(self.free(name)) >= 0, "overcommitted"
            kept = self.fleet._held.get(name, ())
            holder = self.asks[self.fleet._holder].floor if kept else 0
            free = [room - holder * (k in kept) for k, room in enumerate(self.free(name))]
            assert [free for _, free in self.fleet.rooms(name)] == free
        assert {*self.fleet.waiting} == self.asks.keys() - self.at.keys()
        holder = self.fleet._holder
        assert not self.fleet._held or self.now - self.asks[holder].since >= 5.0
        assert len(self.fleet._held) <= (self.asks[holder].hosts if holder else 0)
        over = self.asks[holder].priority if holder else 9
        for job in self.fleet.waiting:
            old = self.asks[job]
            rooms = [[free for _, free in self.fleet.rooms(name)] for name in self.nodes]
            able = sum(sum(free >= old.floor for free in there) >= old.devices for there in rooms)
            assert able < old.hosts, "it could run beside what is held"
            assert old.priority <= over or not self.fits(old), "held against a higher class"


@settings(max_examples=150, deadline=None)
@given(OPS)
def test_at_every_event_nothing_is_overcommitted_and_nobody_waits_who_could_run(operations):
    model = Model()
    for what, k in operations:
        model.do(what, k)
        model.check()


@settings(max_examples=40, deadline=None)
@given(OPS)
def test_a_fleet_made_again_from_what_nodes_say_has_the_same_room_and_goes_on_alike(operations):
    model = Model()
    for what, k in operations:
        model.do(what, k)
    former, model.fleet = model.fleet, Fleet(Rules(hold_after=5.0, refuse_after=8.0))
    model.report()
    for job, there in model.at.items():
        model.fleet.adopt(model.asks[job], [Place(*p) for p in there.items()])
    for job in former.waiting:
        model.fleet.submit(model.asks[job])
    model.report()
    former._release()
    for name in model.nodes:
        assert model.fleet.rooms(name) == former.rooms(name)
    assert model.fleet.waiting == former.waiting
    for job in sorted(model.at):
        former.ended(job), model.fleet.ended(job)
    if not model.fleet.waiting:
        return
    assert places(model.fleet.decide(model.now + 100)) == places(former.decide(model.now + 100))


def test_the_order_of_reports_does_not_matter():
    found = set()
    for order in permutations({"a": (10,), "b": (8,), "c": (8,)}.items()):
        here = fleet(dict(order))
        for k in range(4):
            here.submit(ask(f"j{k}", 4 + k))
        found.add(str(here.decide(0.0)))
    assert len(found) == 1
