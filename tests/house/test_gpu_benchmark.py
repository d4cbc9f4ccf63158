"""The GPU benchmark runs from end to end where there is no GPU, stops in time, and says what it has not measured."""

import json
import math
import os
import subprocess
import sys

import pytest

from benchmarks.gpu import programs, summary
from benchmarks.gpu import run as gpu
from jaxtensile import _compat
from jaxtensile.devices.hardware import has_nvidia_driver
from paths import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"


def script(*arguments, out):
    """The script with this Python, its results in ``out``."""
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(out)}
    return subprocess.run([SCRIPT, *arguments], cwd=out, capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.skipif(_compat.JAX_VERSION < (0, 11), reason="the script is for jax 0.11 and newer")
def test_a_dry_run_goes_through_every_kind_of_program(tmp_path):
    done = script("--dry-run", out=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads((tmp_path / "dry-run.json").read_text())
    rows = {row["spec"]: row for row in result["rows"]}
    assert {*rows} == {*gpu.DRY} and result["dry_run"] and min(result["link"].values()) > 0
    assert all(row["least"] > 0 and row["steps"] >= 5 and not row.get("error") for row in rows.values()), rows
    ours, plain = rows["gpt2_small:ours:nothing_saveable"], rows["gpt2_small:plain"]
    assert ours["card_bytes"] == ours["bytes"] <= ours["budget"] < plain["card_bytes"]
    assert summary.difference(ours, result["rows"]) <= 1e-5
    # A first step of Adam is the sign of each gradient, that of those that are nearly zero too.
    assert abs(ours["state_norm"] / plain["state_norm"] - 1) < 1e-3
    assert "gpt2_small:plain" in (tmp_path / "dry-run.md").read_text()
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


def test_what_is_no_program_is_wrong_use(tmp_path):
    for spec in ("gpt3:plain", "gpt2_small:ours", "gpt2_small:policy=some", "gpt2_small:ours,fast:60%"):
        done = script("--dry-run", spec, out=tmp_path)
        assert done.returncode == 2 and f"{spec!r} is no program" in done.stderr
    assert all(map(programs.known_specs, (*gpu.SPECS, *gpu.DRY, "llama:ours,parts,host:123")))


def measured():
    """A result with every kind of row."""
    ran = {"bytes": 90, "card_bytes": 91, "quartiles": [1.1, 1.2, 1.3], "kernels_seconds": 1.0, "loss": [4.0]}
    ours = {**ran, "budget": 100, "model_overhead": 0.1, "kernels_seconds": 1.3}
    rows = [
        {"spec": "gpt2_small:plain", "workload": "gpt2_small", "least": 1.0, **ran},
        {"spec": "gpt2_small:ours:100", "workload": "gpt2_small", "least": 1.2, **ours},
        {"spec": "gpt2_small:ours,host:100", "workload": "gpt2_small", "least": 1.4, **ours, "loss": [5.0]},
        {"spec": "ode:ours:9", "workload": "ode", "budget": 9, "refused": "too | small"},
        {"spec": "lstm:plain", "workload": "lstm", "bytes": 90, "error": "no time left"},
    ]
    machine = {"jax": "0", "python": "3", "date": "today"}
    link = {"to_host": 5e10, "to_device": 4e10}
    return {"machine": machine, "dry_run": False, "device": "NVIDIA H200", "seconds": 9.0, "link": link, "rows": rows}


def test_every_row_of_the_table_has_every_column():
    text = summary.table(measured())
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1, text
    assert "| 1200.00 | 1100.00 1200.00 1300.00 | +20.0% | +30.0% | +10.0% | 0.0e+00 |" in text
    assert "too / small" in text and "no time left" in text and "50.0 GB/s" in text


def test_losses_that_are_no_numbers_differ():
    rows = measured()["rows"]
    rows[1]["loss"] = [math.nan]
    assert summary.difference(rows[1], rows) == math.inf
    assert summary.difference(rows[4], rows) is None


def test_other_tables_say_what_was_measured_and_what_was_not(tmp_path):
    path = tmp_path / "results.json"
    assert "not yet measured" in summary.line(path)
    path.write_text(json.dumps(measured()))
    assert "2 of 2 planned programs are allocated within their budget, 1 have" in summary.line(path)


def test_the_fit_tables_have_that_line_and_the_readme_says_no_more():
    from benchmarks.fit.run import table

    assert ("On a real GPU: not yet measured" in (ROOT / "docs" / "numbers.md").read_text()) == (
        not summary.RESULTS.exists()
    )
    for path in (ROOT / "benchmarks" / "fit").glob("results-*.json"):
        assert summary.line() in table(json.loads(path.read_text()))
