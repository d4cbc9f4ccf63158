"""The coordinator and the agents as actors of Ray.

Both are detached: they belong to the cluster, not to who started them. Ray starts them again when their process dies,
the coordinator on any node, an agent on its own. The coordinator makes an agent on every node that is alive.

Invariant: only bytes of ``records`` go between processes. No decision is taken before every living node has said what
it knows, or is dead.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.cluster.agent import Agent, FencedError, environment_of
from jaxtensile.runtime.cluster.coordinator import ClusterCoordinator
from jaxtensile.runtime.cluster.nearby import NAMESPACE, agent_name
from jaxtensile.runtime.cluster.records import Report, Spec, Submitted, Tick, decode, encode
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.units import Seconds

COORDINATOR: Final = "coordinator"
_TICK: Final[Seconds] = 0.25
"""Seconds between two reports of a node, in a small cluster. A guess: what changes is seen within it."""
_TICKS: Final = 400
"""Reports a second, of all nodes: in a large cluster each says less often. A guess: half of one core."""
_LOOK: Final[Seconds] = 0.5
"""Seconds between two looks at Ray's list of nodes. A guess."""
_WAIT: Final[Seconds] = 0.02
"""Seconds that the loop waits for a report. A guess."""
_AGAIN: Final[Seconds] = 0.5
"""Seconds before an agent that failed is asked again: Ray starts it anew meanwhile. A guess."""
_KEPT_WITHIN: Final[Seconds] = 30.0
"""Seconds for a submitted job to be kept by its nodes; then it is confirmed none the less. A guess: a node may be dead
and not known to be."""
CALLS: Final = 32
"""Calls to the coordinator at a time, most of which wait. A guess."""


def ray() -> Any:
    """Ray. Raises ``CoordinatorError`` if it is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        raise CoordinatorError("Ray is not installed here: pip install 'jaxtensile[ray]'") from None


class AgentActor:
    """``Agent`` as an actor."""

    def __init__(self, node: str) -> None:
        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        address = ray().util.get_node_ip_address()
        self._agent = Agent(node, address, environment_of(raylet), raylet)

    def tick(self, data: bytes) -> bytes:
        """As ``Agent.tick``; empty: another coordinator has taken over."""
        try:
            return encode(self._agent.tick(decode(data, Tick)))
        except FencedError:
            return b""

    def output(self, job: str, attempt: int, offset: int) -> tuple[int, bytes]:
        """As ``Agent.output``."""
        return self._agent.output(job, attempt, offset)

    def socket(self) -> str:
        """As ``Agent.socket``."""
        return self._agent.socket

    def pid(self) -> int:
        """Its process."""
        return os.getpid()


class CoordinatorActor:
    """``ClusterCoordinator`` as an actor, with the thread that speaks to the agents."""

    def __init__(self, rules: bytes) -> None:
        self._ray = ray()
        self._coordinator = ClusterCoordinator(decode(rules, Rules))
        self._changed = threading.Condition()
        """Guards the coordinator."""
        self._ready = False
        self._ids: dict[str, str] = {}
        """Ray's number of each node, by its name here."""
        self._agents: dict[str, Any] = {}
        self._asked: dict[Any, tuple[str, Tick]] = {}
        self._due: dict[str, Seconds] = {}
        self._stopped = False
        threading.Thread(target=self._run, name="jaxtensile-cluster", daemon=True).start()

    # What is asked.

    def submit(self, specs: Sequence[bytes]) -> None:
        """Jobs; confirmed once their nodes keep them."""
        names = [spec.job for spec in (decode(data, Spec) for data in specs)]
        with self._changed:
            self._when_ready()
            for data in specs:
                self._coordinator.submit(decode(data, Spec), time.monotonic())
            self._changed.wait_for(lambda: all(map(self._coordinator.is_kept, names)), _KEPT_WITHIN)

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs."""
        with self._changed:
            self._when_ready()
            for job in jobs:
                self._coordinator.cancel(job, time.monotonic())

    def jobs(self, jobs: Sequence[str] | None = None) -> bytes:
        """Their ``Submitted``."""
        with self._changed:
            self._when_ready()
            return encode(Submitted(self._coordinator.jobs(jobs), self._coordinator.tasks(jobs)))

    def nodes(self) -> list[tuple[str, bytes]]:
        """Ray's number and the last report of each node."""
        with self._changed:
            self._when_ready()
            return [(self._ids.get(r.node, ""), encode(r)) for r in self._coordinator.nodes()]

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def _when_ready(self) -> None:
        self._changed.wait_for(lambda: self._ready or self._stopped)
        if self._stopped:
            raise CoordinatorError("another coordinator of the cluster has taken over: ask again")

    # The loop.

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # Ray starts it again, and it asks the agents

    def _work(self) -> None:
        self._recover()
        looked = 0.0
        while not self._stopped:
            now = time.monotonic()
            if now >= looked + _LOOK:
                looked = now
                self._look(now)
            self._ask(now)
            self._hear()

    def _recover(self) -> None:
        """Ask every living node for all that it knows."""
        found: dict[str, Report] = {}
        asked: dict[str, Any] = {}
        while True:
            self._seen()
            for name in self._ids.keys() - found.keys() - asked.keys():
                asked[name] = self._agent(name).tick.remote(encode(Tick(epoch=0, everything=True)))
            for name, ref in [*asked.items()]:
                ready, _ = self._ray.wait([ref], timeout=_WAIT)
                if ready:
                    del asked[name]
                    report = self._said(name, ref)
                    if report is not None:
                        found[name] = report
            if self._ids and self._ids.keys() <= found.keys():
                break
            time.sleep(_WAIT)
        with self._changed:
            self._coordinator.recover([found[name] for name in self._ids], time.monotonic())
            self._ready = True
            self._changed.notify_all()

    def _seen(self) -> set[str]:
        """Look at Ray's list of nodes; returns those that have gone."""
        there = {
            f"{n['NodeManagerHostname']}-{n['NodeID'][:8]}": str(n["NodeID"]) for n in self._ray.nodes() if n["Alive"]
        }
        gone = self._ids.keys() - there.keys()
        self._ids = there
        return set(gone)

    def _look(self, now: Seconds) -> None:
        gone = self._seen()
        for name in gone:
            self._agents.pop(name, None)
            self._due.pop(name, None)
        with self._changed:
            for name in gone:
                self._coordinator.lost(name, now)
            self._coordinator.decide(now)

    def _agent(self, name: str) -> Any:
        """The agent of a node, made if it is not there."""
        if name not in self._agents:
            node = self._ids[name]
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            made = self._ray.remote(AgentActor).options(
                name=agent_name(node),
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=affinity,
            )
            self._agents[name] = made.remote(name)
        return self._agents[name]

    def _ask(self, now: Seconds) -> None:
        """Tell the nodes whose turn it is what they are to do."""
        waiting = {name for name, _ in self._asked.values()}
        every = max(_TICK, len(self._ids) / _TICKS)
        for name in self._ids:
            if name in waiting or now < self._due.get(name, 0.0):
                continue
            self._due[name] = now + every
            with self._changed:
                tick = self._coordinator.orders(name)
            self._asked[self._agent(name).tick.remote(encode(tick))] = name, tick

    def _hear(self) -> None:
        if not self._asked:
            return time.sleep(_WAIT)
        ready, _ = self._ray.wait([*self._asked], num_returns=len(self._asked), timeout=_WAIT)
        heard = [(*self._asked.pop(ref), ref) for ref in ready]
        with self._changed:
            now = time.monotonic()
            for name, tick, ref in heard:
                report = self._said(name, ref)
                if report is not None and name in self._ids:
                    self._coordinator.told(name, tick)
                    self._coordinator.report(report, now)
            if heard:
                self._coordinator.decide(now)
                for name, _, _ in heard:
                    if self._coordinator.has_orders(name):
                        self._due[name] = 0.0
                self._changed.notify_all()

    def _said(self, name: str, ref: Any) -> Report | None:
        """An agent's report; None: it has failed, and is asked again later."""
        try:
            data = self._ray.get(ref)
        except self._ray.exceptions.RayError:
            self._agents.pop(name, None)
            self._due[name] = time.monotonic() + _AGAIN
            return None
        if not data:
            self._stopped = True
            return None
        return decode(data, Report)
