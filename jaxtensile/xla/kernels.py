"""The kernels of a compiled GPU program, in order, with what each reads, writes and multiplies.

The source is XLA's text of the scheduled module. A fused kernel reads only the slices of a sliced or gathered operand,
and only the updated part of one updated in place. Indices of slices are left out.

Invariant: a schedule has the order of launches; loops stay loops.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxtensile.units import Bytes, Flops
from jaxtensile.xla.hlo import CALLED, FREE, Line, axes, dims, nbytes_of, parsed, product

_NAMED = re.compile(r'op_name="([^"]*)"')
_KIND = re.compile(r"kind=k(\w+)")
_EMITTER = re.compile(r'"kind":"([^"]+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_FIRST_LAYOUT = re.compile(r"\(?[^{]*\{([^}]*)\}")
_BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=|false_computation=|, )%([\w.-]+)")
_WIDE = re.compile(r"f32|f64|c64")
_HOST = "S(5)"
"""Mark of pinned host memory in a layout."""
_NO_WORK = (FREE - {"copy-done"}) | {
    "after-all",
    "partition-id",
    "replica-id",
    "fusion-done",
    "optimization-barrier",
    "opt-barrier",
}
_SAME_PLACE = ("bitcast", "copy", "convert")
"""Operations through which an update stays in place."""
ALIGNED = 8
"""Divisor of sizes of 16-bit operands for rows aligned to 16 bytes, which a tensor core's fast loads need."""
FLASH_BACKWARD = 2.5
"""Products of an attention's backward pass per forward product: five against two."""


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of ``rows`` x ``depth`` by ``depth`` x ``columns``. ``wide``: the operands have 32 bits."""

    batch: int
    rows: int
    columns: int
    depth: int
    wide: bool

    @property
    def flops(self) -> Flops:
        return 2.0 * self.batch * self.rows * self.columns * self.depth

    @property
    def aligned(self) -> bool:
        """Whether all sizes above ``ALIGNED``² are multiples of ``ALIGNED``."""
        return not any(n % ALIGNED for n in (self.rows, self.columns, self.depth) if n > ALIGNED**2)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel. ``kind``: product, convolution, attention, tile (a block-level fusion), loop, reduction, transpose,
    scatter, or the opcode. ``reads``: bytes by value. ``source``: the operation it is named after."""

    name: str
    kind: str
    reads: Mapping[str, Bytes]
    written: Bytes
    flops: Flops = 0.0
    products: tuple[Product, ...] = ()
    source: str = ""

    @property
    def wide(self) -> bool:
        return any(p.wide for p in self.products)


@dataclass(frozen=True, slots=True)
class Copying:
    """The start of an asynchronous copy over the link."""

    name: str
    nbytes: Bytes
    to_host: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """A wait for the end of a copy."""

    name: str


@dataclass(frozen=True, slots=True)
class Loop:
    """``trips`` turns of a schedule."""

    trips: int
    body: Schedule


Schedule = tuple["Kernel | Copying | Copied | Loop", ...]


def schedule_of(text: str) -> Schedule:
    """The schedule of a module's entry computation, from its text after scheduling."""
    computations, entry = parsed(text)
    return _Module(computations).schedule(entry)


@dataclass(slots=True)
class _Module:
    computations: Mapping[str, Sequence[Line]]
    inside: dict[str, _Inside] = field(default_factory=dict[str, "_Inside"])

    def schedule(self, name: str) -> Schedule:
        lines = self.computations[name]
        shapes = {line.name: line.shape for line in lines}
        return tuple(step for line in lines if line.opcode not in _NO_WORK for step in self._steps(line, shapes))

    def _steps(self, line: Line, shapes: Mapping[str, str]) -> Iterator[Kernel | Copying | Copied | Loop]:
        called = [c for c in CALLED.findall(line.rest) if c in self.computations]
        if line.opcode == "while":
            yield Loop(line.trips, self.schedule(called[0]))
        elif line.opcode in ("call", "async-start") and called:
            yield from self.schedule(called[0])
        elif line.opcode == "conditional":
            branches = [c for c in _BRANCHES.findall(line.rest) if c in self.computations]
            yield from max((self.schedule(c) for c in branches), key=len, default=())
        elif line.opcode == "copy-start" and _HOST in line.shape:
            layout = _FIRST_LAYOUT.match(line.shape)
            size = max((nbytes_of(shapes[o]) for o in line.operands if o in shapes), default=0)
            yield Copying(line.name, size, layout is not None and _HOST in layout[1])
        elif line.opcode == "copy-done":
            yield Copied(line.operands[0])
        elif not line.opcode.endswith("-done"):
            yield self._kernel(line, shapes)

    def _kernel(self, line: Line, shapes: Mapping[str, str]) -> Kernel:
        operands = [o for o in line.operands if o in shapes]
        reads = {o: nbytes_of(shapes[o]) for o in operands}
        written, kind = nbytes_of(line.shape), line.opcode
        products, flops = (_product(line, shapes),) if line.opcode == "dot" else (), product(line, dict(shapes))
        if line.opcode in ("fusion", "fusion-start"):
            inside = self._of(CALLED.findall(line.rest)[0])
            kind, products, flops, written = inside.kind(line), inside.products, inside.flops, inside.written
            reads = dict.fromkeys(operands, 0)
            for i, o in enumerate(operands):
                reads[o] = min(reads[o] + inside.reads.get(i, 0), nbytes_of(shapes[o]))
        elif line.opcode == "custom-call" and (target := _TARGET.search(line.rest)):
            kind = target[1]
            if "__cublas" in kind:
                kind, products = "product", (_product(line, shapes),)
            elif "conv" in kind.lower():
                kind = "convolution"
            elif "fmha" in kind.lower():
                kind, flops = "attention", _attention(dims(shapes[operands[0]]), "backward" in kind.lower())
        elif line.opcode == "dynamic-update-slice":
            reads, written = {operands[1]: reads[operands[1]]}, reads[operands[1]]
        elif line.opcode == "dynamic-slice":
            reads = {operands[0]: written}
        named = _NAMED.search(line.rest)
        return Kernel(line.name, kind, reads, written, flops, products, named[1] if named else "")

    def _of(self, name: str) -> _Inside:
        if name not in self.inside:
            self.inside[name] = _Inside(self.computations[name])
        return self.inside[name]


class _Inside:
    """One fused computation. ``reads``: bytes of each of its parameters."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.shapes = {line.name: line.shape for line in lines}
        self.full = {line.name: nbytes_of(line.shape) for line in lines}
        self.opcodes = {line.opcode for line in lines}
        self.products = tuple(_product(line, self.shapes) for line in lines if line.opcode == "dot")
        self.flops = sum(product(line, self.shapes) for line in lines)
        self._wanted: dict[str, float] = defaultdict(float)
        updates = {root.name: self._update_in_place(root) for root in self._roots()}
        self._updates = {name: update for name, update in updates.items() if update is not None}
        self.written = sum(self._put(root) for root in self._roots())
        for line in reversed(lines):
            self._want(line)
        self.reads = {
            int(line.rest.partition(")")[0]): int(min(self._wanted[line.name], self.full[line.name]))
            for line in lines
            if line.opcode == "parameter"
        }

    def kind(self, line: Line) -> str:
        emitter, kind = _EMITTER.search(line.rest), _KIND.search(line.rest)
        if self.products:
            return "product"
        if emitter is not None and emitter[1] == "__triton":
            return "tile"
        if "scatter" in self.opcodes:
            return "scatter"
        if kind is not None and kind[1] == "Input":
            return "reduction" if "reduce" in self.opcodes else "transpose"
        return "loop"

    def _roots(self) -> list[Line]:
        by_name, root = {line.name: line for line in self.lines}, self.lines[-1]
        return [by_name[o] for o in root.operands if o in by_name] if root.opcode == "tuple" else [root]

    def _put(self, root: Line) -> Bytes:
        """Bytes that a result writes. For a scatter, the target is read as well."""
        self._wanted[root.name] += self.full[root.name]
        update = self._updates.get(root.name)
        if update is None:
            return self.full[root.name]
        if update.opcode == "scatter":
            return 2 * self.full.get(update.operands[-1], 0)
        return self.full.get(update.operands[1], 0)

    def _update_in_place(self, root: Line) -> Line | None:
        by_name, line = {line.name: line for line in self.lines}, root
        while line.opcode in _SAME_PLACE and line.operands and line.operands[0] in by_name:
            line = by_name[line.operands[0]]
        return line if line.opcode in ("dynamic-update-slice", "scatter") else None

    def _want(self, line: Line) -> None:
        """Add what ``line`` reads for the wanted part of its result."""
        full, wanted = self.full, min(self._wanted[line.name], self.full[line.name])
        operands = [o for o in line.operands if o in full]
        if not wanted or not operands:
            return
        share = wanted / full[line.name]
        in_place = any(line is update for update in self._updates.values())
        first, *others = operands
        match line.opcode:
            case "slice" | "dynamic-slice":
                self._wanted[first] += wanted
            case "gather":
                self._wanted[first] += wanted
                self._wanted[others[0]] += full[others[0]]
            case "dynamic-update-slice" | "scatter":
                put = others[:1] if line.opcode == "dynamic-update-slice" else others
                for o in put:
                    self._wanted[o] += full[o]
                if not in_place:
                    self._wanted[first] += max(wanted - full[put[0]], 0) if put else wanted
            case "pad":
                self._wanted[first] += min(full[first], wanted)
            case "broadcast":
                self._wanted[first] += full[first]
            case "tuple":
                pass
            case _:
                for o in operands:
                    self._wanted[o] += full[o] * share


def _product(line: Line, shapes: Mapping[str, str]) -> Product:
    a, b = (dims(shapes.get(o, "")) for o in line.operands[:2])
    depth, batch = (math.prod(a[i] for i in axes(line, which)) for which in ("contracting", "batch"))
    others = max(depth * batch, 1)
    wide = _WIDE.match(shapes.get(line.operands[0], "")) is not None
    return Product(batch, math.prod(a) // others, math.prod(b) // others, depth, wide)


def _attention(query: Sequence[int], backward: bool) -> Flops:
    """FLOPs of an attention with keys as long as the query, of [batch, heads, length, size] or heads third."""
    length = max(query[1:3], default=1)
    return 4.0 * math.prod(query) * length * (FLASH_BACKWARD if backward else 1.0)


__all__ = ["Copied", "Copying", "Kernel", "Loop", "Product", "Schedule", "schedule_of"]
