"""A client says the right things in the right order, from whatever thread, to a coordinator in the same process."""

import os
import subprocess
import sys
import threading
import time
from collections import deque

import pytest

from jaxtensile.errors import CoordinatorError, LostLeaseError, NotAdmittedError, RejectedError, UnreachableError
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.socket_link import SocketLink
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.daemon.inquiry import Inquirer
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import (
    CapacityChanged,
    Close,
    Connected,
    Disconnected,
    Received,
    Restarted,
    Send,
    Settings,
)
from jaxtensile.runtime.decide.leases import HOST, Process, State
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Ack, Admit, Beat, Error, Rung

GPU = "cuda:0"
LADDER = (Rung(persistent=4, seconds=2.0), Rung(persistent=8, seconds=1.0))
WAIT = 30.0


class Office:
    """A coordinator in this process: what is said to it is answered before ``send`` returns, to whomever it is."""

    def __init__(self, capacity=12, gated=False):
        device = Capacity(capacity=capacity, gated=gated)
        self.it = Coordinator({GPU: device, HOST: Capacity(capacity=8)}, Settings(min_hold=0.0))
        self.it.handle(Restarted(journal.replay([]), "boot"), time.monotonic())
        self.lock = threading.Lock()
        self.lines = {}
        self.mail = deque()
        self.carrying = threading.Lock()
        self.number = 0
        self.said = []
        self.slow = False
        """What is said to clients does not come through for now."""

    def link(self, client):
        link = OfficeLink(self, client)
        link.connect()
        return link

    def tell(self, *events):
        with self.lock:
            self.said += [e.message for e in events if isinstance(e, Received)]
            for command in self.it.handle_all(events, time.monotonic()):
                if isinstance(command, Send) and command.connection in self.lines:
                    self.mail.append((self.lines[command.connection], command.message))
                elif isinstance(command, Close):
                    self.lines.pop(command.connection, None)
        if not self.slow:
            self.carry()

    def carry(self):
        while self.mail and self.carrying.acquire(blocking=False):
            try:
                while self.mail:
                    client, message = self.mail.popleft()
                    client.heard(message)
            finally:
                self.carrying.release()

    def client(self, job, **given):
        return Client(Admit(job=job, devices=(GPU,), ladder=given.pop("ladder", LADDER), **given), self.link)

    def leases(self):
        return {a.job: a for a in self.it.arbiter.leases.values()}

    def charged(self):
        return self.it.arbiter.ledger.accounts[GPU].used


class OfficeLink:
    def __init__(self, office, client):
        self.office, self.client = office, client

    def connect(self):
        line = OfficeLine(self.office)
        self.line = line
        self.office.lines[line.number] = self.client
        self.office.tell(Connected(line.number, Process(1, 1)))
        self.client.connected(line)

    def hang_up(self):
        self.line.open = False
        self.office.lines.pop(self.line.number, None)
        self.office.tell(Disconnected(self.line.number))
        self.client.disconnected("hung up")

    def close(self):
        self.office.carry()
        self.hang_up()
        if not self.client.done:
            self.connect()


class OfficeLine:
    def __init__(self, office):
        office.number += 1
        self.office, self.number, self.open = office, office.number, True

    def send(self, requests):
        if self.open:
            self.office.tell(*(Received(self.number, r) for r in requests))


def test_a_job_alone_is_admitted_works_and_is_gone():
    office = Office()
    client = office.client("a")
    assert client.wait() == 1 and client.admitted and office.charged() == 8
    assert client.boundary() is None
    assert client.release() and office.charged() == 0 and not office.it.arbiter.leases
    assert client.rung == -1 and client.done


def test_jobs_make_room_for_each_other_at_their_boundaries():
    office, heard = Office(capacity=9), []
    first = Client(Admit(job="a", devices=(GPU,), ladder=LADDER), office.link, changed=lambda: heard.append("a"))
    assert first.wait() == 1
    before = len(heard)
    second = office.client("b")
    with pytest.raises(NotAdmittedError, match=r"'b' was not admitted within 0\.01 s, 0 others before it"):
        second.wait(0.01)
    assert len(heard) > before and first.target == 0 and not second.admitted
    assert first.boundary() == 0 and first.boundary() is None
    assert office.charged() == 8
    first.moved((4, 0))
    assert second.wait(WAIT) == 0 and office.charged() == 8
    assert second.release()
    assert first.boundary() == 1
    first.moved()
    assert office.leases()["a"].state is State.HELD and office.charged() == 8


def test_what_was_measured_goes_with_the_next_pulse():
    office = Office()
    client = office.client("a")
    client.wait()
    client.beat(7, 0.25, (5, 1), 6)
    assert not [m for m in office.said if isinstance(m, Beat)]
    client.pulse()
    lease = office.leases()["a"]
    assert (lease.step, lease.step_us, lease.peak) == (7, 250_000, 6)
    assert [m.in_use for m in office.said if isinstance(m, Beat)] == [(5, 1)]


def test_a_job_that_can_never_be_admitted_is_told_why():
    client = Office().client("a", ladder=(Rung(persistent=99, seconds=1.0),))
    with pytest.raises(RejectedError, match="'a' was refused: the smallest plan needs 99B on cuda:0"):
        client.wait()


def test_a_job_that_lost_its_connection_stays_where_it_is_until_it_is_granted_again():
    office = Office(capacity=9)
    first = office.client("a")
    first.wait()
    second = office.client("b")
    assert first.target == 0
    first._link.hang_up()
    assert first.boundary() is None and first.rung == first.target == 1 and not first.connected_now
    assert office.leases()["a"].state is State.QUARANTINED and office.charged() == 8
    first._link.connect()
    assert first.boundary() == 0
    first.moved((4,))
    assert second.wait(WAIT) == 0


def test_a_release_that_got_lost_is_said_again_as_it_was():
    """Not with what was measured while the job still held it."""
    office = Office()
    client = office.client("a")
    client.wait()
    client.beat(7, 0.25, (5, 1), 6)
    client.pulse()
    client._link.hang_up()
    client.give_back()
    client._link.connect()
    assert client.release() and office.charged() == 0


def test_a_wait_for_a_turn_ends_when_the_job_is_told_to_move_if_it_moves():
    ladder = (Rung(persistent=2, temp=2, seconds=2.0), Rung(persistent=2, temp=6, seconds=1.0))
    office = Office(gated=True)
    a, b = (office.client(job, ladder=ladder) for job in "ab")
    assert a.wait() == b.wait() == 1 and a.takes_turns and a.turn(0.0) and not b.turn(0.0)
    c = office.client("c", ladder=(Rung(persistent=4, temp=2, seconds=1.0),), floor=0)
    assert not c.admitted and b.due and b.target == 0

    began = time.monotonic()
    assert not b.turn(0.3, moves=False) and time.monotonic() - began >= 0.3
    began = time.monotonic()
    assert not b.turn(WAIT) and time.monotonic() - began < WAIT
    b.boundary()
    b.moved()
    a.end_turn()
    assert b.turn(WAIT)


def test_a_wait_for_a_turn_ends_with_the_lease():
    office = Office(gated=True)
    a, b = (office.client(job, ladder=(Rung(persistent=2, temp=6, seconds=1.0),)) for job in "ab")
    a.wait(), b.wait()
    assert a.turn(0.0) and not b.turn(0.0)
    b.heard(Error(code="unknown lease", detail="there is no lease 2", lease=2))
    with pytest.raises(LostLeaseError, match="'b' is not known any more"):
        b.turn(WAIT, moves=False)
    b.close()


def test_a_lease_that_nobody_knows_any_more_ends_the_job_with_an_error():
    office = Office()
    client = office.client("a")
    client.wait()
    client.heard(Error(code="unknown lease", detail="there is no lease 1", lease=1))
    with pytest.raises(LostLeaseError, match=r"'a' is not known any more \(there is no lease 1\)"):
        client.boundary()


def test_a_client_that_is_refused_says_so_instead_of_waiting():
    office = Office()
    client = office.client("a")
    client.heard(Error(code="version", detail="say HELLO with version 2 first"))
    with pytest.raises(CoordinatorError, match="refuses to speak with this client: say HELLO with version 2"):
        client.boundary()
    assert client.done


def test_a_waiter_that_gives_up_leaves_nothing_behind_even_if_it_was_just_granted():
    office = Office(capacity=9)
    first = office.client("a", want=7)
    second = office.client("b", want=7)
    third = office.client("c", want=7)
    assert first.wait() == second.wait() == 0 and "c" in office.leases()
    third.close()
    assert third.done and "c" not in office.leases()
    fourth = office.client("d", want=7)
    office.slow = True
    office.tell(CapacityChanged({GPU: Capacity(capacity=13), HOST: Capacity(capacity=8)}))
    assert office.leases()["d"].state is State.HELD and not fourth.admitted  # granted, and it does not know
    office.slow = False
    fourth.close()
    assert "d" not in office.leases() and office.charged() == 8 and fourth.done


def test_nobody_there_is_an_error_after_some_patience():
    class Nowhere:
        def __init__(self, client):
            client.unreachable("nothing there")

        def close(self):
            pass

    client = Client(Admit(job="a", devices=(GPU,), ladder=LADDER), Nowhere, patience=0.05)
    said = r"job 'a' for 0 s \(nothing there\), and a job without a lease waits 0.05 s at most: start one"
    with pytest.raises(UnreachableError, match=said):
        client.wait()


def test_many_threads_and_one_order():
    """Eight jobs in threads of one process push each other up and down; nothing is overcommitted or lost."""
    office, admitted, done = Office(capacity=32), set(), []

    def job(k):
        ladder = tuple(Rung(persistent=4 + 4 * n, seconds=4.0 / (n + 1)) for n in range(4))
        for turn in range(6):
            client = office.client(f"job {k}", ladder=ladder, weight=1.0 + (k + turn) % 3)
            client.wait(WAIT)
            admitted.add(k)
            step = 0
            while step < 40 or len(admitted) < 8:  # in the first turn all of them are there at once
                step += 1
                if client.boundary() is not None:
                    client.moved()
                client.beat(step, 0.001)
                client.pulse()
                with office.lock:
                    assert office.charged() <= 32
            assert client.release(timeout=WAIT)
        done.append(k)

    threads = [threading.Thread(target=job, args=(k,), daemon=True) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT * 4)
    assert sorted(done) == list(range(8)) and office.charged() == 0 and not office.it.arbiter.leases
    assert any(isinstance(m, Ack) for m in office.said)
    assert office.it.counters["refused"] == 0


FAKE = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
os.setuid(65534)
server.listen()
print("listens", flush=True)
while True:
    server.accept()[0].close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")
def test_what_another_user_listens_on_is_not_spoken_to(tmp_path):
    """At the default place, anyone could have been first."""
    path = tmp_path / "fake.sock"
    with subprocess.Popen([sys.executable, "-c", FAKE, str(path)], stdout=subprocess.PIPE, text=True) as fake:
        assert fake.stdout.readline() == "listens\n"
        with pytest.raises(UnreachableError, match="is user 65534's, not user 0's"):
            Inquirer(path)
        admit = Admit(job="a", devices=("cpu:0",), ladder=(Rung(persistent=8, seconds=1.0),))
        client = Client(admit, SocketLink.to(str(path)))
        with pytest.raises(CoordinatorError, match="is user 65534's, not user 0's"):
            client.wait(30)
        fake.kill()
