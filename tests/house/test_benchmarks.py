"""The benchmarks' own arithmetic, and that the runner names what it runs."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.__main__ import RUNS
from benchmarks.dominance import run as dominance
from benchmarks.isolate import streamed
from benchmarks.mutation.mutants import mutants
from benchmarks.optimality import run as optimality
from benchmarks.papers import run as papers
from benchmarks.planning import run as planning
from benchmarks.promise import run as promise
from paths import ROOT


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


def compared(auto, exact, bound, objective="charge"):
    """A row of the comparison with the optimum; None: does not fit, or is not known."""
    row = {"name": "dense", "equations": 10, "share": 0.5, "objective": objective}
    for solver, figure in (("auto", auto), ("flops", auto), ("greedy", auto), ("exact", exact)):
        again = {"charge": figure or 0.0, "seconds": figure or 0.0}
        row[solver] = {"fits": figure is not None, **again, "took": 1.0}
    row |= {"none": bound == float("inf"), "proven": bound == float("inf") or (bound is not None and bound == exact)}
    return row if bound in (None, float("inf")) else {**row, "bound": bound}


@pytest.mark.parametrize("objective", optimality.OBJECTIVES)
def test_the_default_solver_is_compared_where_both_fit(objective):
    row = compared(0.21, 0.10, 0.05, objective)
    assert optimality.above(row) == pytest.approx(0.1)
    assert optimality.above(row, than="bound") == pytest.approx(1.21 / 1.05 - 1)
    assert optimality.above(compared(None, 0.1, None, objective)) is None
    assert optimality.above(compared(0.1, None, None, objective), than="bound") is None


def test_every_row_of_the_comparison_has_every_column():
    rows = [
        compared(auto, exact, bound, objective)
        for objective in optimality.OBJECTIVES
        for auto, exact, bound in [
            (0.21, 0.10, 0.10),
            (0.1, 0.1, 0.1),
            (None, 0.1, 0.1),
            (0.1, None, None),
            (0.12, 0.11, 0.1),
            (None, None, float("inf")),
        ]
    ]
    text = optimality.table({"machine": {"jax": "0", "date": "today"}, "limit": 60.0, "rows": rows})
    for part in text.split("## ")[1:]:
        assert len({line.count("|") for line in part.splitlines() if line.startswith("|")}) == 1, part
        assert "Proven: 3 of 6 cases, and that none fits: 1." in part
        assert "at most 2% above the optimum in 1; in 1 it finds nothing that fits." in part
        assert "The worst is 10.0% above (dense at 50%)." in part
        assert "Of the others it is at most 1.8% above the bound." in part


def network(name, **points):
    """A network of 1,000 bytes, 200 of them arguments, planned in one way."""
    rows = [
        {"share": s, "budget": int(1100 * s), "predicted": 1, "eor": 0.2 - s / 5, "fits": s > 0.4}
        for s in papers.SHARES
    ]
    found = {"sweep": {"predicted": 1100, "rows": rows}, **points}
    base = {"device": 1000, "argument": 200, "flops": 10.0}
    of = {"network": name, "target": papers.TARGETS[0], "objective": "time"}
    return {**of, "plain": base, "ways": {"recompute": found}}


def test_memory_saved_is_of_all_bytes_or_of_those_above_the_arguments():
    base = network("vgg16")["plain"]
    assert papers.msr({"device": 600}, base) == pytest.approx(0.4)
    assert papers.msr({"device": 600}, base, 200) == pytest.approx(0.5)


def test_the_guess_at_a_budget_without_overhead_is_in_the_compilers_bytes():
    rows = network("vgg16")["ways"]["recompute"]["sweep"]["rows"]
    assert papers.free_budget(rows, 1000, 1100) is None  # all of them cost more than one per cent
    cheap = [{**row, "eor": 0.0} for row in rows]
    assert papers.free_budget(cheap, 1000, 1100) == 500  # the smallest that fits, 550 by the model


def test_every_row_beside_the_papers_has_every_column():
    fits = {"fits": True, "device": 500, "host": 0, "eor": 0.1, "flops": 11.0}
    networks = [
        network("vgg16", authors=fits, free={**fits, "eor": 0.0}, best=fits),
        network("inception_v3", authors={"fits": False, "needs": 700}, free={"none": True}, best={"crash": "no"}),
        network("resnet50"),
        {**network("densenet121"), "plain": {"crash": "no"}, "ways": {}},
    ]
    machine = {"jax": "0", "python": "3", "date": "today"}
    text = papers.table({"machine": machine, "targets": dict.fromkeys(papers.TARGETS, networks)})
    assert all(text.count(f"## {target}: ") == 4 for target in papers.TARGETS)
    for part in text.split("## "):
        lines = [line for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1, part
    assert "| 0.326 | 0.263 | 1.24 | recompute | 0.500 | 0.625 | +0.100 | 5.00 |" in text
    assert (
        "not reached: 0.300" in text and "not compiled yet" in text and "predicted, the authors' are measured" in text
    )


def program(device, flops, **more):
    return {"device": device, "host": 0, "flops": flops, "hlo_flops": flops, "fits": True, **more}


def test_dominance_counts_what_is_won_lost_and_missing():
    peers = {"none": program(100, 10.0, peer="none")}
    peers |= {p: program(50 + i, 10.0 + i, peer=p) for i, p in enumerate(dominance.POLICIES)}
    peers["xla_slop_3"] = program(100, 12.0, peer="xla_slop_3")
    answers = {"50:0": program(49, 10.0), "51:0": program(51, 11.5), "52:0": {"fits": False, "needs": 53}}
    answers |= {"least:45:0": program(40, 12.0), f"least:30:{dominance.HOST}": program(20, 11.0, refused=16_000_000)}
    answers |= {"50:0:chunk": program(30, 10.0), "least:45:0:chunk": {"fits": False, "needs": 50, "refused": 50}}
    rows = {"ode": {"peers": {}, "ours": {}}, "lstm": {"peers": peers, "ours": answers}}
    machine = {"jax": "0", "python": "3", "cpus": 2, "date": "today"}
    text = dominance.table({"machine": machine, "workloads": rows})
    assert "Won 2 of 4 points; in 1 of them the peer saves nothing. In parts: 2 of 2." in text
    assert "In parts: lower than the best policy without the host in 1 of 1" in text  # by what was asked at its bytes
    assert "**more FLOPs**" in text and "**does not fit**, 1 bytes over" in text
    assert (
        "As it is: lower than the best policy without the host in 1 of 1" in text
        and "with the host, in 1 of 1." in text
    )
    assert "| 0.400 | 1.1000 | 16.0 |" in text
    # Of lstm two peers, two programs of ours as it is, four in parts, and the smallest in parts.
    assert "**Partial**: not measured yet are rows: 1 of ode, 9 of lstm." in text
    for section in text.split("## "):
        assert len({line.count("|") for line in section.splitlines() if line.startswith("|")}) <= 1, text


def test_a_missed_chance_is_a_program_that_fits_with_less_work():
    dear, cheap = program(50, 13.0, budget=80, share=0.2), program(70, 11.0, budget=75, share=0.1)
    assert promise.missed([dear, cheap]) == [(dear, cheap)]
    assert promise.missed([{**dear, "budget": 60}, cheap]) == []


def test_promise_counts_what_is_kept_refused_and_used():
    answers = [program(50, 13.0, budget=80, share=0.2, rounds=1), program(74, 11.0, budget=75, share=0.1, rounds=2)]
    answers += [
        {"fits": False, "needs": 99, "budget": 60, "share": 0.0},
        program(91, 10.0, budget=92, share=0.9, rounds=1),
    ]
    row = {"plain": program(100, 10.0), "least": 50, "bound": 40, "answers": {str(a["share"]): a for a in answers}}
    machine = {"jax": "0", "python": "3", "cpus": 2, "date": "today"}
    text = promise.table({"machine": machine, "workloads": {"dlrm": row}})
    assert "Kept 3 of 3 returned, refused 1; used, median over the 2 budgets" in text
    assert "FLOPs 1.3000, but 74 bytes at 1.1000" in text and "needs 0.0" in text
    assert "dlrm at 16 budgets" in text and "gpt2-3" in text.rpartition("**Partial**")[2]


def test_rows_of_a_case_come_one_by_one_and_its_crash_last():
    rows = list(streamed("promise.run", "nothing", ("--turns", "0")))
    assert len(rows) == 1 and "KeyError" in rows[0]["crash"]


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


FAULTY = """
def within(x, limit, names):
    \"\"\"Whether x < limit: words are left alone.\"\"\"
    if x < limit and "a" not in names:
        names.append(f"{x + 1}")
        return max(x - 1, 0)
    raise ValueError(x + 2)
"""


def test_faults_are_small_and_always_the_same():
    text = FAULTY.encode()
    found = mutants(text)
    lines = FAULTY.splitlines()
    changed = {m.applied(text).decode() for m in found}
    assert len(changed) == len(found) and FAULTY not in changed
    for new in changed:
        compile(new, "faulty", "exec")
        different = [i for i, (a, b) in enumerate(zip(lines, new.splitlines(), strict=True)) if a != b]
        assert len(different) == 1 and different[0] > 2, "one line of code, no words"
    assert {(m.old, m.new) for m in found} >= {
        ("<", "<="),
        ("and", "or"),
        ("not in", "in"),
        ("max", "min"),
        ("-", "+"),
        ("0", "1"),
        ('names.append(f"{x + 1}")', "pass"),
        ("raise ValueError(x + 2)", "pass"),
    }
    moved = mutants(b"# moved\n\n" + text)
    assert [m.key for m in moved] == [m.key for m in found], "a line more does not try everything again"


SMALL = {
    "jaxtensile/__init__.py": "",
    "jaxtensile/small.py": """
def seen(x):
    return x + 1

def unseen(x):
    if x > 0:
        x -= 1
    return x
""",
    "tests/test_small.py": """
from jaxtensile.small import seen, unseen

def test_it():
    assert seen(1) == 2 and unseen(3) is not None
""",
}
TRIED = """
import json, sys
from pathlib import Path
from benchmarks.mutation import run
run.ROOT = Path(sys.argv[1])
print(json.dumps(run.tried(run.ROOT, "jaxtensile/small", 100, {})))
"""


def test_what_survives_is_what_no_test_sees(tmp_path):
    for name, text in SMALL.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", TRIED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    row = json.loads(done.stdout.splitlines()[-1])
    survivors = {(s["function"], s["old"], s["new"]) for s in row["survivors"]}
    assert ("unseen", ">", ">=") in survivors and ("unseen", "x > 0", "((x > 0) and False)") in survivors
    assert {function for function, *_ in survivors} == {"unseen"}
    assert row["tried"] == row["possible"] == len(survivors) + len(row["killed"])
    for name, text in SMALL.items():
        assert (tmp_path / name).read_text() == text, "nothing is left of a fault"
