"""Simulated jobs under the real coordinator: times, links, turns, groups, faults, and that nothing is overcommitted."""

import json
from collections import Counter

import pytest
from msgspec import structs

from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Account, Capacity, Ledger
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.runtime.simulate.audit import Audit, ViolationError, everything_is_free
from jaxtensile.runtime.simulate.jobs import Job
from jaxtensile.runtime.simulate.machine import OvercommittedError
from jaxtensile.runtime.simulate.simulation import Node, Simulation, alone
from jaxtensile.runtime.simulate.trace import Trace
from simulated_walks import walk

GPU = "gpu:0"
SETTINGS = Settings(lease_ttl=float("inf"))
LADDER = (Rung(persistent=2, temp=5, seconds=0.14), Rung(persistent=2, temp=17, seconds=0.1))


def on(capacity, *jobs, gated=True, devices=1, trace=None, check=None, **given):
    """The jobs on one machine, at their ends."""
    room = {f"gpu:{k}": Capacity(capacity=capacity, gated=gated) for k in range(devices)}
    nodes = {"machine": Node(capacities={**room, HOST: Capacity(capacity=1000)}, **given)}
    it = Simulation(nodes, SETTINGS, trace=trace, check=check or Audit()).add(jobs)
    it.run()
    everything_is_free(it)
    return it


def ended(it):
    """When the last job has ended."""
    return max(o.ended for o in it.outcomes)


def job(name="job", **given):
    return Job(**{"name": name, "ladder": LADDER, "steps": 50, "devices": (GPU,), **given})


@pytest.mark.parametrize(
    "rung",
    [
        Rung(persistent=1, temp=2, seconds=0.1),
        Rung(persistent=1, temp=2, seconds=0.1, into=0.05, out=0.02),
        Rung(persistent=1, temp=2, seconds=0.3, wait=0.1, into=0.29, out=0.3),
    ],
)
def test_alone_a_step_takes_what_was_predicted(rung):
    found = alone(job(ladder=(rung,), steps=200), Capacity(capacity=100, gated=True), SETTINGS)
    assert found.stepping == pytest.approx(200 * rung.seconds) and found.rungs == {0: 200}
    assert found.ended == pytest.approx(200 * rung.seconds, rel=0.05)


def test_starting_compiling_and_the_allocator_take_their_time():
    found = alone(job(starts=2.0, compiles=3.0, takes=0.5, gives=0.25), Capacity(capacity=100, gated=True), SETTINGS)
    assert found.first_step == pytest.approx(5.0, abs=0.01) and found.ended == pytest.approx(
        5.0 + 0.5 + 5.0 + 0.25, rel=0.01
    )


def test_copies_of_all_who_share_a_link_add_up():
    copies = (Rung(persistent=1, temp=2, seconds=1.0, wait=0.9, into=1.0),)
    jobs = [job(f"job{k}", ladder=copies, steps=10) for k in range(2)]
    assert ended(on(100, *jobs)) == pytest.approx(20.0, rel=0.01)
    apart = [structs.replace(j, devices=(f"gpu:{k}",)) for k, j in enumerate(jobs)]
    assert ended(on(100, *apart, devices=2)) == pytest.approx(10.0, rel=0.01)
    assert ended(on(100, *apart, devices=2, shared_link=True)) == pytest.approx(20.0, rel=0.01)


def test_who_copies_and_who_computes_do_not_wait_for_each_other():
    copies = job("copies", ladder=(Rung(persistent=1, temp=2, seconds=1.0, wait=0.9, into=1.0),), steps=10)
    computes = job("computes", ladder=(Rung(persistent=1, temp=2, seconds=1.0),), steps=9)
    assert ended(on(100, copies, computes)) == pytest.approx(10.0, rel=0.02)


def test_jobs_take_turns_where_their_temporaries_do_not_fit_together():
    it = on(26, job("a", takes=0.001), job("b", takes=0.001))
    assert all(o.rungs == {1: 50} and o.turns > 20 for o in it.outcomes)
    assert ended(it) == pytest.approx(10.0, rel=0.05) and it.machines["machine"].most[GPU] == 2 * 2 + 17


def test_who_finds_no_room_waits_from_its_request_until_it_is_admitted():
    first, second = job("first"), job("second", starts=2.0, arrives=0.5)
    it = on(10, first, second, gated=False)
    before, after = it.outcomes
    assert before.waited == pytest.approx(0.0, abs=0.01)
    assert after.waited == pytest.approx(before.ended - 2.5, abs=0.1) and after.waited > 1.0


def test_a_smaller_plan_runs_where_the_larger_one_does_not_fit():
    it = on(26, job("a"), job("b"), gated=False)
    assert Counter(k for o in it.outcomes for k in o.rungs) == {0: 1, 1: 2}, "who is left grows"


def test_between_the_groups_of_a_step_others_have_their_turns():
    train = job("train", ladder=(Rung(persistent=2, temp=5, seconds=1.0),), steps=20)
    answers = job("answers", ladder=(Rung(persistent=1, temp=1, seconds=0.005),), steps=400, priority=1)
    whole = on(100, train, answers, threads=True)
    parts = on(100, structs.replace(train, groups=10), answers, threads=True)
    assert max(whole.outcomes[1].waits) > 0.9 and max(parts.outcomes[1].waits) < 0.11
    assert parts.outcomes[0].steps == 20 and parts.outcomes[0].rungs == {0: 20}


def test_bytes_of_a_killed_job_are_free_and_another_takes_them():
    it = on(
        8, job("a", ladder=LADDER[:1], steps=1000, killed=2.0), job("b", ladder=LADDER[:1], arrives=1.0), gated=False
    )
    a, b = it.outcomes
    assert a.why == "killed" and b.admitted == pytest.approx(2.0, abs=0.01) and b.steps == 50


def test_who_is_stopped_keeps_its_bytes_and_comes_back():
    settings = Settings(lease_ttl=5.0)
    nodes = {"machine": Node(capacities={GPU: Capacity(capacity=8)})}
    first = job("a", ladder=LADDER[:1], steps=100, stops=((3.0, 20.0),))
    it = Simulation(nodes, settings, check=Audit()).add([first, job("b", ladder=LADDER[:1], arrives=1.0)])
    a, b = it.run()
    assert it.machines["machine"].coordinator.counters["quarantined"] == 1
    assert a.steps == 100 and b.admitted == pytest.approx(a.ended, abs=0.01)


def test_without_a_coordinator_who_finds_no_bytes_ends():
    free = {GPU: Capacity(capacity=1 << 40)}
    nodes = {"machine": Node(capacities=free, physical={GPU: 30})}
    outcomes = Simulation(nodes, SETTINGS).add([job("a"), job("b")]).run()
    assert [o.why for o in outcomes] == ["", "out of memory"]


def test_a_fleet_places_jobs_and_refuses_what_fits_nowhere():
    node = Node(capacities={f"gpu:{k}": Capacity(capacity=26, gated=True) for k in range(4)})
    jobs = [job(f"job{k}", devices=(), count=1 + k % 4, arrives=k / 7, steps=20) for k in range(25)]
    large = job("large", devices=(), ladder=(Rung(persistent=40, temp=1, seconds=1.0),))
    it = Simulation({f"machine{k}": node for k in range(3)}, SETTINGS, check=Audit()).add([*jobs, large])
    *outcomes, refused = it.run()
    assert all(o.steps == 20 and not o.why for o in outcomes) and "the cluster can grant 26B" in refused.why
    everything_is_free(it)


def test_the_same_jobs_have_the_same_outcomes_each_time():
    (one, _), (two, _) = walk(7), walk(7)
    assert one.outcomes == two.outcomes and one.clock.events == two.clock.events


def test_a_trace_has_every_step_and_the_bytes():
    trace = Trace()
    on(26, job("a", takes=0.001), job("b", takes=0.001), trace=trace)
    events = json.loads(trace.to_json())["traceEvents"]
    names = Counter(e["name"] for e in events if e["ph"] == "X")
    assert names["step"] == 100 and max(e["args"]["used"] for e in events if e["ph"] == "C") == 21
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"a", "b"}


def test_random_walks_break_no_invariant(record_property):
    walks = [walk(seed) for seed in range(80)]
    whys = Counter(o.why for it, _ in walks for o in it.outcomes)
    assert whys[""] > 250 and whys["killed"] > 30 and sum(audit.checked for _, audit in walks) > 20_000
    assert sum(o.moves for it, _ in walks for o in it.outcomes) > 50


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Account, "turn_fits", lambda *_: True),
        (Ledger, "fits", lambda *_: True),
        (Ledger, "fit", lambda *_: True),
    ],
)
def test_the_audit_notices_a_broken_rule(monkeypatch, where, name, broken):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((ViolationError, OvercommittedError)):
        for seed in range(60):
            walk(seed)


def test_who_knows_of_the_link_ends_sooner():
    """Of two plans the one that copies is faster alone, and not beside a job that is bound by the link."""
    either = (
        Rung(persistent=2, temp=6, seconds=1.0, wait=0.1, into=1.0),
        Rung(persistent=2, temp=7, seconds=1.1),
    )
    streams = (Rung(persistent=1, temp=1, seconds=1.0, wait=0.7, into=1.0),)
    blind = tuple(structs.replace(r, wait=0.0, into=0.0) for r in either)
    times = {}
    for told in (either, blind):
        it = on(100, job("either", ladder=either, told=told), job("streams", ladder=streams), gated=False)
        times[told] = sum(o.ended for o in it.outcomes), {k: o.rungs for k, o in enumerate(it.outcomes)}
    (known, rungs), (unknown, others) = times[either], times[blind]
    assert rungs[0].get(1, 0) > 45 and others[0] == {0: 50}
    assert unknown / known == pytest.approx(1.67, abs=0.05)
