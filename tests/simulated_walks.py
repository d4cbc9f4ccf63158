"""Random mixes of jobs on random machines, simulated and audited after every event."""

from random import Random

from jaxtensile.runtime.decide.events import OBJECTIVES, Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.runtime.simulate.audit import Audit, everything_is_free
from jaxtensile.runtime.simulate.jobs import Job
from jaxtensile.runtime.simulate.simulation import Node, Simulation


def random_ladder(rnd):
    """Rungs of a few bytes, some with copies and host bytes."""
    count, stays, base = rnd.randint(1, 4), rnd.randint(1, 5), rnd.uniform(0.02, 1.0)
    rungs = []
    for k, temp in enumerate(sorted(rnd.sample(range(1, 16), count))):
        seconds = base * (1 + 0.2 * (count - k))
        into, out = (rnd.choice((0, rnd.random())) * seconds for _ in range(2))
        host = rnd.choice((0, 0, 3))
        wait = rnd.choice((0.0, 0.3)) * max(into, out)
        rungs.append(Rung(persistent=stays, temp=temp, seconds=seconds, wait=wait, into=into, out=out, host=host))
    return tuple(rungs)


def random_simulation(seed):
    """Machines and jobs that are killed, stop, compile, keep bytes, take turns, come and go."""
    rnd = Random(seed)
    threads = rnd.random() < 0.3
    gated = threads or rnd.random() < 0.7
    devices = [f"gpu:{k}" for k in range(rnd.choice((1, 1, 2, 3)))]
    capacities = {d: Capacity(capacity=rnd.randint(20, 60), reserve=rnd.choice((0, 2)), gated=gated) for d in devices}
    capacities[HOST] = Capacity(capacity=rnd.randint(0, 60))
    node = Node(capacities=capacities, threads=threads, shared_link=rnd.random() < 0.3)
    machines = rnd.choice((1, 1, 2))
    settings = Settings(
        policy=rnd.choice(OBJECTIVES),
        lease_ttl=rnd.choice((float("inf"), 5.0)),
        min_hold=rnd.choice((0.0, 1.0, 30.0)),
        revoke_deadline=rnd.choice((4.0, 60.0)),
        on_overdue=rnd.choice(("wait", "wait", "terminate")),
    )
    jobs = []
    for k in range(rnd.randint(2, 9)):
        named = machines == 1 and rnd.random() < 0.5
        jobs.append(
            Job(
                name=f"job{k}",
                ladder=random_ladder(rnd),
                steps=rnd.randint(1, 30),
                arrives=rnd.uniform(0, 10),
                starts=rnd.choice((0.0, 1.0)),
                compiles=rnd.choice((0.0, 0.5, 3.0)),
                gives=rnd.choice((0.0, 0.01, 0.5)),
                takes=rnd.choice((0.0, 0.01)),
                # In turns, what an allocator keeps is seen after the first, and may be more than there is.
                keeps=not gated and rnd.random() < 0.15,
                killed=rnd.uniform(0.1, 20) if rnd.random() < 0.2 else None,
                stops=((rnd.uniform(0, 10), rnd.choice((1.0, 9.0))),) if rnd.random() < 0.2 else (),
                devices=tuple(rnd.sample(devices, rnd.randint(1, len(devices)))) if named else (),
                count=rnd.randint(1, len(devices)),
                priority=rnd.choice((0, 0, 1)),
                weight=rnd.choice((1.0, 1.0, 2.0)),
                groups=rnd.choice((1, 1, 4)) if threads else 1,
            )
        )
    audit = Audit()
    nodes = {f"machine{k}": node for k in range(machines)}
    it = Simulation(nodes, settings, check=audit, placement=Rules(refuse_after=5.0)).add(jobs)
    return it, audit


def walk(seed):
    """The simulation of a seed, run to its end: everybody has ended, and all is free."""
    it, audit = random_simulation(seed)
    it.run()
    everything_is_free(it)
    return it, audit
