"""Every numeric constant with its value, unit and reason, by rooms: ``docs/constants.md``.

Made by ``python -m benchmarks.house.index`` from the docstrings that stand behind the constants in the files.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TABLES = ROOT / "docs" / "constants.md"
HEAD = """# What every number is, and where it comes from

Made by `python -m benchmarks.house.index` from the docstrings behind the constants. The rooms stand as in
[modules.md](modules.md). Numbers of devices are in `jaxtensile/devices/profiles.py` and `gpu_description.py`, each with
its source. "A guess" is said of what nobody measured. "The sweep" is `benchmarks/house/sweep.md`: what half and double
of some constants change in plans of three workloads.
"""
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.USub: operator.neg,
}


class NoNumberError(Exception):
    """What is assigned is made of something else than numbers."""


@dataclass(frozen=True)
class Constant:
    """One assignment at the top of a file: ``A = 1``, or ``A, B = 1, 2``."""

    names: tuple[str, ...]
    text: str
    """The value as it is written."""
    values: tuple[Any, ...]
    """The value of each name."""
    line: int
    said: str
    """The first paragraph of the docstring behind it; empty where there is none."""


@cache
def constants(path: Path) -> tuple[Constant, ...]:
    """The numeric constants of a file: numbers, and tuples, sets, dictionaries and sums of numbers."""
    return tuple(_constants(ast.parse(path.read_text())))


def _constants(tree: ast.Module) -> Iterator[Constant]:
    known: dict[str, Any] = {}
    for node, behind in zip(tree.body, (*tree.body[1:], None), strict=True):
        if isinstance(node, ast.ImportFrom):
            known |= _imported(node)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        names = tuple(name.id for name in ast.walk(target) if isinstance(name, ast.Name))
        try:
            value = _value(node.value, known)
        except NoNumberError:
            continue
        values = tuple(value) if isinstance(target, ast.Tuple) else (value,)
        known |= dict(zip(names, values, strict=True))
        yield Constant(names, ast.unparse(node.value), values, node.lineno, _docstring(behind))


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.partition("\n\n")[0].split())
    return ""


def _imported(node: ast.ImportFrom) -> dict[str, Any]:
    """Of the numbers of another file of ours those that are imported from it."""
    package, *rest = (node.module or "").split(".")
    path = ROOT.joinpath(package, *rest).with_suffix(".py")
    if package != "jaxtensile" or not path.is_file():
        return {}
    numbers = {name: value for c in constants(path) for name, value in zip(c.names, c.values, strict=True)}
    return {alias.asname or alias.name: numbers[alias.name] for alias in node.names if alias.name in numbers}


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand, known))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, known), _value(right, known))
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) if parts:
            return tuple(_value(part, known) for part in parts)
        case ast.Dict(values=parts) if parts:
            return tuple(_value(part, known) for part in parts)
        case _:
            raise NoNumberError


def folder(room: str) -> Path:
    """Where the files of a room are: ``top`` are those of the package itself."""
    parts = () if room == "top" else tuple(room.split("."))
    return ROOT.joinpath(*(parts if parts[:1] in (("passes",), ("runtime",)) else ("jaxtensile", *parts)))


def tables(rooms: list[str]) -> str:
    """The constants of all rooms that have some, one table for each."""
    lines = [HEAD]
    for where in map(folder, rooms):
        rows = [
            f"| {', '.join(f'`{n}`' for n in c.names)} | `{path.stem}` | `{c.text}` | {_cell(c.said)} |"
            for path in sorted(where.glob("*.py"))
            for c in constants(path)
        ]
        if rows:
            lines += [f"## {where.relative_to(ROOT).as_posix()}/", "", "| constant | file | value | what it is |"]
            lines += ["|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
