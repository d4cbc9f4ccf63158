"""A schedule under construction: the ops so far, and the versions of values they make.

Invariant: ``origin`` matches ``ops`` and ``version_of`` matches ``values``, as in ``Program``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from jaxtensile.ir.ir import Op, OpId, Value, ValueId

BARRIER: Final = "optimization_barrier"


class Schedule:
    """Scratch of a pass that lays ops out anew; ``now``: the current version of each old value."""

    def __init__(self, values: Sequence[Value], version_of: Sequence[int]) -> None:
        self.values: list[Value] = list(values)
        self.version_of: list[int] = list(version_of)
        self.ops: list[Op] = []
        self.origin: list[int] = []
        self.now: dict[int, int] = {}

    def version(self, v: int, space: str | None = None) -> ValueId:
        """A new value equal to ``v``, in memory ``space`` if given."""
        fresh = cast("ValueId", len(self.values))
        old = self.values[v]
        where = old.space if space is None else space
        self.values.append(Value(id=fresh, nbytes=old.nbytes, shape=old.shape, dtype=old.dtype, space=where))
        self.version_of.append(self.version_of[v])
        return fresh

    def put(self, op: Op, operands: Sequence[int], results: Sequence[int], origin: int) -> None:
        """Append ``op`` on these values; ``origin``: the original op, -1 for none."""
        same = op.id == len(self.ops) and operands is op.operands and results is op.results
        self.ops.append(op if same else op.on(len(self.ops), operands, results))
        self.origin.append(origin)

    def put_barrier(self, operands: Sequence[int]) -> list[ValueId]:
        """Append a barrier; the versions behind it."""
        results = [self.version(v) for v in operands]
        self.put(_named(BARRIER), operands, results, -1)
        return results

    def put_copy(self, primitive: str, operand: int, space: str) -> ValueId:
        """Append a copy to another memory space; the version there."""
        result = self.version(operand, space)
        self.put(_named(primitive), [operand], [result], -1)
        return result


def _named(primitive: str) -> Op:
    return Op(id=OpId(0), primitive=primitive, operands=(), results=())
