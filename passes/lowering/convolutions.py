"""How cuDNN takes the operands of convolutions, and what it does on the way.

* Images are channels last or first, by type and GPU (``HeuristicLayoutAssignment`` in
  ``xla/service/gpu/transforms/layout_assignment.cc``), filters have their outputs first. What a program is given in
  another order is transposed once, for all its convolutions; what it computes is made in that order.
* The gradient of the images takes the filter as it is, not reversed.
* Biases, one array that is there before, and a ``relu`` are added and taken in the same call, if nobody else reads what
  comes between (``CudnnFusedConvRewriter``).

Measured on small networks for an H200 and an A100, jax 0.12 (docs/xla.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxtensile.ir.ir import Graph, Op, ValueId
from jaxtensile.switches import on

CONVOLUTION: Final = "conv_general_dilated"
LAST_BEFORE_8: Final = frozenset({"float16"})
LAST_FROM_8: Final = LAST_BEFORE_8 | {"bfloat16"}
LAST_FROM_9: Final = LAST_FROM_8 | {"float32"}
"""Types of images that are taken channels last, by compute capability."""
_IMAGES: Final = 4
"""Axes of what may be taken so."""


class Convolutions:
    """The convolutions of a graph. ``added``: by convolution, the array that is added in the call. ``ends``: by op that
    is done in a call, what it would read. ``gradients``: those with a reversed filter; cuDNN has a kernel that dilates
    such by itself. ``channels_last``: types of images that are taken so; None: by another library, which reads what it
    is given.
    """

    def __init__(
        self, graph: Graph, made: Sequence[int], read_by: Sequence[Sequence[int]], channels_last: frozenset[str] | None
    ) -> None:
        self._graph, self._made, self._read_by, self._last = graph, made, read_by, channels_last or frozenset[str]()
        self._inputs = frozenset(graph.inputs)
        self._ordered = channels_last is not None and on("ordered_convolutions")
        found = [op for op in graph.ops if op.primitive == CONVOLUTION]
        self.gradients = {op.id for op in found if len(op.operands) > 1 and self._reversed(op.operands[1]) is not None}
        self.added: dict[int, ValueId] = {}
        self.ends: dict[int, ValueId] = {}
        for op in found if channels_last is not None and on("fused_convolutions") else ():
            if op.id not in self.gradients and not op.turned:
                self._end(op)

    def operands(self, op: Op) -> tuple[ValueId, ...]:
        """What the call for ``op`` reads."""
        more = (self.added[op.id],) if op.id in self.added else ()
        if len(op.operands) < 2 or not self._ordered:
            return (*op.operands, *more)
        image, filter, *others = op.operands
        before = self._reversed(filter)
        if before is not None and any(self._is_filtered(o, before) for o in self._read_by[before]):
            filter = before
        return (image, filter, *others, *more)

    def out_of_order(self, op: Op) -> list[ValueId]:
        """Operands of ``op`` that the program is given in another order."""
        if len(op.operands) < 2 or not self._ordered:
            return []
        (image, filter), (of_image, of_filter) = op.operands[:2], op.across or ((), ())
        kind = self._graph.values[image]
        rank = len(kind.shape)
        inner = tuple(range(1, rank - 1))
        gradient = of_image in ((rank - 1, *inner, 0), (*range(1, rank), 0))
        """Of a filter, whose features are its batch."""
        last = kind.dtype in self._last and rank == _IMAGES
        wrong = ((0, *range(2, rank), 1), (*range(1, rank), 0)) if last else ((), (rank - 1, *inner, 0))
        found = [image] if of_image in wrong else []
        return [v for v in (*found, *([] if of_filter or gradient else [filter])) if v in self._inputs]

    def _reversed(self, v: int) -> ValueId | None:
        """What ``v`` is the reverse of, if it is one."""
        op = self._graph.ops[self._made[v]] if self._made[v] >= 0 else None
        return op.operands[0] if op is not None and op.primitive == "rev" and op.operands else None

    def _is_filtered(self, o: int, v: int) -> bool:
        """Whether op ``o`` convolves by ``v``."""
        op = self._graph.ops[o]
        return op.primitive == CONVOLUTION and v in op.operands[1:2]

    def _end(self, op: Op) -> None:
        """Find what is done in the call for ``op``."""
        v = op.results[0]
        while v not in self._graph.outputs and len(self._read_by[v]) == 1:
            reader = self._graph.ops[self._read_by[v][0]]
            others = [o for o in reader.operands if o != v]
            if reader.primitive == "add" and len(others) == 1:
                if not self._is_spread(others[0]):
                    if op.id in self.added or not self._is_there(op, others[0]):
                        return
                    self.added[op.id] = others[0]
            elif reader.primitive != "max" or others:
                return
            self.ends[reader.id] = v
            if reader.primitive == "max":
                return
            v = reader.results[0]

    def _is_spread(self, v: int) -> bool:
        """Whether ``v`` repeats something smaller, such as biases."""
        return self._made[v] >= 0 and self._graph.ops[self._made[v]].primitive == "broadcast_in_dim"

    def _is_there(self, op: Op, v: int) -> bool:
        """Whether ``v``, like the result of ``op``, is there before it."""
        values, result = self._graph.values, op.results[0]
        alike = (values[v].shape, values[v].dtype) == (values[result].shape, values[result].dtype)
        return alike and self._made[v] < op.id
