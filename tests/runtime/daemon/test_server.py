"""The daemon in a process of its own, over real sockets, with everything that can go wrong.

What can go wrong, and the tests of it; those of ``test_coordinator`` are of the model, ``test_chaos`` of all at once:

| fault | tests |
|---|---|
| a client is killed, after any message or inside one | test_a_client_that_is_killed_after_any_message_leaves_nothing, \
    test_a_killed_job_is_freed_by_its_death_and_never_before |
| a connection ends and its process does not | test_the_end_of_a_connection_is_not_the_end_of_a_job |
| a client is stopped, or its step never ends | test_a_stopped_job_keeps_its_bytes_and_others_go_on, \
    test_a_step_that_never_ends_is_overdue_and_its_process_ends_only_where_that_was_asked_for |
| the daemon is killed, at any line | test_a_killed_daemon_is_started_again_and_no_lease_is_lost, \
    test_jobs_never_grow_while_the_daemon_is_gone_and_who_died_meanwhile_is_freed, \
    test_while_it_recovers_nothing_is_granted_but_to_those_that_come_back, \
    test_who_does_not_come_back_is_not_waited_for_and_stays_charged, \
    test_coordinator.test_every_invariant_holds_on_random_walks, \
    test_chaos.test_whoever_is_killed_nothing_is_overcommitted_or_lost_and_all_losses_are_the_same |
| two daemons, a stale socket, a lock or socket that was removed | \
    test_of_two_daemons_the_lock_decides_and_a_stale_socket_is_taken_over, \
    test_a_socket_file_that_was_removed_is_made_again_and_connections_go_on, \
    test_a_daemon_whose_lock_was_removed_and_taken_by_another_ends |
| frames that are partial, split, merged, oversized or malformed; absurd numbers | \
    test_messages_in_pieces_and_together_are_the_same_messages, \
    test_bytes_that_are_no_message_end_that_connection_alone |
| a reader that is slow, a client that is silent | \
    test_a_reader_that_does_not_read_is_disconnected_and_quarantined, test_who_says_nothing_is_disconnected, \
    test_who_asks_much_at_once_is_answered_a_few_at_a_time_and_all_of_it, \
    test_a_stopped_job_keeps_its_bytes_and_others_go_on |
| a thousand connects at once, no descriptors | test_a_thousand_connections_at_once_are_served, \
    test_beyond_the_most_clients_and_out_of_descriptors_one_is_asked_to_come_again |
| another user, another's lease, a stale token | test_another_user_is_refused, \
    test_metrics_are_served_on_request_and_on_this_machine_only, \
    test_what_is_anothers_or_stale_is_refused_counted_and_changes_nothing |
| the journal's disk is full, the journal is broken or gone | \
    test_with_a_full_disk_nothing_is_granted_and_what_gives_back_goes_on, \
    test_a_journal_that_is_broken_before_its_end_stops_the_daemon_with_the_way_out, \
    test_a_journal_of_another_boot_is_thrown_away_and_a_torn_line_is_left_out, \
    test_a_journal_that_was_removed_is_written_again |
| the config is broken, or capacity is lowered | \
    test_a_lowered_capacity_is_drained_never_overcommitted_and_a_broken_config_changes_nothing |
| a ladder lies, an allocator never gives back | \
    test_a_ladder_that_lies_is_found_out_and_an_allocator_that_keeps_bytes_shrinks_no_more |
"""

import json
import os
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import msgpack, structs

from daemons import GPU, LADDER, LIMIT, Child, Daemon, Wire, until
from jaxtensile.errors import LostLeaseError, RejectedError
from jaxtensile.runtime.daemon import peers
from jaxtensile.runtime.daemon.endpoint import Endpoint, PlaceError, socket_path
from jaxtensile.runtime.decide.journal import Freed, decode, encode
from jaxtensile.runtime.decide.leases import Process
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    Beat,
    Error,
    Grant,
    Hello,
    Queued,
    Reclaim,
    Reject,
    Release,
    Released,
    Revoke,
    Rung,
    Snapshot,
    Status,
    Token,
)
from jaxtensile.runtime.protocol.wire import frame
from paths import TESTS


@pytest.fixture(scope="module")
def shared():
    """One daemon for the tests that leave nothing behind."""
    with Daemon(capacity=12) as daemon:
        yield daemon
        assert daemon.process.poll() is None, daemon.log()


@pytest.fixture
def daemon(shared):
    yield shared
    until(lambda: not shared.snapshot().leases)
    assert shared.charged() == 0


# Jobs.


def test_jobs_of_several_processes_share_a_device(daemon):
    with Child(daemon, "a") as one:
        assert one.rung() == 1
        with Child(daemon, "b", 6, 9) as other:
            assert one.rung() == 0 and other.rung() == 0
            assert daemon.charged() == 10 and set(daemon.states().values()) == {"held"}
        assert one.rung() == 1
        assert until(lambda: daemon.leases()["a"].step > 3)


def test_one_process_has_several_jobs_and_a_waiter_gives_up(daemon):
    first = daemon.client("a", want=7)
    second = daemon.client("b", ladder=LADDER[1:])
    assert first.wait(LIMIT) == second.wait(LIMIT) == 0
    third = daemon.client("c", ladder=LADDER[1:])
    until(lambda: daemon.states().get("c") == "queued")
    third.close()
    until(lambda: "c" not in daemon.states())
    assert second.release() and first.release() and daemon.charged() == 0


def test_what_can_never_be_granted_is_refused_with_the_reason(daemon):
    with pytest.raises(RejectedError, match="the smallest plan needs 99B on cuda:0, which can ever grant 12B"):
        daemon.client("a", ladder=(Rung(persistent=99, seconds=1.0),)).wait(LIMIT)


def test_a_thousand_leases_are_told_in_pages(daemon):
    wire = Wire(daemon.path)
    wire.say(
        *(
            Admit(job=f"{'long name ' * 12}{k}", devices=(GPU,), ladder=(Rung(persistent=0, seconds=1.0),))
            for k in range(1000)
        )
    )
    until(lambda: len(daemon.snapshot().leases) == 1000)
    wire.say(Status())
    page = wire.hear(Snapshot)
    assert page.more and 0 < len(page.leases) <= 64
    wire.say(*(Release(lease=a.lease, token=Token(0, 0)) for a in daemon.snapshot().leases))
    until(lambda: not daemon.snapshot().leases)
    wire.close()


# What clients do, and what becomes of the rest.


def test_a_killed_job_is_freed_by_its_death_and_never_before(daemon):
    with Child(daemon, "a", 8, 9) as one:
        assert one.rung() == 1
        waiting = daemon.client("b", ladder=LADDER[1:])
        until(lambda: daemon.states().get("b") == "queued")
        one.send(signal.SIGKILL)
        assert waiting.wait(LIMIT) == 0
        assert "a" not in daemon.states() and waiting.release()
    until(lambda: "its process died" in daemon.log())


KILLED = """
import os, socket, sys, time
from jaxtensile.runtime.protocol.messages import *
from jaxtensile.runtime.protocol.wire import REPLIES, frame, take
path, ladder = sys.argv[1], (Rung(persistent=4, seconds=2.0), Rung(persistent=8, seconds=1.0))
lease, token, rest, link = 1, Token(1, 1), b"", None
def connect(_):
    global link
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
def say(make):
    link.sendall(frame(make()))
def hear(kind):
    global rest, lease, token
    while True:
        taken = take(rest + link.recv(1 << 16), REPLIES)
        rest = taken.rest
        for m in taken.messages:
            if isinstance(m, (Grant, Revoke)):
                lease, token = m.lease, m.token
            if isinstance(m, kind):
                return
STEPS = [
    (connect, None),
    (say, lambda: Hello(version=VERSION)), (hear, Welcome),
    (say, lambda: Admit(job="killed", devices=("cuda:0",), ladder=ladder)), (hear, Grant),
    (say, lambda: Beat(lease=lease, step=1, step_us=1, in_use=(), peak=0)),
    (say, lambda: Status()), (hear, Snapshot),
    (say, lambda: Renew(lease=lease, token=token, ladder=ladder[:1], rung=0, floor=0, want=9, in_use=())),
    (hear, Renewed),
    (connect, None), (say, lambda: Hello(version=VERSION)),
    (say, lambda: Reclaim(lease=lease, token=token, rung=0, in_use=())), (hear, Grant),
    (say, lambda: Ack(lease=lease, token=token, rung=0, in_use=())),
    (say, lambda: Release(lease=lease, token=token)), (hear, Released),
]
print(len(STEPS), flush=True)
for line in sys.stdin:  # so many of them, and half a frame
    read, write = os.pipe()
    if not (pid := os.fork()):
        for do, what in STEPS[:int(line)]:
            do(what)
        if link is not None:
            link.sendall(frame(Status())[:3])
        os.write(write, b"x")
        time.sleep(3600)
    os.read(read, 1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    print("killed", flush=True)
"""


def test_a_client_that_is_killed_after_any_message_leaves_nothing(daemon):
    script = [sys.executable, "-c", KILLED, str(daemon.path)]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ends = int(process.stdout.readline())
        for steps in range(ends + 1):
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n", steps
            until(lambda: not daemon.snapshot().leases)
            assert daemon.charged() == 0
        process.stdin.close()
    assert daemon.snapshot().phase == "serving"


def test_the_end_of_a_connection_is_not_the_end_of_a_job(daemon):
    wire = Wire(daemon.path)
    grant = wire.admit()
    wire.close()
    until(lambda: daemon.states() == {"a": "quarantined"})
    assert daemon.charged() == 8
    again = Wire(daemon.path)
    again.say(Reclaim(lease=grant.lease, token=grant.token, rung=grant.rung, in_use=(8, 0)))
    back = again.hear(Grant)
    assert back.lease == grant.lease and back.token > grant.token and daemon.states() == {"a": "held"}
    again.say(Release(lease=grant.lease, token=back.token))
    assert again.hear(Released)


def test_a_stopped_job_keeps_its_bytes_and_others_go_on():
    with Daemon(capacity=14, lease_ttl="4s", revoke_deadline="300ms") as daemon, Child(daemon, "a", 4, 12) as one:
        assert one.rung() == 1
        one.send(signal.SIGSTOP)
        with Child(daemon, "b", 4, 5):
            until(lambda: "overdue" in daemon.log())  # asked for room, and not heard of
            until(lambda: daemon.states()["a"] == "quarantined")
            assert daemon.charged() == 12 and daemon.states()["b"] == "queued"
            small = daemon.client("small", ladder=(Rung(persistent=2, seconds=1.0),), priority=1)
            assert small.wait(LIMIT) == 0 and small.release()
            one.send(signal.SIGCONT)
            assert one.rung() == 0
            until(lambda: daemon.states() == {"a": "held", "b": "held"})
            assert daemon.charged() <= 14


def test_a_step_that_never_ends_is_overdue_and_its_process_ends_only_where_that_was_asked_for():
    with Daemon(capacity=9, revoke_deadline="200ms") as daemon:
        wire, other = Wire(daemon.path), Wire(daemon.path)
        assert wire.admit("a").rung == 1
        assert isinstance(other.admit("b"), Queued)
        assert wire.hear(Revoke).rung == 0
        until(lambda: daemon.states() == {"a": "overdue", "b": "queued"})
        assert daemon.charged() == 8
    given = {"capacity": 14, "revoke_deadline": "200ms", "on_overdue": "terminate"}
    with Daemon(None, "--grace", "0.5", **given) as daemon, Child(daemon, "a", 4, 12) as one:
        assert one.rung() == 1
        one.send(signal.SIGSTOP)  # a SIGTERM is not enough then
        waiting = daemon.client("b", ladder=LADDER[1:])
        assert waiting.wait(LIMIT) == 0
        assert one.process.wait(LIMIT) in (-signal.SIGTERM, -signal.SIGKILL)
        assert waiting.release()


BYTES = {
    "a frame over the limit": (1 << 20).to_bytes(4, "big") + b"x" * 100,
    "no message": (5).to_bytes(4, "big") + b"hello",
    "an empty frame": bytes(4),
    "an unknown field": b"\0\0\0\x12" + msgpack.encode({"type": "STATUS", "mor": 1}),
    "absurd numbers": frame(Admit(job="a", devices=(GPU,), ladder=(Rung(persistent=1 << 61, seconds=1.0),))),
    "a time that is none": frame(Admit(job="a", devices=(GPU,), ladder=(Rung(persistent=1, seconds=float("nan")),))),
    "negative bytes": frame(Ack(lease=1, token=Token(1, 1), rung=0, in_use=(-5,))),
    "text": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("what", BYTES)
def test_bytes_that_are_no_message_end_that_connection_alone(daemon, what):
    good, bad = Wire(daemon.path), Wire(daemon.path)
    grant = good.admit("good")
    bad.socket.sendall(BYTES[what])
    answer = bad.hear()
    assert isinstance(answer, Error) and answer.code == "protocol" and bad.hear() is None
    good.say(Release(lease=grant.lease, token=grant.token))
    assert good.hear(Released)


def test_messages_in_pieces_and_together_are_the_same_messages(daemon):
    wire = Wire(daemon.path, hello=False)
    data = frame(Hello(version=VERSION)) + frame(Admit(job="a", devices=(GPU,), ladder=LADDER))
    for k in range(len(data)):
        wire.socket.sendall(data[k : k + 1])
    grant = wire.hear(Grant)
    release = frame(Release(lease=grant.lease, token=grant.token))
    wire.socket.sendall(frame(Status()) + release + frame(Status())[:3])
    assert isinstance(wire.hear(Snapshot), Snapshot) and wire.hear(Released)
    wire.close()


def test_who_does_not_say_hello_first_or_in_another_version_is_refused(daemon):
    for message, code in ((Status(), "protocol"), (Hello(version=99), "version")):
        wire = Wire(daemon.path, hello=False)
        wire.say(message)
        answer = wire.hear()
        assert (answer.code, answer.detail) == (code, f"say HELLO with version {VERSION} first") and wire.hear() is None


@pytest.fixture(scope="module")
def impatient():
    """A daemon whose ten seconds are shorter."""
    shorter = (
        "import sys; from jaxtensile.runtime.daemon import server; server.HELLO_WITHIN = server.READ_WITHIN = 0.1\n"
    )
    daemon = Daemon()
    daemon.program = "-c", shorter + "from jaxtensile.cli.main import main; sys.exit(main())"
    with daemon:
        yield daemon


def test_a_reader_that_does_not_read_is_disconnected_and_quarantined(impatient):
    """It is not heard while its answers wait, so that neither its questions nor they pile up."""
    wire = Wire(impatient.path)
    grant = wire.admit()
    wire.socket.settimeout(0.05)
    ask, sent = frame(Status()) * 200, 0
    with pytest.raises(ConnectionError):
        for _ in range(10_000):
            with suppress(TimeoutError):
                sent += wire.socket.send(ask[sent % len(ask) :])
    wire.close()
    until(lambda: impatient.states().get("a") == "quarantined")
    assert impatient.snapshot().counters["slow"] == 1
    again = Wire(impatient.path)
    again.say(Release(lease=grant.lease, token=grant.token))
    assert again.hear(Released)


def test_who_says_nothing_is_disconnected(impatient):
    wire, silent, half = Wire(impatient.path), Wire(impatient.path, hello=False), Wire(impatient.path, hello=False)
    half.socket.sendall(frame(Hello(version=VERSION))[:-1])
    assert silent.hear() is None and half.hear() is None
    assert wire.admit().rung == 1


def test_who_asks_much_at_once_is_answered_a_few_at_a_time_and_all_of_it(daemon):
    """Also what is said before an end that does not wait for the answers."""
    wire, asked = Wire(daemon.path), 3000
    grant = wire.admit()
    sender = threading.Thread(target=wire.say, args=[Status()] * asked)
    sender.start()
    assert all(isinstance(wire.hear(), Snapshot) for _ in range(asked))
    sender.join()
    wire.say(*[Status()] * 1000, Release(lease=grant.lease, token=grant.token))
    wire.close()
    until(lambda: not daemon.states())


def test_what_is_anothers_or_stale_is_refused_counted_and_changes_nothing(daemon):
    before = daemon.snapshot().counters
    with Child(daemon, "a") as one:
        assert one.rung() == 1
        lease = daemon.leases()["a"].lease
        wire = Wire(daemon.path)
        for message in (
            Reclaim(lease=lease, token=Token(1, 1), rung=0, in_use=()),
            Release(lease=lease, token=Token(1, 1)),
        ):
            wire.say(message)
            assert wire.hear(Error).code == "not yours"
        wire.say(Ack(lease=lease, token=Token(1, 1), rung=0, in_use=()))
        wire.say(Beat(lease=lease, step=1, step_us=1, in_use=(12,), peak=12), Status())
        assert wire.hear(Snapshot) and daemon.charged() == 8 and daemon.states() == {"a": "held"}
        own = wire.admit("b", ladder=(Rung(persistent=1, seconds=1.0),))
        wire.say(Ack(lease=own.lease, token=Token(0, 0), rung=0, in_use=()))
        wire.say(Release(lease=own.lease, token=own.token))
        assert wire.hear(Released)
        after = daemon.snapshot().counters
        assert after["not yours"] == before.get("not yours", 0) + 2
        assert after["stale"] == before.get("stale", 0) + 3
    wire.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused():
    with Daemon() as daemon:
        for path, mode in ((daemon.folder, 0o755), (daemon.path, 0o666)):  # even if somebody opened the doors
            path.chmod(mode)
        say = (
            "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
            f"s.connect({str(daemon.path)!r}); print(s.recv(4096))"
        )
        said = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, timeout=LIMIT, check=True)
        assert "user 65534 may not use the coordinator of user 0" in said.stdout
        assert daemon.snapshot().counters["wrong user"] == 1


def test_a_ladder_that_lies_is_found_out_and_an_allocator_that_keeps_bytes_shrinks_no_more(daemon):
    with subprocess.Popen(
        [sys.executable, "-c", LIAR, str(daemon.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as liar:
        said = json.loads(liar.stdout.readline())
        assert said == {"rung": 0}
        until(lambda: daemon.leases()["liar"].faults)
        lease = daemon.leases()["liar"]
        assert lease.charged[0] == 7 and lease.faults == ("holds more than it was granted",)
        assert daemon.charged() == 7
        until(lambda: "alarm job=liar" in daemon.log())
        liar.stdin.write("release\n")
        liar.stdin.flush()
        assert json.loads(liar.stdout.readline()) == {"released": False}
        assert daemon.charged() == 7  # what its allocator keeps
    until(lambda: not daemon.snapshot().leases)


LIAR = """
import json, sys
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.client.socket_link import SocketLink
admit = Admit(job="liar", devices=("cuda:0",), ladder=(Rung(persistent=4, seconds=1.0),))
client = Client(admit, SocketLink.to(sys.argv[1]))
print(json.dumps({"rung": client.wait(60)}), flush=True)
client.beat(1, 0.1, (7, 0), 7)
client.pulse()
sys.stdin.readline()
print(json.dumps({"released": client.release((7, 0))}), flush=True)
"""


# The daemon's own end, and its next beginning.


def test_a_killed_daemon_is_started_again_and_no_lease_is_lost():
    with Daemon(capacity=17) as daemon, Child(daemon, "a", 4, 8) as one, Child(daemon, "b", 4, 8) as other:
        assert {one.rung(), other.rung()} == {1}
        before = daemon.leases()
        daemon.kill()
        daemon.start()
        until(lambda: daemon.snapshot().phase == "serving")
        assert until(lambda: set(daemon.states().values()) == {"held"} and daemon.charged() == 16)
        after = daemon.leases()
        assert {j: a.lease for j, a in after.items()} == {j: a.lease for j, a in before.items()}
        assert daemon.snapshot().epoch == 2
        assert one.process.poll() is None and other.process.poll() is None


def test_jobs_never_grow_while_the_daemon_is_gone_and_who_died_meanwhile_is_freed():
    with Daemon(capacity=9) as daemon, Child(daemon, "a", 4, 8) as one:
        assert one.rung() == 1
        with Child(daemon, "b", 4, 5) as other:
            assert one.rung() == 0 and other.rung() in (0, 1)
            daemon.kill()
            other.send(signal.SIGKILL)
            other.process.wait()
        time.sleep(0.3)
        daemon.start()
        assert one.rung() == 1 and daemon.states() == {"a": "held"}


def test_while_it_recovers_nothing_is_granted_but_to_those_that_come_back():
    with Daemon(capacity=8) as daemon:
        wire = Wire(daemon.path)
        grant = wire.admit("a")
        assert grant.rung == 1
        daemon.kill()
        daemon.start()
        assert daemon.snapshot().phase == "recovering" and daemon.states() == {"a": "quarantined"}
        other = Wire(daemon.path)
        other.say(Admit(job="b", devices=(GPU,), ladder=LADDER[:1]))
        again = Wire(daemon.path)
        again.say(Reclaim(lease=grant.lease, token=grant.token, rung=1, in_use=()))
        back = again.hear()
        assert back.lease == grant.lease and back.token.epoch == 2 and daemon.charged() <= 8
        if isinstance(back, Grant):
            back = again.hear(Revoke)
        again.say(Ack(lease=back.lease, token=back.token, rung=0, in_use=()))
        assert other.hear(Grant).rung == 0 and daemon.charged() == 8


def test_who_does_not_come_back_is_not_waited_for_and_stays_charged():
    with Daemon(capacity=12) as daemon:
        wire = Wire(daemon.path)
        assert wire.admit("a").rung == 1
        daemon.kill()
        daemon.start()
        assert daemon.snapshot().phase == "recovering"
        client = daemon.client("b", ladder=LADDER[:1])
        assert client.wait(LIMIT) == 0
        assert daemon.snapshot().phase == "serving" and daemon.charged() == 12
        assert daemon.states() == {"a": "quarantined", "b": "held"} and client.release()


def test_a_journal_of_another_boot_is_thrown_away_and_a_torn_line_is_left_out():
    with Daemon(capacity=8) as daemon:
        wire = Wire(daemon.path)
        wire.admit("a")
        daemon.kill()
        journal = daemon.path.with_name("s.journal")
        journal.write_bytes(journal.read_bytes() + encode(Freed(lease=1))[:-2])
        daemon.start()
        assert daemon.states() == {"a": "quarantined"} and daemon.charged() == 8
        daemon.kill()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        opened, *others = decode(journal.read_bytes())
        assert opened.boot_id == boot
        records = [structs.replace(opened, boot_id="another"), *others]
        journal.write_bytes(b"".join(map(encode, records)))
        daemon.start()
        assert daemon.states() == {} and daemon.charged() == 0 and daemon.snapshot().epoch == 3
        client = daemon.client("b")
        assert client.wait(LIMIT) == 1 and client.release()


def test_a_job_whose_lease_nobody_knows_any_more_is_told():
    with Daemon(capacity=8) as daemon:
        client = daemon.client("a")
        client.wait(LIMIT)
        daemon.kill()
        daemon.path.with_name("s.journal").unlink()
        daemon.start()

        def told():
            try:
                client.boundary()
            except LostLeaseError:
                return True

        assert until(told)


def test_a_journal_that_is_broken_before_its_end_stops_the_daemon_with_the_way_out():
    with Daemon() as daemon:
        daemon.kill()
        daemon.path.with_name("s.journal").write_text("nonsense\n{}\n")
        daemon.start(wait=False)
        assert daemon.process.wait(LIMIT) == 2
        assert "line 1 of the journal is no record" in daemon.log() and "Traceback" not in daemon.log()


def test_of_two_daemons_the_lock_decides_and_a_stale_socket_is_taken_over():
    with Daemon() as daemon:
        first = daemon.process
        daemon.start(wait=False)
        assert daemon.process.wait(LIMIT) == 2
        assert f"process {first.pid} coordinates at {daemon.path} already" in daemon.log()
        daemon.process = first
        assert daemon.snapshot().epoch == 1
        daemon.kill()
        assert stat.S_ISSOCK(daemon.path.stat().st_mode)  # stale
        daemon.start()
        assert daemon.snapshot().epoch == 2


def test_a_socket_file_that_was_removed_is_made_again_and_connections_go_on():
    with Daemon() as daemon:
        wire = Wire(daemon.path)
        grant = wire.admit()
        daemon.path.unlink()
        until(lambda: daemon.path.exists())
        until(daemon.answers)
        assert daemon.states() == {"a": "held"} and daemon.snapshot().epoch == 1
        wire.say(Release(lease=grant.lease, token=grant.token))
        assert wire.hear(Released)


def test_a_daemon_whose_lock_was_removed_and_taken_by_another_ends():
    with Daemon() as daemon:
        wire = Wire(daemon.path)
        grant = wire.admit()
        first = daemon.process
        daemon.process.send_signal(signal.SIGSTOP)
        daemon.path.with_name("s.lock").unlink()
        daemon.start()
        assert daemon.process is not first and daemon.snapshot().epoch == 2
        first.send_signal(signal.SIGCONT)
        assert first.wait(LIMIT) == 0 and "displaced" in daemon.log()
        assert daemon.path.exists() and daemon.charged() == 8
        assert wire.hear() is None
        again = Wire(daemon.path)
        again.say(Reclaim(lease=grant.lease, token=grant.token, rung=1, in_use=()))
        assert again.hear(Grant)


def test_a_journal_that_was_removed_is_written_again():
    with Daemon(capacity=8) as daemon:
        client = daemon.client("a")
        client.wait(LIMIT)
        daemon.path.with_name("s.journal").unlink()
        until(lambda: daemon.path.with_name("s.journal").exists())
        daemon.kill()
        daemon.start()
        until(lambda: daemon.states() == {"a": "held"})
        assert client.release()


def test_with_a_full_disk_nothing_is_granted_and_what_gives_back_goes_on():
    with Daemon(capacity=12) as daemon:
        wire = Wire(daemon.path)
        first = wire.admit("a", want=7)
        second = wire.admit("b", want=7)
        assert daemon.charged() == 8
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        other = Wire(daemon.path)
        other.say(Admit(job="c", devices=(GPU,), ladder=LADDER[:1]))
        until(lambda: daemon.snapshot().counters.get("journal errors"))  # not in the log: that is a file too
        other.say(Status())
        assert isinstance(other.hear(), Snapshot)  # no grant before it
        wire.say(Release(lease=first.lease, token=first.token))
        wire.say(Beat(lease=second.lease, step=3, step_us=1, in_use=(4, 0), peak=4), Status())
        assert {a.job: a.step for a in wire.hear().leases}["b"] == 3
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert other.hear(Grant).job == "c" and wire.hear(Released).lease == first.lease
        daemon.kill()
        daemon.start()
        assert daemon.states() == {"b": "quarantined", "c": "quarantined"}


def test_the_end_is_graceful_waiters_are_refused_and_leases_are_on_record():
    with Daemon(None, "--grace", "30", capacity=9) as daemon:
        wire, other = Wire(daemon.path), Wire(daemon.path)
        grant = wire.admit("a")
        other.admit("b", ladder=LADDER[1:])
        daemon.process.send_signal(signal.SIGTERM)
        assert other.hear(Reject).reason == "the coordinator is stopping"
        assert daemon.snapshot().phase == "draining"
        late = Wire(daemon.path)
        late.say(Admit(job="late", devices=(GPU,), ladder=LADDER))
        assert isinstance(late.hear(), Reject)
        wire.say(Release(lease=grant.lease, token=grant.token))
        assert wire.hear(Released)
        assert daemon.process.wait(LIMIT) == 0 and not daemon.path.exists() and "stopped leases=0" in daemon.log()
    with Daemon(None, "--grace", "0.2") as daemon, Child(daemon, "a") as one:
        assert one.rung() == 1
        assert daemon.kill(signal.SIGTERM) == 0 and "stopped leases=1" in daemon.log()
        daemon.start()
        until(lambda: daemon.states() == {"a": "held"})


# The config.


def test_a_lowered_capacity_is_drained_never_overcommitted_and_a_broken_config_changes_nothing():
    with Daemon(capacity=16) as daemon, Child(daemon, "a", 4, 8) as one, Child(daemon, "b", 4, 8) as other:
        assert one.rung() == other.rung() == 1
        daemon.file.write_text("[coordinator]\npolicy = 'best'\n")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "config_kept" in daemon.log())
        assert f"{daemon.file}:2: coordinator.policy = 'best': must be slowdown, fair" in daemon.log()
        assert daemon.snapshot().policy == "slowdown" and daemon.charged() == 16
        daemon.configure(capacity=13)
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: daemon.charged() == 12)
        until(lambda: "revoked" in daemon.log())
        daemon.configure(capacity=16)
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: daemon.charged() == 16)


# Many.


def test_a_thousand_connections_at_once_are_served():
    with Daemon(capacity=1 << 20) as daemon:
        wires = [Wire(daemon.path, hello=False) for _ in range(1000)]
        for k, wire in enumerate(wires):
            wire.say(Hello(version=VERSION), Admit(job=f"job {k}", devices=(GPU,), ladder=LADDER))
        assert {wire.hear(Grant).job for wire in wires} == {f"job {k}" for k in range(1000)}
        assert daemon.charged() == 8000
        for wire in wires:
            wire.close()
        until(lambda: set(daemon.states().values()) == {"quarantined"})


def test_beyond_the_most_clients_and_out_of_descriptors_one_is_asked_to_come_again():
    with Daemon(max_clients=3) as daemon:
        wires = [Wire(daemon.path) for _ in range(3)]
        extra = Wire(daemon.path, hello=False)
        answer = extra.hear(Error)
        assert answer.code == "busy" and answer.retry_after == 1.0 and extra.hear() is None
        wires.pop().close()
        until(daemon.answers)
    with Daemon(limits={resource.RLIMIT_NOFILE: 40}) as daemon:
        wires = [Wire(daemon.path, hello=False) for _ in range(60)]
        answers = []
        for wire in wires:
            with suppress(BrokenPipeError):
                wire.say(Hello(version=VERSION))
            answers.append(wire.hear())
        busy = [a for a in answers if isinstance(a, Error)]
        assert 0 < len(busy) < 60 and {(a.code, a.retry_after) for a in busy} == {("busy", 1.0)}
        for wire in wires:
            wire.close()
        client = daemon.client("a")
        assert client.wait(LIMIT) == 1 and client.release()


def test_a_client_that_was_refused_for_now_comes_again_by_itself():
    with Daemon(max_clients=1) as daemon:
        wire = Wire(daemon.path)
        client = daemon.client("a")
        until(lambda: "busy" in str(client._why) or not client.connected_now)
        wire.close()
        assert client.wait(LIMIT) == 1 and client.release()


# The place, the peers, and what is told.


def test_only_the_user_can_reach_the_socket(daemon):
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (daemon.folder, daemon.path)}
    assert [*modes.values()] == [0o700, 0o600]
    for name in ("s.journal", "s.lock"):
        assert stat.S_IMODE((daemon.folder / name).stat().st_mode) == 0o600


def test_a_place_that_others_could_reach_or_that_is_none_is_an_error(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PlaceError, match=rf"{tmp_path} has mode 0755, .* 'chmod 700 {tmp_path}'"):
        Endpoint(tmp_path / "s").take()
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("precious")
    place = Endpoint(tmp_path / "file")
    place.take()
    with pytest.raises(PlaceError, match="is there and no socket"):
        place.bind()
    assert (tmp_path / "file").read_text() == "precious"
    place.leave()
    long = "/tmp/" + "x" * 120
    with pytest.raises(PlaceError, match="has 125 bytes, 107 at most are possible"):
        Endpoint(Path(long))
    with pytest.raises(PlaceError, match="has 125 bytes"):
        socket_path(long, {}, None, 0)
    for arguments, path in (
        (("/o", {"JAXTENSILE_SOCKET": "/e"}, "/c", 7), "/o"),
        ((None, {"JAXTENSILE_SOCKET": "/e"}, "/c", 7), "/e"),
        ((None, {}, "/c", 7), "/c"),
        ((None, {"XDG_RUNTIME_DIR": "/run/user/7"}, None, 7), "/run/user/7/jaxtensile/coordinator.sock"),
        ((None, {}, None, 7), "/tmp/jaxtensile-7/coordinator.sock"),
    ):
        assert str(socket_path(*arguments)) == path


@pytest.mark.parametrize("option", [peers.SO_PEERPIDFD, 9999])
def test_a_peer_is_known_by_its_pid_and_start_and_its_death_is_told(option):
    """With the kernel's own pidfd of a socket, and where it has none."""
    here, there = socket.socketpair()
    pid, uid = peers.credentials(here)
    assert (pid, uid) == (os.getpid(), os.getuid())
    pidfd = peers.peer_pidfd(here, pid, option)
    assert not peers.has_died(pidfd)
    os.close(pidfd)
    there.close()
    here.close()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert peers.started(child.pid) >= peers.started(os.getpid())
    pidfd = peers.open_pidfd(child.pid)
    child.communicate()
    assert peers.has_died(pidfd)
    os.close(pidfd)
    with pytest.raises(peers.Dead):
        peers.started(child.pid)


def test_a_pid_that_is_used_again_is_another_process():
    watched = peers.Watched(select.epoll())
    me = Process(os.getpid(), peers.started(os.getpid()))
    assert watched.watch(me) and len(watched) == 1
    assert not watched.watch(Process(me.pid, me.started - 1)) and len(watched) == 1
    watched.close()


def test_metrics_are_served_on_request_and_on_this_machine_only():
    large = 123_456_789_012
    with Daemon(None, "--metrics", "0", capacity=large) as daemon, Child(daemon, 'a "job"', 4, 8) as one:
        assert one.rung() == 1
        until(lambda: daemon.leases()['a "job"'].step)
        port = int(next(word for word in daemon.log().split() if word.startswith("metrics=")).partition("=")[2])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = response.read().decode()
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert rows['jaxtensile_capacity_bytes{device="cuda:0"}'] == str(large)
        assert rows['jaxtensile_charged_bytes{device="cuda:0"}'] == "8"
        assert rows['jaxtensile_leases{state="held"}'] == "1" and rows['jaxtensile_phase{phase="serving"}'] == "1"
        (step,) = [float(v) for k, v in rows.items() if k.startswith('jaxtensile_job_step{job="a \\"job\\""')]
        assert step >= 1
        for bad, code in ((b"POST / HTTP/1.1\r\n\r\n", b"405"), (b"GET /x HTTP/1.1\r\n\r\n", b"404")):
            with socket.create_connection(("127.0.0.1", port), LIMIT) as link:
                link.sendall(bad)
                assert link.recv(4096).split()[1] == code
        silent = [socket.create_connection(("127.0.0.1", port), LIMIT) for _ in range(100)]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as response:
            assert b"jaxtensile_capacity_bytes" in response.read()
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < len(silent) // 2 and silent[0].recv(1) == b""


def test_the_daemon_is_small_and_idles():
    with Daemon() as daemon:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        (kilobytes,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        assert kilobytes * 1024 < 50e6
        maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "numpy" not in maps and "jaxlib" not in maps

        def ticks():
            fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        before, began = ticks(), time.monotonic()
        time.sleep(3.0)
        spent = (ticks() - before) / os.sysconf("SC_CLK_TCK")
        assert spent / (time.monotonic() - began) < 0.02


TELLS_COLLECTIONS = """
import gc, sys
gc.callbacks.append(lambda phase, found: print(phase, found["generation"], file=sys.stderr, flush=True))
from jaxtensile.cli.main import main
sys.exit(main())
"""


def test_garbage_is_collected_while_nobody_waits_and_never_in_a_decision():
    daemon = Daemon()
    daemon.program = ("-c", TELLS_COLLECTIONS)
    with daemon:
        with Child(daemon, "a") as one:
            assert one.rung() == 1
        assert until(lambda: "start 2" in daemon.log().rpartition("listening")[2].partition("stop 2")[2])
        told = [line for line in daemon.log().rpartition("listening")[2].splitlines() if line.startswith("start ")]
        assert {*told} == {"start 2"}  # nothing is collected by itself


def test_every_fault_has_tests_that_are_there():
    rows = [row for row in __doc__.replace("\\\n", "").splitlines() if row.startswith("| ")][1:]
    names = {row: re.findall(r"(?:(test_\w+)\.)?(test_\w+)(?=[ ,])", row.split("|")[2] + " ") for row in rows}
    assert len(rows) == 12
    for row, found in names.items():
        assert found, row
        for file, test in found:
            source = (next(TESTS.rglob(f"{file}.py")) if file else Path(__file__)).read_text()
            assert f"\ndef {test}(" in source, test
