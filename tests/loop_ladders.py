"""How the loops of a program may be planned, priced as the tests price it."""

from jaxtensile.devices.profiles import profile
from jaxtensile.passes.offload.loops import LoopLadder
from jaxtensile.passes.seconds.cost import op_costs

DEVICE = profile("nvidia-h200")


def ladder(graph, link=None):
    return LoopLadder(
        graph,
        lambda body: op_costs(body, DEVICE).charge,
        link,
        lambda body: op_costs(body, DEVICE).seconds,
    )
