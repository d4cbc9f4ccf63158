"""The house stands as drawn: dependencies point down, JAX stays at its edge, 1024 in one room.

A new room is added to the table below with the rooms it may look into.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = "units errors hardware ir plan device"
EDGE = f"{VOCABULARY} measured irtext workload gpu_description target _compat trace loops rewrite compile hlo passes"
MAY_IMPORT = {
    "units": "",
    "places": "",
    "errors": "units places",
    "hardware": "units",
    "workload": "",
    "cachefiles": "",
    "collecting": "",
    "hushed": "",
    "faults": "errors",
    "ir": "units",
    "irtext": "units errors ir",
    "device": "units errors hardware",
    "plan": "units ir",
    "measured": "units device cachefiles",
    "gpu_description": "units device",
    "passes": f"{VOCABULARY} hushed passes",
    "runtime": "units errors runtime",
    "_compat": "",
    "flops": "units",
    "trace": "units errors ir _compat flops",
    "loops": "units errors ir plan _compat trace passes",
    "levels": "units ir _compat bodies loops passes trace",
    "hosted": "ir plan trace loops passes rewrite state target",
    "bodies": "_compat trace",
    "host_stacks": "ir plan passes",
    "rewrite": "units errors ir plan _compat host_stacks trace passes",
    "target": "errors device gpu_description hardware _compat",
    "hlo": "units device plan passes",
    "compile": "units errors ir plan device target _compat hlo",
    "timeline": "units",
    "report_text": "units plan places",
    "chart": "units timeline report_text",
    "report_html": "units plan report_text chart",
    "report_trace": "places timeline",
    "report": f"{VOCABULARY} timeline report_text report_html report_trace",
    "calibration": "units errors device measured _compat",
    "split": "units ir _compat trace",
    "numbered": "_compat",
    "batched": "_compat trace",
    "rows": "passes batched numbered",
    "made_rows": "ir rows trace",
    "loop_rows": "_compat ir made_rows rows trace",
    "stretch": "units ir passes rows made_rows loop_rows trace",
    "chunk": "ir _compat rows loop_rows stretch trace",
    "sink": "ir _compat trace",
    "join": "units ir _compat trace",
    "inward": "units ir _compat trace passes",
    "state": "units ir plan trace passes",
    "merge": "ir _compat trace",
    "undo_loops": "_compat merge passes trace",
    "undo": "ir _compat merge trace undo_loops",
    "upperbound": "units flops _compat",
    "request": f"{VOCABULARY} faults _compat passes compile report",
    "nest": "_compat trace",
    "variants": f"""{EDGE} compilers levels faults bodies chunk merge stretch nest sink join inward split state undo
    request _compat""",
    "cheapest": f"{EDGE} variants",
    "candidates": f"{EDGE} bodies cheapest variants",
    "recipe": f"{EDGE} bodies stretch variants",
    "remembered": "units ir plan_cache request",
    "plan_cache": "ir measured cachefiles request recipe _compat",
    "outcome": f"{EDGE} faults candidates undo request variants timeline report",
    "attempts": f"{EDGE} faults request variants outcome",
    "rounds": f"{EDGE} attempts candidates variants outcome",
    "smallest": f"{EDGE} rounds candidates variants outcome",
    "subject": f"{EDGE} compilers request state variants",
    "pipeline": f"""{EDGE} collecting subject rounds smallest attempts candidates plan_cache recipe merge undo request
    remembered upperbound variants outcome timeline report""",
    "keystore": "units errors _compat",
    "agreement": "units errors keystore",
    "processes": """units errors device measured _compat trace target location request recipe plan_cache keystore
    faults agreement attempts pipeline""",
    "placement": f"{VOCABULARY} target _compat hosted",
    "location": "errors device target _compat",
    "feedback": f"{VOCABULARY} _compat calibration request passes pipeline",
    "api": f"""{EDGE} agreement processes faults plan_cache feedback hosted ladder request location outcome placement
    jobs report shared_dispatch upperbound options identity""",
    "filtered": "errors _compat api identity report workload",
    "ladder": "units errors plan attempts request pipeline plan_cache runtime",
    "options": "units errors hardware report runtime",
    "identity": "errors runtime",
    "shared_dispatch": "options",
    "config_text": "units places options runtime",
    "arbitration": "units errors hardware location runtime",
    "suspension": "units errors _compat target",
    "tenancy": "units errors arbitration ladder request runtime",
    "waiting": "units errors location ladder tenancy runtime",
    "stepping": "units errors _compat ladder request suspension tenancy waiting runtime",
    "jobs": "units errors options arbitration ladder request suspension tenancy stepping runtime",
    "process": f"{VOCABULARY} passes",
    "compilers": "units device gpu_description ir passes",
    "estimate_text": "units places report_text",
    "estimation": f"""{VOCABULARY} faults workload _compat trace merge target measured compile compilers location passes
    process estimate_text timeline report options identity""",
    "loading": "errors workload",
    "doctor": "units errors device measured hardware config_text",
    "interrupts": "",
    "estimate_table": "measured units errors api estimation loading options runtime target workload",
    "serving": "units errors hardware runtime",
    "watching": "units errors serving runtime",
    "xla_memory": "units",
    "adopted": "units",
    "running": "units errors adopted serving watching xla_memory runtime",
    "cli": f"""{VOCABULARY} api estimate_table calibration runtime report workload loading doctor interrupts serving
    watching running options identity config_text""",
    "__init__": "errors hardware api filtered jobs estimation calibration device plan report workload",
    "__main__": "cli",
}
MAY_USE_JAX = set(
    """_compat trace merge undo undo_loops upperbound split numbered batched made_rows stretch chunk sink join inward
    nest levels loops hosted host_stacks rewrite compile attempts target location processes placement feedback api
    filtered estimation calibration arbitration suspension stepping""".split()
)
THIRD_PARTY = {"passes": {"numpy", "scipy"}, "runtime": {"msgspec"}}
FILES = [p for folder in ("jaxtensile", "passes", "runtime") for p in sorted((ROOT / folder).glob("*.py"))]


def room_of(path):
    return path.parent.name if path.parent.name in ("passes", "runtime") else path.stem


def imports(tree):
    """Absolute module names that a file imports, wherever in the file, except for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            whole = node.module in ("jaxtensile", "jax")  # `from jaxtensile import x` is about x
            yield from (f"{node.module}.{a.name}" for a in node.names) if whole else [node.module]
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_looks_only_into_rooms_below(path):
    room, tree = room_of(path), ast.parse(path.read_text())
    assert room in MAY_IMPORT, f"{room} is a new room: say in {Path(__file__).name} what it may import"
    for name in imports(tree):
        top, _, rest = name.partition(".")
        if top == "jaxtensile":
            target = rest.partition(".")[0]
            assert target in (*MAY_IMPORT[room].split(), "__version__"), f"{room} imports {name}"
        elif top in ("jax", "jaxlib"):
            assert room in MAY_USE_JAX, f"{room} imports {name}"
            assert "_src" not in name or room == "_compat", f"{room} imports {name}"
        elif top not in sys.stdlib_module_names and room in THIRD_PARTY:
            assert top in THIRD_PARTY[room], f"{room} imports {name}"
    if room != "units":
        assert not [
            n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in (1024, 1024**2, 1024**3)
        ]


def test_no_room_looks_into_itself_through_others():
    """The table has no cycle: following it down always ends."""
    left = {room: set(below.split()) - {room} for room, below in MAY_IMPORT.items()}
    while ground := [room for room, below in left.items() if not below & left.keys()]:
        for room in ground:
            del left[room]
    assert not left


def test_the_wheel_has_every_folder():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"jaxtensile": "jaxtensile", "jaxtensile.passes": "passes", "jaxtensile.runtime": "runtime"}
    assert tool["package-dir"] == folders
    assert sorted(tool["packages"]) == sorted(folders)
    nested = {p.parent.relative_to(ROOT) for f in folders.values() for p in (ROOT / f).glob("*/**/*.py")}
    assert nested == {Path("jaxtensile/passes"), Path("jaxtensile/runtime")} or not nested
    for name in ("passes", "runtime"):
        assert (ROOT / "jaxtensile" / name).readlink() == Path("..") / name


@pytest.mark.parametrize(
    "arguments",
    [["-c", "import jaxtensile, jaxtensile.runtime; jaxtensile.targets()"], ["-m", "jaxtensile.cli", "--help"]],
)
def test_jax_is_not_imported_before_it_is_needed(arguments):
    found = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    modules = [line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if line.startswith("import time:")]
    assert "jaxtensile.units" in modules
    assert not [m for m in modules if m.split(".")[0] in ("jax", "jaxlib", "numpy")]
