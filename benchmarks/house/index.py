"""What every file answers, by rooms: ``docs/modules.md``, from the first lines of the files themselves.

python -m benchmarks.house.index
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
INDEX = ROOT / "docs" / "modules.md"
HEAD = """# What every file answers

Made by `python -m benchmarks.house.index` from the first lines of the files. The rooms stand as in
`tests/test_architecture.py`: each looks only into rooms above it in this list.
"""


def first_line(path: Path) -> str:
    """The first sentence or question of a file's docstring, on one line."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(said.partition("\n\n")[0].split()).replace("``", "`")


def folder(room: str) -> Path:
    """Where the files of a room are: ``top`` are those of the package itself."""
    parts = () if room == "top" else tuple(room.split("."))
    return ROOT.joinpath(*(parts if parts[:1] in (("passes",), ("runtime",)) else ("jaxtensile", *parts)))


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


def rooms() -> list[str]:
    """From the ground up, as the test draws them."""
    drawn = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    for node in drawn.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return [room for floor in ast.literal_eval(node.value) for room in floor]
    raise AssertionError("no FLOORS in tests/test_architecture.py")


if __name__ == "__main__":
    INDEX.write_text(index(rooms()))
    print(f"{INDEX.relative_to(ROOT)}: {INDEX.read_text().count(chr(10) + '- ')} files")
