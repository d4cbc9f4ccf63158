"""Read a compiled program's HLO text: its products, and what XLA recomputes to save bytes.

Products count 2 FLOPs per multiply-add: those in fusions, cuBLAS and cuDNN calls, and loop bodies times trip count.
Products that became something else (a reduction, a fused attention) are missing, so compare only compiles of the same
step.

XLA:GPU recomputes above about 0.76 of its device, XLA:TPU above all of it. Both name recomputed instructions
``…remat``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.ir.plan import NOTHING_AGAIN, Recomputed
from jaxtensile.passes.seconds.cost import COPY_SHARE, MATMUL_SHARE
from jaxtensile.units import Bytes, Flops, Seconds

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_WIDTH = re.compile(r"[a-z]+(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_OPERAND = re.compile(r"%([\w.-]+)")
_AGAIN = re.compile(r"\.remat\d*(?:\.|$)")
FREE = frozenset({"get-tuple-element", "tuple", "bitcast", "parameter", "constant", "copy-done"})
"""Opcodes that compute nothing."""


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return _OPERAND.findall(self.rest.partition(")")[0])

    @property
    def trips(self) -> int:
        """How often its body runs."""
        return int(found[1]) if self.opcode == "while" and (found := _TRIPS.search(self.rest)) else 1

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        return CALLED.findall(self.rest) if self.opcode in ("fusion", "call", "while", "async-start") else []


def hlo_flops(text: str) -> Flops:
    """FLOPs of the entry computation of an HLO module's text."""
    computations, entry = parsed(text)
    return _flops(computations)(entry)


def recomputed(text: str, device: DeviceProfile) -> Recomputed:
    """XLA's own recomputation; an instruction takes the longer of its products and its traffic."""
    if ".remat" not in text:
        return NOTHING_AGAIN
    computations, entry = parsed(text)
    flops = _flops(computations)
    bandwidth = device.reached("memory_bandwidth", COPY_SHARE)

    def repeats(line: Line, shapes: dict[str, str]) -> tuple[Flops, Seconds]:
        products = product(line, shapes) + sum(flops(c) for c in line.called if c in computations)
        rate = "matmul_flops_f32" if re.search(r"\b(?:f32|f64|c64)\[", line.shape) else "matmul_flops_bf16"
        traffic = nbytes_of(line.shape) + sum(nbytes_of(shapes.get(name, "")) for name in line.operands)
        seconds = max(products / device.reached(rate, MATMUL_SHARE), traffic / bandwidth)
        return products, device.kernel_launch + seconds

    def total(name: str) -> tuple[int, Flops, Seconds]:
        shapes = {line.name: line.shape for line in computations[name]}
        count, products, seconds = 0, 0.0, 0.0
        for line in computations[name]:
            if line.opcode not in FREE and _AGAIN.search(line.name):
                again, took = repeats(line, shapes)
                count, products, seconds = count + 1, products + again, seconds + took
            elif line.opcode != "fusion":
                for c in line.called:
                    more, again, took = total(c) if c in computations else (0, 0.0, 0.0)
                    count += more
                    products, seconds = products + line.trips * again, seconds + line.trips * took
        return count, products, seconds

    return Recomputed(*total(entry))


def parsed(text: str) -> tuple[dict[str, list[Line]], str]:
    """The computations of a module, and the name of its entry."""
    computations: dict[str, list[Line]] = {}
    entry, lines = "", list[Line]()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations.setdefault(head[1], [])
            entry = head[1] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            lines.append(Line(found[1], found[2], found[3], found[4]))
    return computations, entry


def _flops(computations: dict[str, list[Line]]) -> Callable[[str], Flops]:
    @cache
    def total(name: str) -> Flops:
        shapes = {line.name: line.shape for line in computations[name]}
        flops = 0.0
        for line in computations[name]:
            flops += product(line, shapes)
            flops += line.trips * sum(total(c) for c in line.called if c in computations)
        return flops

    return total


def product(line: Line, shapes: dict[str, str]) -> Flops:
    operands = [dims(shapes.get(name, "")) for name in line.operands]
    if line.opcode == "dot" or "__cublas" in line.rest:
        return 2.0 * math.prod(dims(line.shape)) * math.prod(operands[0][a] for a in axes(line, "contracting"))
    if line.opcode == "convolution" or "__cudnn$conv" in line.rest:
        # Forward, or a gradient: multiply-adds are output x kernel / output features of the forward product.
        result = dims(line.shape)
        first, kernel, out = operands[0], operands[1], result
        if "convBackwardFilter" in line.rest:
            first, kernel, out = operands[0], result, operands[1]
        elif "convBackwardInput" in line.rest:
            first, kernel, out = result, operands[1], operands[0]
        labels = re.search(r"dim_labels=\w+_(\w+)->", line.rest)
        features = kernel[labels[1].index("o")] if labels else 1
        return 2.0 * math.prod(out) * math.prod(kernel) / max(features, 1) if first else 0.0
    return 0.0


def axes(line: Line, which: str) -> list[int]:
    """The ``contracting`` or ``batch`` dimensions of a product's first operand."""
    found = re.search(rf'lhs_{which}_dim(?:s=\{{|ensions":\[)([^\]}}]*)', line.rest)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def _arrays(shape: str) -> Iterator[tuple[str, list[int]]]:
    for dtype, sizes in _SHAPE.findall(shape):
        yield dtype, [int(n) for n in sizes.split(",") if n]


def dims(shape: str) -> list[int]:
    """Sizes of an array's shape; of the first array in a tuple."""
    return next((sizes for _, sizes in _arrays(shape)), [])


def nbytes_of(shape: str) -> Bytes:
    """Bytes of all arrays of a shape."""
    total = 0
    for dtype, sizes in _arrays(shape):
        width = _WIDTH.match(dtype)
        total += math.prod(sizes) * max(int(width[1]) // 8 if width else 1, 1)
    return total


__all__ = ["CALLED", "FREE", "Line", "axes", "dims", "hlo_flops", "nbytes_of", "parsed", "product", "recomputed"]
