"""The coordinator of one process: threads as jobs, leases that grow and shrink, and time."""

import threading
import time

import pytest

from jaxtensile.errors import NotAdmittedError, RejectedError
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.local import LocalCoordinator
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.decide.events import Received, Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Admit, Rung

CPU = "cpu:0"
LADDER = (Rung(persistent=2, temp=2, seconds=2.0), Rung(persistent=2, temp=6, seconds=1.0))
WAIT = 30.0


def office(capacity=12, **settings):
    capacities = {CPU: Capacity(capacity=capacity), HOST: Capacity(capacity=8)}
    return LocalCoordinator(capacities, Settings(**{"min_hold": 0.0, **settings}))


def client(at, job, ladder=LADDER, changed=None, **given):
    return Client(Admit(job=job, devices=(CPU,), ladder=ladder, **given), at.link, changed=changed)


def follow(job):
    if (rung := job.boundary()) is not None:
        job.moved()
    return rung


def states(at):
    return {a.job: (a.state, a.rung) for a in at.status().leases}


def until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_of_the_temporaries_only_the_largest_counts():
    at = office(12)
    one, two, three = (client(at, name) for name in ("a", "b", "c"))
    for job in (one, two, three):
        job.wait(WAIT)
    for job in (one, two, three):
        follow(job)
    # 3 x 2 that stay, and 6 of whoever's turn it is: all are on their best rung in 12 bytes.
    assert states(at) == dict.fromkeys("abc", ("held", 1))
    assert next(d for d in at.status().devices if d.device == CPU).charged == 12
    for job in (one, two, three):
        assert job.release()
    assert next(d for d in at.status().devices if d.device == CPU).charged == 0


def test_who_comes_makes_others_shrink_and_who_goes_lets_them_grow():
    at = office(9)
    one = client(at, "one")
    assert one.wait(WAIT) == 1
    two = client(at, "two", ladder=(Rung(persistent=4, temp=1, seconds=1.0),))
    with pytest.raises(NotAdmittedError):
        two.wait(0.01)
    assert follow(one) == 0
    assert two.wait(WAIT) == 0
    assert two.release()
    assert follow(one) == 1
    assert one.release()


def test_whoever_waits_is_told_in_its_own_thread_of_control():
    at, told = office(9), []
    one = client(at, "one", changed=lambda: told.append(threading.current_thread().name))
    one.wait(WAIT)
    follow(one)
    told.clear()
    arriving = threading.Thread(
        target=lambda: client(at, "two", ladder=(Rung(persistent=4, temp=1, seconds=1.0),)), name="arriving"
    )
    arriving.start()
    arriving.join(WAIT)
    assert told == ["arriving"]
    assert one.target == 0


def test_a_job_that_answers_from_within_needs_no_thread():
    at, two = office(9), None

    def answer():
        if jobs and jobs[0].boundary() is not None:
            jobs[0].moved()

    jobs = []
    jobs.append(client(at, "one", changed=answer))
    jobs[0].wait(WAIT)
    answer()
    assert jobs[0].rung == 1
    two = client(at, "two", ladder=(Rung(persistent=4, temp=1, seconds=1.0),))
    assert two.wait(WAIT) == 0
    assert jobs[0].rung == 0


def test_the_life_of_a_job_that_runs_no_step_is_three_decisions(monkeypatch):
    at, heard, handle = office(), [], Coordinator.handle_all

    def handle_all(core, events, now):
        heard.append([type(e.message if isinstance(e, Received) else e).__name__ for e in events])
        return handle(core, events, now)

    monkeypatch.setattr(Coordinator, "handle_all", handle_all)
    job = client(at, "one", LADDER[:1])
    job.wait(WAIT)
    job.release()
    assert heard == [["Connected", "Hello", "Admit"], ["Release"], ["Disconnected"]]


def test_what_can_never_fit_is_refused_with_the_bound():
    at = office(3)
    with pytest.raises(RejectedError, match=r"needs 4B on cpu:0, which can ever grant 3B"):
        client(at, "big").wait(WAIT)


def test_time_does_what_nobody_else_does():
    """A minimum hold ends while everybody sleeps: bytes go to who gains more by the coordinator's own thread."""
    at = office(9, min_hold=0.15)
    jobs = []

    def answer():
        if jobs and jobs[0].boundary() is not None:
            jobs[0].moved()

    jobs.append(client(at, "one", changed=answer))
    jobs[0].wait(WAIT)
    answer()
    assert jobs[0].rung == 1
    began = time.monotonic()
    ladder = Rung(persistent=1, temp=1, seconds=3.0), Rung(persistent=4, temp=1, seconds=1.0)
    two = client(at, "two", ladder=ladder)
    assert two.wait(WAIT) == 0
    until(lambda: two.target == 1)
    assert time.monotonic() - began > 0.1
    assert jobs[0].rung == 0


def test_a_waiter_that_gives_up_leaves_nothing_behind():
    at = office(9)
    one = client(at, "one")
    one.wait(WAIT)
    follow(one)
    two = client(at, "two", ladder=(Rung(persistent=4, temp=1, seconds=1.0),))
    with pytest.raises(NotAdmittedError):
        two.wait(0.01)
    two.close()
    assert states(at) == {"one": ("held", 0)} or states(at) == {"one": ("held", 1)}
    follow(one)
    assert one.rung == 1


def test_more_or_less_memory_while_it_runs():
    at = office(12)
    one = client(at, "one")
    one.wait(WAIT)
    follow(one)
    at.resize({CPU: Capacity(capacity=5), HOST: Capacity(capacity=8)})
    assert follow(one) == 0
    at.resize({CPU: Capacity(capacity=12), HOST: Capacity(capacity=8)})
    assert follow(one) == 1


def test_many_threads_come_and_go_and_nothing_is_overcommitted():
    """24 jobs of 4 threads in room for a few; what each really holds is added up beside the coordinator."""
    at = office(14)
    held, lock, worst = {}, threading.Lock(), []

    def note(name, rung):
        with lock:
            if rung < 0:
                held.pop(name, None)
            else:
                held[name] = (LADDER[rung].persistent, LADDER[rung].temp)
            worst.append(sum(p for p, _ in held.values()) + max([t for _, t in held.values()], default=0))

    def work(k):
        for turn in range(6):
            name = f"{k}.{turn}"
            job = client(at, name)
            note(name, job.wait(WAIT))
            for _ in range(20):
                if (rung := job.boundary()) is not None:
                    note(name, max(rung, job.rung))
                    note(name, rung)
                    job.moved()
                time.sleep(0)
            note(name, -1)
            assert job.release()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
        assert not t.is_alive()
    assert len(worst) >= 24 * 2
    assert max(worst) <= 14
    assert at.status().leases == ()
    assert [d.charged for d in at.status().devices] == [0, 0]


def test_more_leases_than_one_page_are_all_told():
    at = office(1000)
    jobs = [client(at, f"job{k}", ladder=(Rung(persistent=1, seconds=1.0),)) for k in range(150)]
    assert [a.job for a in at.status().leases] == [f"job{k}" for k in range(150)]
    for job in jobs:
        assert job.release()


def test_a_device_has_one_gate():
    at = office()
    assert at.gate(CPU) is at.gate(CPU)
    assert at.gate("cpu:1") is not at.gate(CPU)
