"""The house stands as drawn: a room looks only into rooms on the floors below it, JAX stays at its edge.

A new room is added to a floor, above all rooms that it looks into.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.house.constants import TABLES, constants, tables
from benchmarks.house.index import INDEX, index
from paths import ROOT

HOUSE = {"": ROOT / "jaxtensile", "passes": ROOT / "passes", "runtime": ROOT / "runtime"}
FLOORS = [
    ["top"],
    ["ir", "devices", "runtime.protocol", "runtime.placement"],
    ["report", "passes.lifetimes", "runtime.decide"],
    ["passes.lowering", "passes.order", "passes.pack", "passes.groups", "runtime.config", "runtime.coordinate"],
    ["program", "settings", "passes.recompute", "passes.verify", "runtime.daemon"],
    ["rewrites.rows", "passes.offload", "runtime.client", "runtime.cluster"],
    ["passes.seconds", "passes.solvers", "runtime.simulate"],
    ["xla"],
    ["rewrites", "groups"],
    ["rewrites.loops"],
    ["search"],
    ["planner"],
    ["spmd"],
    ["spmd.processes"],
    ["estimation", "jobs"],
    ["api"],
    ["tuning"],
    ["cli.startup", "cli.terminal"],
    ["cli"],
]
"""From the ground up. ``top``: the files of the package itself."""
ONLY = {
    "passes": ("top", "ir", "devices", "passes"),
    "runtime": ("top", "runtime"),
    "passes.verify": ("top", "ir", "passes.pack"),
}
"""Rooms that look into these alone, wherever they stand."""
MAY_USE_JAX = {
    "program",
    "xla",
    "groups",
    "rewrites",
    "rewrites.rows",
    "rewrites.loops",
    "planner",
    "spmd",
    "spmd.processes",
    "estimation",
    "jobs",
} | {
    "api",
    "tuning",
}
THIRD_PARTY = {"passes": {"numpy", "scipy"}, "runtime": {"msgspec"}}
MOST_FILES = 14
PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def modules() -> dict[str, Path]:
    """Every file of the package by its name below ``jaxtensile``; files of the package itself as ``top.units``."""
    found = {}
    for above, folder in HOUSE.items():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).with_suffix("").parts
            name = ".".join(filter(None, (above, *(p for p in inside if p != "__init__"))))
            if path.name != "__init__.py":
                found[name if "." in name else f"top.{name}"] = path
    return found


MODULES = modules()
ROOMS = {name.rpartition(".")[0] for name in MODULES}
ENTRANCE = {"top.__main__"}
"""Files of the package itself that look up."""


def imports(tree: ast.AST) -> Iterator[str]:
    """What a file imports by its full name, wherever in the file, for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The file that an import is about; None for what ``jaxtensile`` itself defines."""
    rest = name.removeprefix("jaxtensile.")
    for known in (rest, rest.rpartition(".")[0]):
        if known in MODULES:
            return known
        if f"top.{known}" in MODULES:
            return f"top.{known}"
    assert rest in ("__version__", "jaxtensile"), f"{name} is imported, and is no file"
    return None


LOOKS_INTO = {
    name: {
        found
        for imported in imports(ast.parse(path.read_text()))
        if imported.partition(".")[0] == "jaxtensile" and (found := module_of(imported))
    }
    for name, path in MODULES.items()
}


def room(module: str) -> str:
    return module.rpartition(".")[0]


def within(room: str, others: tuple[str, ...]) -> bool:
    return any(room == other or room.startswith(f"{other}.") for other in others)


def test_every_room_stands_on_a_floor():
    assert sorted(r for floor in FLOORS for r in floor) == sorted(ROOMS)


def test_a_room_looks_only_into_rooms_below():
    floor = {name: height for height, rooms in enumerate(FLOORS) for name in rooms}
    up = [
        f"{name} imports {other}"
        for name, others in LOOKS_INTO.items()
        for other in others
        if name not in ENTRANCE and room(other) != room(name) and floor[room(other)] >= floor[room(name)]
    ]
    assert not up, up
    out = [
        f"{name} imports {other}"
        for whose, allowed in ONLY.items()
        for name, others in LOOKS_INTO.items()
        for other in others
        if within(room(name), (whose,)) and not within(room(other), (*allowed, room(name)))
    ]
    assert not out, out


def test_no_file_looks_into_itself_through_others():
    left = {name: others - {name} for name, others in LOOKS_INTO.items()}
    while ground := [name for name, others in left.items() if not others & left.keys()]:
        for name in ground:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_nobody_but_the_devices_asks_for_a_platform_by_its_name():
    named = [
        f"{name}:{node.lineno}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in PLATFORMS and room(name) != "devices"
    ]
    assert not named, f"say in devices.backends what is true of it: {named}"


def test_the_index_is_of_these_files():
    assert INDEX.read_text() == index([room for floor in FLOORS for room in floor]), "python -m benchmarks.house.index"


def test_every_number_says_what_it_is_and_where_it_comes_from():
    unsaid = [f"{name}: {', '.join(c.names)}" for name, path in MODULES.items() for c in constants(path) if not c.said]
    assert not unsaid, f"put a docstring behind it, with its unit and its source, a sweep, or 'a guess': {unsaid}"
    assert TABLES.read_text() == tables([r for floor in FLOORS for r in floor]), "python -m benchmarks.house.index"


def test_no_room_is_a_hall():
    for name in sorted(ROOMS):
        files = [m for m in MODULES if room(m) == name]
        assert len(files) <= MOST_FILES, f"{name} has {len(files)} files: {files}"


@pytest.mark.parametrize("name", MODULES)
def test_what_a_file_imports_beside_ours(name):
    path, where = MODULES[name], room(name)
    tree = ast.parse(path.read_text())
    for imported in imports(tree):
        top = imported.partition(".")[0]
        if top in ("jax", "jaxlib"):
            assert name == "top._compat" or where in MAY_USE_JAX, f"{name} imports {imported}"
            assert "_src" not in imported or name == "top._compat", f"{name} imports {imported}"
        elif top != "jaxtensile" and top not in sys.stdlib_module_names:
            allowed = THIRD_PARTY.get(where.partition(".")[0])
            assert allowed is None or top in allowed, f"{name} imports {imported}"
    if name != "top.units":
        assert not [
            n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in (1024, 1024**2, 1024**3)
        ]


def test_the_wheel_has_every_folder():
    """They are found, through the links."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert found == {"where": ["."], "include": ["jaxtensile*"]}
    for name in ("passes", "runtime"):
        assert (ROOT / "jaxtensile" / name).readlink() == Path("..") / name
    for folder in HOUSE.values():
        assert not [p.parent for p in folder.rglob("*.py") if not (p.parent / "__init__.py").is_file()]


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import jaxtensile, jaxtensile.runtime; jaxtensile.targets()"], ["-m", "jaxtensile", "--help"]],
)
def test_jax_is_not_imported_before_it_is_needed(arguments):
    found = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    modules = [line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if line.startswith("import time:")]
    assert "jaxtensile.units" in modules
    assert not [m for m in modules if m.split(".")[0] in ("jax", "jaxlib", "numpy")]


def test_nothing_lies_about_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    top = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert top == {
        *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
        *("benchmarks", "docs", "examples", "jaxtensile", "passes", "runtime", "tests"),
    }
