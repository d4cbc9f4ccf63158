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
from benchmarks.optimality import run as optimality  # noqa: E402
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


def compared(greedy, exact, bound):
    """A row of the comparison with the optimum; None: does not fit, or is not known."""
    row = {"name": "dense", "equations": 10, "share": 0.5, "proven": bound is not None}
    for solver, charge in (("greedy", greedy), ("exact", exact)):
        row[solver] = {"fits": charge is not None, "charge": charge or 0.0, "step": 1 + (charge or 0.0), "took": 1.0}
    return row if bound is None else {**row, "bound": bound, "gap": 0.0}


def test_greedy_is_compared_where_both_fit():
    row = compared(0.21, 0.10, 0.10)
    assert optimality.above(row, "charge") == pytest.approx(0.1)
    assert optimality.above(compared(None, 0.1, None), "charge") is None


def test_every_row_of_the_comparison_has_every_column():
    rows = [compared(0.21, 0.10, 0.10), compared(0.1, 0.1, 0.1), compared(None, 0.1, None), compared(0.1, None, None)]
    machine = {"jax": "0", "date": "today"}
    text = optimality.table({"machine": machine, "limit": 60.0, "rows": rows})
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1, text
    assert "Proven: 2 of 4; there greedy is at most 10.0% above" in text
    assert "within 2 % in 1" in text


@pytest.mark.parametrize("name", RUNS)
def test_the_runner_names_modules_that_are_there(name):
    for command in RUNS[name]:
        assert command is None or find_spec(f"benchmarks.{command[0]}")


def test_the_runner_refuses_an_unknown_name():
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"no benchmark 'nothing': there are {', '.join(RUNS)}" in done.stderr


@pytest.mark.parametrize("name", [name for name, (_, quick) in RUNS.items() if quick])
def test_the_quick_subset_is_understood(name):
    """Every option of it is one that the benchmark has."""
    module, *arguments = RUNS[name][1]
    told = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(a in told.stdout for a in arguments if a.startswith("--"))
