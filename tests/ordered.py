"""What a program is like that got barriers and nothing else."""

from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.order.control import CONVOLUTION
from jaxtensile.passes.verify.check import BARRIER


def barriers(before, after):
    """Those that ``after`` has more."""
    there = {op.results for op in before.graph.ops if op.primitive == BARRIER}
    return [op for op in after.graph.ops if op.primitive == BARRIER and op.results not in there]


def same_kernels(before, after):
    """Each kernel once, in its order; the barriers that are new."""
    new, is_root = barriers(before, after), fuse(before.graph).is_root
    assert (after is before) == (not new)
    assert all(len(op.operands) > 1 for op in new)
    kernels = [op.results for op in before.graph.ops if is_root[op.id] or op.pinned]
    assert [op.results for op in after.graph.ops if op.results in set(kernels)] == kernels, "each once, in their order"
    for barrier in new:
        reader = after.graph.ops[barrier.id + 1]
        if reader.primitive == CONVOLUTION and set(barrier.results) <= set(reader.operands):
            continue  # holds its weights: nobody else has to wait
        behind = {v for op in after.graph.ops[barrier.id + 1 :] for v in op.operands} | set(after.graph.outputs)
        assert behind.isdisjoint(barrier.operands), "what is read later comes from behind the barrier"
    return new
