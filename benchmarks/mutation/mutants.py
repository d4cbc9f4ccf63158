"""Small faults in a Python module: the same ones for the same text, each a replacement of a few bytes.

A fault turns a comparison, a sum or a product into its neighbour, ``and`` into ``or``, ``min`` into ``max``, ``any``
into ``all``; makes a condition always or never hold, which is more than to negate it; adds one to a whole number; drops
a ``not``; or drops a statement: a call, a ``raise``, a ``break`` or ``continue``, a change of an attribute, an element
or a sum. Left alone are annotations, docstrings, decorators, the words of errors, and what stands outside of functions:
constants, fields and their defaults.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARED: Final = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: Final = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
_CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SKIPPED: Final = ("annotation", "returns", "decorator_list", "msg")


@dataclass(frozen=True, slots=True)
class Mutant:
    """``text[start:stop]`` (bytes of the module) replaced by ``new``."""

    key: str
    """The same as long as its function, its line and the fault are, wherever in the file they are."""
    function: str
    line: int
    lines: tuple[int, int]
    """First and last line of the statement, or of the head of a compound one."""
    start: int
    stop: int
    old: str
    new: str
    source: str
    """The line as it is."""

    def applied(self, text: bytes) -> bytes:
        return text[: self.start] + self.new.encode() + text[self.stop :]


def mutants(text: bytes) -> list[Mutant]:
    """All faults of a module, in an order that its text does not show: the first n are a sample.

    Each leaves a module that can be parsed, and no two are the same text.
    """
    finder = _Finder(text)
    finder.body(ast.parse(text).body, "")
    found = {(m.start, m.stop, m.new): m for m in finder.found}.values()
    return sorted((m for m in found if _parses(m.applied(text))), key=lambda m: m.key)


def _parses(text: bytes) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, text: bytes) -> None:
        self.text, self.found = text, list[Mutant]()
        self.lines = text.decode().splitlines()
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.seen: Counter[str] = Counter()
        self.runs = False  # whether a function is around

    # ---- where something is --------------------------------------------------------------------

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def add(self, start: int, stop: int, new: str) -> None:
        old = self.text[start:stop].decode()
        number = sum(s <= start for s in self.starts)
        line = self.lines[number - 1].strip()
        words = f"{self.function}:{line}:{old}:{new}"
        self.seen[words] += 1
        key = hashlib.sha256(f"{words}:{self.seen[words]}".encode()).hexdigest()[:12]
        self.found.append(Mutant(key, self.function, number, self.head, start, stop, old, new, line))

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """An operator, which the syntax tree does not place."""
        first, last = self.stop(left), self.start(right)
        match = re.search(rf"(?<![\w<>=!]){re.escape(old)}(?![\w<>=])", self.text[first:last].decode())
        if match:
            self.add(first + match.start(), first + match.end(), new)

    # ---- what is there -------------------------------------------------------------------------

    def body(self, statements: list[ast.stmt], function: str) -> None:
        for statement in statements:
            self.statement(statement, function)

    def statement(self, node: ast.stmt, function: str) -> None:
        self.function = function
        inner = [x for field in ("body", "orelse", "finalbody") for x in getattr(node, field, [])]
        handlers = [x for h in getattr(node, "handlers", []) for x in h.body]
        cases = [x for c in getattr(node, "cases", []) for x in c.body]
        below = [*inner, *handlers, *cases]
        end = node.end_lineno or node.lineno
        self.head = (node.lineno, max(node.lineno, min((x.lineno - 1 for x in below), default=end)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            runs = self.runs
            self.runs = runs or not isinstance(node, ast.ClassDef)
            if node.name not in ("__repr__", "__str__"):
                self.body(node.body, f"{function}.{node.name}".lstrip("."))
            self.runs = runs
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if self.runs:
            self.dropped(node)
            if not isinstance(node, ast.Raise):
                self.expressions(node)
        self.body(below, function)

    def dropped(self, node: ast.stmt) -> None:
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if call or stored or isinstance(node, ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete):
            self.add(self.start(node), self.stop(node), "pass")

    def expressions(self, node: ast.AST) -> None:
        """Faults of the expressions of a statement, not of the statements in it."""
        self.conditions(node)
        match node:
            case ast.Compare():
                for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
                    self.between(left, right, *_COMPARED[type(op)])
            case ast.BinOp() if type(node.op) in _COMPUTED and not _is_text(node.left):
                self.between(node.left, node.right, *_COMPUTED[type(node.op)])
            case ast.BoolOp():
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self.between(left, right, *words)
            case ast.UnaryOp(op=ast.Not()):
                operand = self.text[self.start(node.operand) : self.stop(node.operand)].decode()
                self.add(self.start(node), self.stop(node), f"bool({operand})")
            case ast.Constant(value=bool()):
                self.add(self.start(node), self.stop(node), str(not node.value))
            case ast.Constant(value=int() as number):
                self.add(self.start(node), self.stop(node), str(number + 1))
            case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
                self.add(self.start(node.func), self.stop(node.func), _CALLED[name])
            case ast.JoinedStr() | ast.keyword(arg="strict"):
                return
        for child in _below(node):
            self.expressions(child)

    def conditions(self, node: ast.AST) -> None:
        tests: list[ast.expr] = []
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = list(node.ifs)
        for test in tests:
            text = self.text[self.start(test) : self.stop(test)].decode()
            for constant in ("or True", "and False"):
                self.add(self.start(test), self.stop(test), f"(({text}) {constant})")


def _below(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield child


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
