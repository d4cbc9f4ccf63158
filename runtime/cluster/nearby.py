"""The coordinator of this machine, for a process of Ray: the agent of the cluster names its socket."""

from __future__ import annotations

import sys
from typing import Any, Final

from jaxtensile.errors import UnreachableError
from jaxtensile.units import Seconds

NAMESPACE: Final = "jaxtensile"
"""Of the cluster's actors in Ray."""
_ANSWERS: Final[Seconds] = 10.0
"""Seconds for the agent to answer: Ray starts one anew in a few. A guess."""


def agent_name(node_id: str) -> str:
    """The name of the agent on a node, by Ray's number of it."""
    return f"agent-{node_id}"


def socket_nearby() -> str | None:
    """The socket of the coordinator on this machine, for a task, an actor or a driver of Ray; None: the process is none
    of these, or the cluster has no agents. Raises ``UnreachableError`` if there is one that does not answer."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    node = ray.get_runtime_context().get_node_id()
    try:
        agent = ray.get_actor(agent_name(node), namespace=NAMESPACE)
    except ValueError:
        return None
    try:
        return ray.get(agent.socket.remote(), timeout=_ANSWERS)
    except ray.exceptions.RayError as error:
        raise UnreachableError(
            f"the agent of this machine does not answer ({type(error).__name__}), so its coordinator is not known: see "
            "'ray status', or name the coordinator's socket by $JAXTENSILE_SOCKET"
        ) from None
