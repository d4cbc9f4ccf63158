"""Matrix and convolution FLOPs of a compiled XLA:GPU program: what XLA's own rematerialization does to them.

Counted as for a traced program (2 per multiply-add): products in fusions, cuBLAS and cuDNN calls, loop bodies
times their trip count. Products that XLA turned into something else (a reduction, a fused attention) are
missing, so compare with another compile of the same step only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_OPERAND = re.compile(r"%([\w.-]+)")

Line = tuple[str, str, str, str]
"""Name, shape, opcode and the rest of one instruction."""


def hlo_flops(text: str) -> float:
    """FLOPs of the entry computation of an HLO module's text."""
    computations: dict[str, list[Line]] = {}
    entry, lines = "", list[Line]()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations.setdefault(head[1], [])
            entry = head[1] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            lines.append((found[1], found[2], found[3], found[4]))

    @cache
    def total(name: str) -> float:
        shapes = {known: shape for known, shape, _, _ in computations[name]}
        flops = 0.0
        for _, shape, opcode, rest in computations[name]:
            flops += _product(shape, opcode, rest, shapes)
            trips = int(found[1]) if opcode == "while" and (found := _TRIPS.search(rest)) else 1
            flops += trips * sum(total(c) for c in _called(opcode, rest) if c in computations)
        return flops

    return total(entry)


def _called(opcode: str, rest: str) -> Iterator[str]:
    if opcode in ("fusion", "call", "while", "async-start"):
        yield from _CALLED.findall(rest)


def _product(shape: str, opcode: str, rest: str, shapes: dict[str, str]) -> float:
    operands = [_dims(shapes.get(name, "")) for name in _OPERAND.findall(rest.partition(")")[0])]
    if opcode == "dot" or "__cublas" in rest:
        contract = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)', rest)
        axes = [int(n) for n in re.findall(r"\d+", contract[1])] if contract else []
        return 2.0 * math.prod(_dims(shape)) * math.prod(operands[0][a] for a in axes)
    if opcode == "convolution" or "__cudnn$conv" in rest:
        # Forward, or a gradient: multiply-adds are output x kernel / output features of the forward product.
        result = _dims(shape)
        first, kernel, out = operands[0], operands[1], result
        if "convBackwardFilter" in rest:
            first, kernel, out = operands[0], result, operands[1]
        elif "convBackwardInput" in rest:
            first, kernel, out = result, operands[1], operands[0]
        labels = re.search(r"dim_labels=\w+_(\w+)->", rest)
        features = kernel[labels[1].index("o")] if labels else 1
        return 2.0 * math.prod(out) * math.prod(kernel) / max(features, 1) if first else 0.0
    return 0.0


def _dims(shape: str) -> list[int]:
    """Sizes of an array's shape, of the first array's in a tuple."""
    found = _SHAPE.search(shape)
    return [int(n) for n in found[1].split(",") if n] if found else []
