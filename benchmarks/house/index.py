"""What every file answers, what can be turned off, and what every number is: ``docs/modules.md`` from the first lines
of the files, ``docs/switches.md`` from the table and the calls of ``on``, ``docs/constants.md``.

python -m benchmarks.house.index
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from benchmarks.house.constants import ROOT, TABLES, folder, tables

INDEX = ROOT / "docs" / "modules.md"
HEAD = """# What every file is

Made by `python -m benchmarks.house.index` from the first lines of the files. The rooms stand as in
`tests/house/test_architecture.py`: each looks only into rooms above it in this list.
"""


SWITCHES = ROOT / "docs" / "switches.md"
HEAD_OF_SWITCHES = """# What can be turned off

Made by `python -m benchmarks.house.index` from `jaxtensile/switches.py`, and from where each is asked for. Each model
of XLA's behaviour and each refinement of a search can be turned off alone: `with jaxtensile.switches.off("grow"):`, or
`JAXTENSILE_OFF=grow,cse`. Values are right whatever is off; the report says what is. What each is worth:
`python -m benchmarks.ablation.run`, [its results](../benchmarks/ablation/).
"""


def first_line(path: Path) -> str:
    """The first sentence or question of a file's docstring, on one line."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(said.partition("\n\n")[0].split()).replace("``", "`")


def index(rooms: list[str]) -> str:
    lines = [HEAD]
    for room in rooms:
        where = folder(room)
        lines += [f"## {where.relative_to(ROOT).as_posix()}/", "", first_line(where / "__init__.py"), ""]
        lines += [
            f"- `{path.stem}`: {first_line(path)}" for path in sorted(where.glob("*.py")) if path.stem != "__init__"
        ]
        lines.append("")
    return "\n".join(lines)


def asked_for() -> dict[str, list[str]]:
    """By switch, the files that ask whether it is on: by its name, or as the key of a rewrite."""
    found: dict[str, list[str]] = {}
    for path in sorted(p for top in ("jaxtensile", "passes") for p in (ROOT / top).rglob("*.py")):
        text = path.read_text()
        if "jaxtensile.switches import" not in text and "Rewrite(" not in text:
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name = getattr(call.func, "id", "")
            keys = [k.value for k in call.keywords if k.arg == "key"] if name == "Rewrite" else []
            for given in (*(call.args if name == "on" else ()), *keys):
                for switch in (n.value for n in ast.walk(given) if isinstance(n, ast.Constant)):
                    where = found.setdefault(str(switch), [])
                    where += [w for w in [path.relative_to(ROOT).as_posix()] if w not in where]
    return found


def switches(table: Iterable[tuple[str, str]]) -> str:
    """The table as Markdown; ``table``: names, and what each does."""
    where = asked_for()
    lines = [HEAD_OF_SWITCHES, "| switch | while it is on | asked for in |", "|---|---|---|"]
    for name, does in table:
        lines.append(f"| `{name}` | {does} | {', '.join(f'`{w}`' for w in where.get(name, ()))} |")
    return "\n".join(lines) + "\n"


def rooms() -> list[str]:
    """From the ground up, as the test draws them."""
    drawn = ast.parse((ROOT / "tests" / "house" / "test_architecture.py").read_text())
    for node in drawn.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return [room for floor in ast.literal_eval(node.value) for room in floor]
    raise AssertionError("no FLOORS in tests/house/test_architecture.py")


if __name__ == "__main__":
    from jaxtensile.switches import SWITCHES as TABLE

    INDEX.write_text(index(rooms()))
    SWITCHES.write_text(switches((s.name, s.does) for s in TABLE))
    print(f"{INDEX.relative_to(ROOT)}: {INDEX.read_text().count(chr(10) + '- ')} files")
    TABLES.write_text(tables(rooms()))
    print(f"{TABLES.relative_to(ROOT)}: {TABLES.read_text().count(chr(10) + '| `')} constants")
