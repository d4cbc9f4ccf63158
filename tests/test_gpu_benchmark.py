"""The GPU benchmark runs from end to end where there is no GPU, stops in time, and says what it has not measured."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtensile import _compat
from jaxtensile.devices.hardware import has_nvidia_driver

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.gpu import run as gpu  # noqa: E402
from benchmarks.gpu import summary  # noqa: E402
from benchmarks.isolate import isolated  # noqa: E402

SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"


def script(*arguments, out):
    """The script with this Python, its results in ``out``."""
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(out)}
    return subprocess.run([SCRIPT, *arguments], cwd=out, capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.skipif(_compat.JAX_VERSION < (0, 11), reason="the script is for jax 0.11 and newer")
def test_a_dry_run_goes_through_every_kind_of_case(tmp_path):
    done = script("--dry-run", out=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "dry-run.json").read_text())
    rows = {row["case"]: row for row in result["cases"]}
    assert tuple(rows) == gpu.DRY and result["dry_run"]
    assert not any("crash" in row or "skipped" in row for row in rows.values()), rows
    assert min(rows["link"]["link"].values()) > 0
    ran = [row[one] for row in rows.values() for one in ("peer", "ours") if one in row]
    assert len(ran) == 6
    assert all(one["steps"] >= 10 and one["step_seconds"] > 0 and one["losses"][-1] < one["losses"][0] for one in ran)
    ours = summary.compared(result["cases"])
    assert len(ours) == 3
    for row in ours:
        assert row["ours"]["xla_bytes"] <= row["ours"]["budget"]
        assert summary.difference(row, result["cases"]) <= summary.TOLERANCE
    assert rows["suite:mixer"]["ours"]["budget"] < rows["suite:mixer"]["peer"]["xla_bytes"]
    assert "gpt2:none" in (tmp_path / "dry-run.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"dry-run.json", "dry-run.md"}


@pytest.mark.skipif(has_nvidia_driver(), reason="it would measure")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = script(out=tmp_path)
    assert done.returncode == 2
    assert "no NVIDIA GPU here" in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout
    assert not list(tmp_path.iterdir())
    assert subprocess.run([sys.executable, "-m", "benchmarks.gpu.run"], cwd=ROOT, capture_output=True).returncode == 2


def test_without_jax_it_says_what_is_missing(tmp_path):
    """An interpreter that has nothing: named, and no other is tried in its place."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S -I "$@"\n')
    bare.chmod(0o755)
    env = {**os.environ, "PYTHON": str(bare)}
    done = subprocess.run([SCRIPT, "--dry-run"], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "needed: Python" in done.stderr and f"{bare}: no JAX" in done.stderr


def test_cases_that_no_longer_fit_the_time_are_skipped_and_told(tmp_path):
    done = script("--dry-run", "--seconds", "0", out=tmp_path)
    assert done.returncode == 1
    cases = json.loads((tmp_path / "dry-run.json").read_text())["cases"]
    assert [row["case"] for row in cases] == list(gpu.DRY)
    assert {row["skipped"] for row in cases} == {"no time left", f"needs {gpu.HOST_AFTER}"}


def test_an_unknown_case_is_wrong_use(tmp_path):
    done = script("--dry-run", "gpt3", out=tmp_path)
    assert done.returncode == 2 and "no case 'gpt3'" in done.stderr


def test_a_case_past_its_limit_is_a_result():
    row = isolated(gpu.MODULE, "link", "case", ("--dry-run",), limit=0.05)
    assert row == {"case": "link", "crash": "not done in 0 s"}


def test_the_host_case_waits_for_the_bytes_it_is_given():
    assert gpu.ready("host", [{"case": gpu.HOST_AFTER, "crash": "out of memory"}]) is None
    assert gpu.ready("host", [{"case": gpu.HOST_AFTER, "peer": {"xla_bytes": 7}}]) == "host:7"
    assert gpu.ready("link", []) == "link"


def program(seconds, losses, **more):
    """A program that ran."""
    return {"xla_bytes": 90, "step_seconds": seconds, "losses": losses, "compile_seconds": 1.0, **more}


def measured():
    """A result with every kind of row."""
    ours = {"budget": 100, "fits": True, "predicted_overhead": 0.1, "peak_bytes": 95, "host_bytes": 0}
    cases = [
        {"case": "link", "device": "NVIDIA H200", "link": {"to_host": 5e10, "to_device": 4e10}},
        {"case": "gpt2:none", "peer": program(1.0, [4.0, 2.0])},
        {"case": "gpt2:dots_saveable", "peer": program(1.5, [4.0, 9.0]), "ours": program(1.2, [4.0, 2.1], **ours)},
        {"case": "suite:mixer", "peer": program(2.0, [1.0, 1.0]), "ours": program(3.0, [1.0, 1.0], **ours)},
        {"case": "suite:ode", "peer": {"xla_bytes": 90, "compile_seconds": 1.0}, "crash": "a\nout | of memory"},
        {"case": "suite:lstm", "ours": {"budget": 5, "fits": False, "needs": 9, "error": "too small"}},
        {"case": "suite:unet", "skipped": "no time left"},
    ]
    machine = {"jax": "0", "python": "3", "date": "today"}
    return {"machine": machine, "dry_run": False, "device": "NVIDIA H200", "seconds": 9.0, "cases": cases}


def test_every_row_of_the_table_has_every_column():
    text = summary.table(measured())
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1, text
    assert "1,200.0 | +20.0% | +10.0% | 4.8e-02" in text  # against the plain step, not the policy's
    assert "3,000.0 | +50.0%" in text and "does not fit" in text and "no time left" in text and "50.0 GB/s" in text


def test_losses_that_are_no_numbers_differ():
    result = measured()
    result["cases"][3]["ours"]["losses"] = [1.0, math.nan]
    assert summary.difference(result["cases"][3], result["cases"]) == math.inf
    assert summary.difference(result["cases"][1], result["cases"]) is None


def test_other_tables_say_what_was_measured_and_what_was_not(tmp_path):
    path = tmp_path / "results.json"
    assert "not yet measured" in summary.line(path)
    path.write_text(json.dumps(measured()))
    assert "2 of 2 planned programs peak within their budget" in summary.line(path)
    assert "1 of 2 have the plain program's losses" in summary.line(path)


def test_the_fit_tables_have_that_line_and_the_readme_says_no_more():
    from benchmarks.fit.run import table

    assert ("On a real GPU: not yet measured" in (ROOT / "docs" / "numbers.md").read_text()) == (
        not summary.RESULTS.exists()
    )
    for path in (ROOT / "benchmarks" / "fit").glob("results-*.json"):
        assert summary.line() in table(json.loads(path.read_text()))
