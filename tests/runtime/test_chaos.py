"""Jobs and the daemon are killed at random moments, and no byte is held twice.

Eight processes train at a time through a daemon, on this machine's CPU, where one of every kind of harm comes by every
few seconds: ``kill -9`` of a job or of the daemon, which is started again up to a second later; a connection that is
cut; a job that is stopped, for less and for more than the time within which it has to be heard; less capacity and more
again. Then the logs that the jobs wrote are added up. ``JAXTENSILE_SOAK=1``: ten minutes of it, and the audit against
coordinators that lack a rule, and jobs that lie. It finds, within a minute or some where the machine is busy:

| what is missing | by |
|---|---|
| bytes are free at the end of a connection, not of a process | lost leases |
| bytes are free when a job was silent for long | lost leases |
| bytes go to others before the job says that it has given them up | more held than there is |
| the journal | lost leases |
| a turn lasts until its job says that it is over, not until its connection ends | more held than there is |
| a job that goes on with the larger plan after it said that it has shrunk | more held than there is |
"""

import re
from collections import Counter

import pytest

from chaos import EVERY, MIB, Chaos, Held, timeline
from jax_lines import SOAK

SECONDS = 600.0 if SOAK else 12.0
COUNTED = (
    "arrivals",
    "jobs killed",
    "kills of the daemon",
    "connections cut",
    "jobs stopped for a while",
    "changes of capacity",
    "changes of plan",
    "steps",
    "steps whose memory was measured",
    "losses compared",
)


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.xdist_group("suspend")  # not beside processes that wait for each other on a full machine
@pytest.mark.slow
def test_whoever_is_killed_nothing_is_overcommitted_or_lost_and_all_losses_are_the_same(folder, record_property):
    counts, chaos = Counter(), None
    for seed in range(1, 6):  # on a busy machine less happens in a while, and to jobs that are harmed as often
        (part := folder / str(seed)).mkdir(mode=0o700)
        chaos = Chaos(part, seed=seed, turns=seed == 1, every=EVERY * seed, before=chaos).run(SECONDS)
        problems = chaos.audit()
        counts.update(chaos.counts)
        print(f"{chaos.counts}; {chaos.summary}")
        assert not problems, "\n".join(problems)
        if seed > 1 and all(counts[what] for what in COUNTED):  # with turns and without
            break
    for what in COUNTED:
        record_property(f"chaos: {what}", counts[what])
        assert counts[what], f"there were no {what}"


# The audit's own eyes.


def written(*lines):
    return "".join(f"{line}\n" for line in lines)


def problems(deaths=None, **logs):
    held = Held(logs, deaths or {})
    held.most(100 * MIB)
    return held.problems


ONE = written("1 begins 11", "5 lease 1", f"10 run {70 * MIB} {5 * MIB}", "20 ran 0", "21 loss 0x1p+0", "40 done 1")


def test_the_audit_adds_up_what_runs_at_once_and_what_stays_between_steps():
    def other(begin, end, stays=30):
        return written("1 begins 12", "5 lease 2", f"{begin} run {60 * MIB} {stays * MIB}", f"{end} ran 0", "50 done 0")

    assert not problems(a=ONE, b=other(20, 30))
    assert "130.0 of 100.0 MiB at 19" in problems(a=ONE, b=other(19, 30))[0]
    assert not problems(a=ONE, b=other(2, 9))  # 30 MiB stay, and are not added to the 70 before ...
    assert "105.0 of 100.0 MiB at 10" in problems(a=ONE, b=other(2, 9, stays=35))[0]  # ... but 35 are


def test_the_audit_adds_up_no_former_plan_while_another_is_chosen():
    began = written("1 begins 11", "5 lease 1", f"6 run {70 * MIB} {5 * MIB}")
    other = written("1 begins 12", "5 lease 2", f"10 run {60 * MIB} {MIB}", "50 done 0")
    assert problems(a=began + written(f"20 run {20 * MIB} {5 * MIB}"), b=other)
    assert not problems(a=began + written("7 chooses", f"20 run {20 * MIB} {5 * MIB}"), b=other)


def test_where_there_was_too_much_it_is_told_what_those_did_who_had_it_and_what_was_done_to_them():
    logs = {"a": ONE, "b": written("1 begins 12", "10 run 2 1 0"), "c": written("9 run 7 1 0")}
    daemon = written(
        "1970-01-01T00:00:02.000Z granted job=a lease=1",
        "1970-01-01T00:00:02.000Z granted job=c lease=2",
        "1970-01-01T00:00:02.003Z shrunk job=a lease=1",
        "1970-01-01T00:00:02.002Z serving",
    )
    logs = {name: re.sub(r"(?m)^(\d+)", r"\g<1>000000", text) for name, text in logs.items()}
    assert timeline(logs, daemon, [(7_000_000, "killed")], 2 * 10**9, 20_000_000, {"a", "b"}) == [
        "1970-01-01T00:00:02.000Z daemon granted job=a lease=1",
        "1970-01-01T00:00:02.001Z a begins 11",
        "1970-01-01T00:00:02.001Z b begins 12",
        "1970-01-01T00:00:02.002Z daemon serving",
        "1970-01-01T00:00:02.003Z daemon shrunk job=a lease=1",
        "1970-01-01T00:00:02.005Z a lease 1",
        "1970-01-01T00:00:02.007Z chaos killed",
        f"1970-01-01T00:00:02.010Z a run {70 * MIB} {5 * MIB}",
        "1970-01-01T00:00:02.010Z b run 2 1 0",
        "1970-01-01T00:00:02.020Z a ran 0",
    ]


def test_the_audit_takes_a_killed_job_to_hold_its_bytes_until_then():
    killed = written("1 begins 12", "5 lease 2", f"6 run {60 * MIB} {MIB}")
    assert "130.0 of 100.0 MiB at 10" in problems(a=ONE, b=killed)[0]
    assert problems({12: 11}, a=ONE, b=killed)
    assert not problems({12: 10}, a=ONE, b=killed)


def test_the_audit_sees_lost_leases_errors_and_steps_that_take_more_than_their_plan():
    begin = written("1 begins 11", "5 lease 1", f"10 run {70 * MIB} {5 * MIB}")
    assert "a lost a lease: it had [1, 7]" in problems(a=begin + written("11 lease 7"))
    assert "a ended by 'LostLeaseError'" in problems(a=begin + written("12 error 'LostLeaseError'"))
    assert not problems(a=begin + written(f"12 ran {66 * MIB}"))
    assert problems(a=begin + written(f"12 ran {72 * MIB}")) == ["a took 72.0 MiB beside a plan of 65.0 MiB for a step"]


BROKEN = {
    "frees on EOF": "lost a lease|LostLeaseError",
    "frees the silent": "lost a lease|LostLeaseError",
    "grants before ACK": "MiB of each",
    "keeps no journal": "lost a lease|LostLeaseError",
    "lies": "MiB of each",
    "ends turns on EOF": "MiB of each",
}


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="minutes: JAXTENSILE_SOAK=1")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_coordinator_or_job_is_caught(folder, what):
    broken = {"liars": True} if what == "lies" else {"broken": what}
    found = ""
    for seed in range(1, 11):  # on a busy machine there is less to see in a minute
        (part := folder / str(seed)).mkdir(mode=0o700)
        found = "\n".join(Chaos(part, seed=seed, turns="turns" in what, **broken).run(60.0).audit())
        if re.search(BROKEN[what], found):
            return
    raise AssertionError(found)
