"""Check that a planned program is the original, with ops repeated and reordered.

The original is the program before recomputation: rewrites have been made in it, and are checked by tests against
``jax.jit`` instead.

The check uses the two graphs alone and shares no code with the solvers or with ``emit``. Afterwards every value equals
the original value named by ``version_of``. Effects happen once and in order. Outputs, inputs and donations are the
original ones. So the program computes what the original computes.
"""

from __future__ import annotations

from typing import NoReturn

from jaxtensile.errors import VerifyError
from jaxtensile.ir.ir import Graph, Op, ValueId
from jaxtensile.ir.plan import Program
from jaxtensile.units import Bytes

BARRIER = "optimization_barrier"
COPIES = {"to_host": (("device",), ("host",)), "to_device": (("host",), ("device",))}


def check(graph: Graph, program: Program, on_host: frozenset[ValueId] = frozenset()) -> None:
    """Raise ``VerifyError`` unless ``program`` computes what ``graph`` computes.

    ``on_host``: inputs and outputs that ``graph`` has on the device and the program on the host.
    """
    _check_schedule(program.graph)
    _check_tables(graph, program)
    _check_ends(graph, program, on_host)
    _check_ops(graph, program)
    _check_effects(graph, program)


def _fail(what: str, bound: str) -> NoReturn:
    raise VerifyError(
        f"the planned program is wrong: {what}; {bound}. "
        "This is a bug in jaxtensile, please report it; without a budget the function runs unplanned"
    )


def _check_schedule(graph: Graph) -> None:
    """Check that ids are positions, and that each value is made once, before it is read."""
    for i, value in enumerate(graph.values):
        if value.id != i:
            _fail(f"value {value.id} is at place {i}", "ids are consecutive")
    known = [False] * len(graph.values)

    def make(v: ValueId, where: str) -> None:
        if not 0 <= v < len(known):
            _fail(f"{where} makes value {v}", f"there are {len(known)} values")
        if known[v]:
            _fail(f"{where} makes value {v} a second time", "every value is made once")
        known[v] = True

    def read(v: ValueId, where: str) -> None:
        if not 0 <= v < len(known):
            _fail(f"{where} reads value {v}", f"there are {len(known)} values")
        if not known[v]:
            _fail(f"{where} reads value {v} before it is made", "operands are inputs or results of earlier ops")

    for v in graph.inputs:
        make(v, "the list of inputs")
    for i, op in enumerate(graph.ops):
        where = f"op {op.id} ({op.primitive})"
        if op.id != i:
            _fail(f"{where} is at place {i}", "ids are consecutive")
        for v in op.operands:
            read(v, where)
        if op.slots and tuple(s for s in op.slots if s >= 0) != op.operands:
            _fail(f"{where} has the positions {op.slots}", f"its operands are {op.operands}")
        for v in op.results:
            make(v, where)
    for v in graph.outputs:
        read(v, "the list of outputs")


def _check_tables(graph: Graph, program: Program) -> None:
    """Check that ``origin`` and ``version_of`` are complete and point into the original; versions look alike."""
    if len(program.origin) != len(program.graph.ops):
        _fail(f"{len(program.origin)} origins are given", f"there are {len(program.graph.ops)} ops")
    if len(program.version_of) != len(program.graph.values):
        _fail(f"{len(program.version_of)} versions are given", f"there are {len(program.graph.values)} values")
    for op, o in zip(program.graph.ops, program.origin, strict=True):
        if not -1 <= o < len(graph.ops):
            _fail(f"op {op.id} repeats op {o}", f"the original has {len(graph.ops)} ops")
    for value, v in zip(program.graph.values, program.version_of, strict=True):
        if not 0 <= v < len(graph.values):
            _fail(f"value {value.id} is a version of {v}", f"the original has {len(graph.values)} values")
        old = graph.values[v]
        mine = (value.nbytes, value.shape, value.dtype)
        its = (old.nbytes, old.shape, old.dtype)
        if mine != its:
            _fail(f"value {value.id} is {mine}", f"it is a version of {v}, which is {its}")


def _check_ends(graph: Graph, program: Program, on_host: frozenset[ValueId]) -> None:
    """Check for the same inputs and donations, and equal outputs in order."""
    if program.graph.inputs != graph.inputs:
        _fail(f"its inputs are {program.graph.inputs}", f"the original's are {graph.inputs}")
    for v in graph.inputs:
        if program.version_of[v] != v:
            _fail(f"input {v} is a version of {program.version_of[v]}", "an input is itself")
    if program.graph.donated != graph.donated:
        _fail(f"it donates {sorted(program.graph.donated)}", f"the original donates {sorted(graph.donated)}")
    for v in (*program.graph.inputs, *program.graph.outputs):
        old = graph.values[program.version_of[v]]
        its = "host" if old.id in on_host else old.space
        if program.graph.values[v].space != its:
            _fail(f"value {v} is in {program.graph.values[v].space} memory", f"the original is in {its} memory")
    outputs = tuple(program.version_of[v] for v in program.graph.outputs)
    if outputs != graph.outputs:
        _fail(f"its outputs are versions of {outputs}", f"the original's are {graph.outputs}")


def _check_ops(graph: Graph, program: Program) -> None:
    """Check that every op is an original op on versions of the same values, or changes nothing.

    Only copies move a value to the host and back; other ops find their operands in the original space.
    """

    def versions(values: tuple[ValueId, ...]) -> tuple[int, ...]:
        return tuple(program.version_of[v] for v in values)

    def spaces(of: Graph, values: tuple[ValueId, ...]) -> tuple[str, ...]:
        return tuple(of.values[v].space for v in values)

    for op, o in zip(program.graph.ops, program.origin, strict=True):
        where = f"op {op.id} ({op.primitive})"
        if o < 0:
            if op.primitive not in (BARRIER, *COPIES) or op.bodies or op.pinned or op.flops:
                _fail(f"{where} is new", f"only a plain {BARRIER} and copies may be inserted")
            if versions(op.operands) != versions(op.results):
                _fail(
                    f"{where} turns versions of {versions(op.operands)} into versions of {versions(op.results)}",
                    "what is inserted changes nothing",
                )
            moves = (spaces(program.graph, op.operands), spaces(program.graph, op.results))
            if moves[0] != moves[1] if op.primitive == BARRIER else moves != COPIES[op.primitive]:
                _fail(
                    f"{where} moves values from {moves[0]} to {moves[1]}", f"a barrier moves nothing, copies {COPIES}"
                )
            continue
        old = graph.ops[o]
        if _traits(op) != _traits(old) or op.bodies != old.bodies:
            _fail(f"{where} has {_traits(op)}", f"it repeats op {o}, which has {_traits(old)}")
        if versions(op.operands) != old.operands:
            _fail(
                f"{where} reads versions of {versions(op.operands)}", f"op {o}, which it repeats, reads {old.operands}"
            )
        if tuple(-1 if s < 0 else program.version_of[s] for s in op.slots) != old.slots:
            _fail(f"{where} has the positions {op.slots}", f"op {o}, which it repeats, has {old.slots}")
        if versions(op.results) != old.results:
            _fail(f"{where} makes versions of {versions(op.results)}", f"op {o}, which it repeats, makes {old.results}")
        for mine, its in ((op.operands, old.operands), (op.results, old.results)):
            if spaces(program.graph, mine) != spaces(graph, its):
                _fail(
                    f"{where} works in {spaces(program.graph, mine)}",
                    f"op {o}, which it repeats, in {spaces(graph, its)}",
                )


def _traits(op: Op) -> tuple[str, float, bool, int, tuple[int, int]]:
    return op.primitive, op.flops, op.pinned, op.trip_count, op.carried


def _check_effects(graph: Graph, program: Program) -> None:
    """Check that effects happen as in the original, and that the makers of all outputs are there."""
    before = [op.id for op in graph.ops if op.pinned]
    after = [program.origin[op.id] for op in program.graph.ops if op.pinned]
    if before != after:
        _fail(f"its ops with effects are {after}", f"the original runs {before}, each once and in this order")
    present = set(program.origin)
    for op in graph.ops:
        if op.id not in present and not set(op.results).isdisjoint(graph.outputs):
            _fail(f"op {op.id} ({op.primitive}) never runs", "it makes an output")


def naive_peak(graph: Graph) -> list[Bytes]:
    """Live bytes while each op runs, inputs excluded, without fusion or sharing.

    A value is live from its op to its last reader, at least during its op, and to the end if it is an output. Quadratic
    on purpose; bodies of loops are left out.
    """
    made = {v: op.id for op in graph.ops for v in op.results}
    reads = {v: {op.id for op in graph.ops if v in op.operands} for v in made}
    end = len(graph.ops)
    last = {v: end if v in graph.outputs else max(reads[v], default=made[v]) for v in made}
    profile: list[Bytes] = []
    for i in range(end):
        live = {v for v in made if made[v] <= i <= last[v]}
        profile.append(sum(graph.values[v].nbytes for v in live))
    return profile
