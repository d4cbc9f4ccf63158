"""A coordinator that is told one thing at a time, for tests."""

from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import (
    Compact,
    Connected,
    Received,
    Record,
    Restarted,
    Send,
    Settings,
    Tick,
)
from jaxtensile.runtime.decide.leases import HOST, Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    Hello,
    Rung,
)

GPU = "cuda:0"
LADDER = (Rung(persistent=4, seconds=2.0), Rung(persistent=8, seconds=1.0))


class Talk:
    """A coordinator with 12 bytes on one device, and what it said to whom."""

    def __init__(self, *, capacity=12, host=8, gated=False, records=(), rules=None, **given):
        self.now = 100.0
        options = {"min_hold": 0.0, "recovery": 2.0, **given}
        self.capacities = {GPU: Capacity(capacity=capacity, gated=gated), HOST: Capacity(capacity=host)}
        self.it = Coordinator(self.capacities, Settings(**options), rules)
        self.commands = []
        self.journal = [*records]
        self.do(Restarted(journal.replay(records, "boot"), "boot"))

    def do(self, *events):
        """What it does about events; the journal follows."""
        self.commands = self.it.handle_all(events, self.now)
        for command in self.commands:
            if isinstance(command, Record):
                self.journal.append(command.record)
            elif isinstance(command, Compact):
                self.journal = [*command.records]
        return self.commands

    def said(self, kind=object, to=None):
        """Messages of a kind in the last commands."""
        sends = [c for c in self.commands if isinstance(c, Send) and (to is None or c.connection == to)]
        return [c.message for c in sends if isinstance(c.message, kind)]

    def hear(self, connection, *messages):
        for message in messages:
            self.do(Received(connection, message))
        return self.said(to=connection)

    def meet(self, connection, process=None):
        self.do(Connected(connection, process or Process(connection, 1)))
        return self.hear(connection, Hello(version=VERSION))

    def admit(self, connection, job="a", ladder=LADDER, **given):
        """A new process asks to be admitted; its grant, or what was said instead."""
        self.meet(connection)
        answers = self.hear(connection, Admit(job=job, devices=(GPU,), ladder=ladder, **given))
        return answers[-1]

    def ack(self, connection, told, in_use=()):
        return self.hear(connection, Ack(lease=told.lease, token=told.token, rung=told.rung, in_use=in_use))

    def lease(self, number):
        return self.it.arbiter.leases[number]

    def charged(self, name=GPU):
        return self.it.arbiter.ledger.accounts[name].used

    def tick(self, seconds):
        self.now += seconds
        return self.do(Tick())
