"""The benchmarks' own arithmetic, and that the runner names what it runs."""

import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.__main__ import RUNS  # noqa: E402
from benchmarks.planning import run as planning  # noqa: E402


def row(equations, seconds):
    """A row whose every part takes ``seconds``."""
    parts = dict.fromkeys(("trace", *planning.PLANNING), seconds)
    return {
        "layers": equations // 400,
        "equations": equations,
        "planned_equations": equations,
        "cpu_seconds": parts,
        "planning_cpu_seconds": seconds,
    }


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponents_are_those_of_the_times(power):
    rows = [row(n, 1e-6 * (n * math.log(n)) ** power) for n in (1_000, 4_000, 16_000)]
    found = planning.exponents([*rows, {"layers": 1, "crash": "out of memory"}])
    assert found == pytest.approx(dict.fromkeys(found, power))
    assert {"planning", "solve"} <= found.keys()


def test_one_size_has_no_exponent():
    assert planning.exponents([row(1_000, 1.0)]) == {}


def test_every_row_of_the_table_has_every_column():
    machine = {"jax": "0", "python": "3", "cpus": 2, "date": "today"}
    rows = [{**row(1_000, 1.0), "compile_cpu_seconds": 4.0}, row(4_000, 4.0), {"layers": 9, "crash": "no"}]
    text = planning.table({"machine": machine, "rows": rows, "exponents": planning.exponents(rows)})
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1, text
    assert "| 4.0 | 0.25 |" in text


@pytest.mark.parametrize("name", RUNS)
def test_the_runner_names_modules_that_are_there(name):
    for command in RUNS[name]:
        assert command is None or find_spec(f"benchmarks.{command[0]}")


def test_the_runner_refuses_an_unknown_name():
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no benchmark 'nothing': there are fit, undo, call, first-call, planning" in done.stderr
