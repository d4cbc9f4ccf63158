"""A Graph as text: one op per line, readable in a diff, and parsed back.

    graph(%0:f32[8,64], %1:f32[64,64] donated)
      %2:f32[8,64] = dot_general(%0, %1) flops=65536.0  # what a note says
      %3:f32[8,64], %4:f32[3,8] = scan(%2) trips=3 slots=%2,_ carried=0,2 {
        graph(%0:f32[8,64], %1:i32[])
          %2:f32[8,64] = neg(%0)
        return %2, %1
      }
    return %3, %4

A value has its type where it is made, with bytes (``!400``) if the type implies others and memory (``@host``) if not
the device. ``_`` is a literal.

Invariant: ``parse_graph(format_graph(g)) == g`` for every graph that makes each value once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from jaxtensile.errors import JaxtensileError
from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_LONG = {short: long for long, short in _SHORT.items()}
_NUMBER = re.compile(r"([a-z]+)(\d+)")
_VALUE = re.compile(r"%(\d+):([^\[\s]+)\[([\d,]*)\](?:!(\d+))?(?:@(\w+))?( donated)?")
_OP = re.compile(r"(?:(%.*?) = )?([\w\-]+)\(([^)]*)\)(.*?)( \{)?")
_FIELD = re.compile(r"(\w+)=(\S+)")


class TextError(JaxtensileError, ValueError):
    """A text that is no graph: the line, and what was expected there."""


def format_graph(graph: Graph, note: Callable[[Op], str] = lambda op: "") -> str:
    """The text of a graph. ``note``: a remark on each op of the outermost graph."""

    def new(v: ValueId) -> str:
        return f"%{v}:{_type(graph.values[v])}"

    lines = [f"graph({', '.join(new(v) + ' donated' * (v in graph.donated) for v in graph.inputs)})"]
    for op in graph.ops:
        made = ", ".join(map(new, op.results)) + " = " if op.results else ""
        remark = f"  # {note(op)}" if note(op) else ""
        lines.append(f"  {made}{op.primitive}({_names(op.operands)}){_fields(op)}{' {' if op.bodies else ''}{remark}")
        for body in op.bodies:
            lines += [f"    {line}" for line in format_graph(body).splitlines()]
        lines += ["  }"] if op.bodies else []
    # Without literals among them the outputs need no places of their own.
    places = f" at {_names(graph.output_slots)}" if graph.output_slots else ""
    lines.append(f"return {_names(graph.outputs)}{places}".rstrip())
    return "\n".join(lines)


def _type(value: Value) -> str:
    match = _NUMBER.fullmatch(value.dtype)
    short = _SHORT[match[1]] + match[2] if match and match[1] in _SHORT else value.dtype
    nbytes = f"!{value.nbytes}" if value.nbytes != _usual_bytes(value.dtype, value.shape) else ""
    return f"{short}[{','.join(map(str, value.shape))}]{nbytes}" + f"@{value.space}" * (value.space != "device")


def _usual_bytes(dtype: str, shape: Sequence[int]) -> int:
    match = _NUMBER.fullmatch(dtype)
    return (math.prod(shape) * (int(match[2]) if match else 8) + 7) // 8


def _names(values: Sequence[int | None]) -> str:
    return ", ".join("_" if v is None or v < 0 else f"%{v}" for v in values)


def _fields(op: Op) -> str:
    fields = {
        "flops": repr(op.flops) * (op.flops != 0),
        "trips": str(op.trip_count) * (op.trip_count != 1),
        "slots": _names(op.slots).replace(" ", ""),
        "carried": f"{op.carried[0]},{op.carried[1]}" * (op.carried != (0, 0)),
        "pinned": "yes" * op.pinned,
    }
    return "".join(f" {name}={text}" for name, text in fields.items() if text)


def parse_graph(text: str) -> Graph:
    """The graph of a text; raises ``TextError``."""
    lines = [line.partition("  # ")[0].strip() for line in text.splitlines()]
    parser = _Parser([line for line in lines if line])
    graph = parser.graph()
    if parser.at < len(parser.lines):
        raise parser.error("nothing after the last return")
    return graph


class _Parser:
    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at = lines, 0

    def error(self, expected: str) -> TextError:
        line = repr(self.lines[self.at]) if self.at < len(self.lines) else "the end"
        return TextError(f"no graph at {line}: expected {expected}. The form is described in jaxtensile.ir.text")

    def take(self, pattern: str | re.Pattern[str], expected: str) -> re.Match[str]:
        match = re.fullmatch(pattern, self.lines[self.at]) if self.at < len(self.lines) else None
        if match is None:
            raise self.error(expected)
        self.at += 1
        return match

    def next_is(self, start: str) -> bool:
        return self.at < len(self.lines) and self.lines[self.at].startswith(start)

    def graph(self) -> Graph:
        values: dict[int, Value] = {}
        ops: list[Op] = []
        head = list(_VALUE.finditer(self.take(r"graph\((.*)\)", "graph(inputs)")[1]))
        inputs = _new_values(head, values)
        while not self.next_is("return"):
            line = self.take(_OP, "an op or return")
            results = _new_values(_VALUE.finditer(line[1] or ""), values)
            bodies: list[Graph] = []
            while line[5] and not self.next_is("}"):
                bodies.append(self.graph())
            if line[5]:
                self.take(r"\}", "}")
            fields = dict(_FIELD.findall(line[4]))
            consts, carries = map(int, fields.get("carried", "0,0").split(","))
            ops.append(
                Op(
                    id=OpId(len(ops)),
                    primitive=line[2],
                    operands=_ids(line[3]),
                    results=results,
                    flops=float(fields.get("flops", 0)),
                    pinned="pinned" in fields,
                    bodies=tuple(bodies),
                    trip_count=int(fields.get("trips", 1)),
                    slots=_ids(fields.get("slots", "")),
                    carried=(consts, carries),
                )
            )
        if sorted(values) != list(range(len(values))):
            raise self.error(f"values without a gap before it, not {sorted(values)}")
        end = self.take(r"return ?(.*?)(?: at (.*))?", "return outputs")
        return Graph(
            values=tuple(values[v] for v in sorted(values)),
            ops=tuple(ops),
            inputs=inputs,
            outputs=_ids(end[1]),
            donated=frozenset(ValueId(int(match[1])) for match in head if match[6]),
            output_slots=tuple(None if v < 0 else v for v in _ids(end[2] or "")),
        )


def _ids(text: str) -> tuple[ValueId, ...]:
    return tuple(ValueId(-1 if name == "_" else int(name[1:])) for name in text.replace(",", " ").split())


def _new_values(found: Iterable[re.Match[str]], values: dict[int, Value]) -> tuple[ValueId, ...]:
    made: list[ValueId] = []
    for match in found:
        v = ValueId(int(match[1]))
        number = _NUMBER.fullmatch(match[2])
        dtype = _LONG[number[1]] + number[2] if number and number[1] in _LONG else match[2]
        shape = tuple(int(d) for d in match[3].split(",") if d)
        nbytes = int(match[4]) if match[4] else _usual_bytes(dtype, shape)
        values[v] = Value(id=v, nbytes=nbytes, shape=shape, dtype=dtype, space=match[5] or "device")
        made.append(v)
    return tuple(made)
