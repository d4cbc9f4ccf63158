"""Plans outlive a process, are found by what they depend on, and never stop anybody or break a budget."""

import hashlib
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.planner import page, plan_cache, recall, trial_compiles
from jaxtensile.planner.plan_cache import MOST, VARIABLE, PlanCache
from paths import TESTS
from programs import FAST, chain_args, squeezed, step

ARGS = chain_args(layers=8, width=8, rows=256)
OPTIONS = {"compiler_options": FAST}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plans"))
    plan_cache._say_once.cache_clear()
    return tmp_path / "plans"


@pytest.fixture(scope="module")
def budget():
    """A budget that takes a plan."""
    found = squeezed(step, *ARGS, **OPTIONS)
    assert found is not None
    return found[1].budget


def planned(budget, fun=step, args=ARGS, **options):
    made = jaxtensile.jit(fun, budget=budget, **OPTIONS, **options)
    return made, made.plan(*args)


def files(folder):
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_a_second_time_nothing_is_solved(folder, budget, monkeypatch):
    first, report = planned(budget)
    assert not report.unchanged and len(files(folder)) == 1
    monkeypatch.setattr(page.Candidates, "cheapest", lambda *_: pytest.fail("planned again"))
    again, same = planned(budget)
    assert any("earlier process" in note for note in same.notes)
    assert same.compiled == report.compiled and same.actions == report.actions and same.predicted == report.predicted
    assert same.recompute_flops == report.recompute_flops and same.stages == report.stages
    assert str(again.trace(*ARGS).jaxpr) == str(first.trace(*ARGS).jaxpr)
    for a, b in zip(jax.tree.leaves(again(*ARGS)), jax.tree.leaves(first(*ARGS)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_fits_as_it_is_is_not_kept(folder):
    assert planned("1GiB")[1].unchanged
    assert files(folder) == []


def test_every_part_of_the_question_counts(folder, budget):
    planned(budget)
    count = len(files(folder))
    other = [x + 0 for x in ARGS[0]], jnp.ones((260, 8))
    for given in (
        {"budget": budget + 1},
        {"budget": budget, "solver": "greedy"},
        {"budget": budget, "host_budget": "1MiB"},
        {"budget": budget, "undo": False},
        {"budget": budget, "keep_unused": True},
        {"budget": int(budget * 1.02), "args": other},
    ):
        planned(**given)
        assert len(files(folder)) == count + 1, given
        count += 1


def test_flags_of_the_environment_count(folder, budget, monkeypatch):
    planned(budget)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--something")
    planned(budget)
    assert len(files(folder)) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign", "garbage", "not UTF-8"])
def test_a_damaged_file_costs_one_warning_and_is_written_anew(folder, budget, damage):
    planned(budget)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    if damage == "foreign":  # another question's plan under this one's name
        planned(budget + 1)
        (other,) = (p for p in folder.iterdir() if p != path)
        path.write_bytes(other.read_bytes())
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        bad = {"cut": content[:middle], "changed": flipped, "empty": b"", "garbage": os.urandom(1000)}
        text = content[32:].replace(path.stem.encode(), b"\xff" * len(path.stem))  # with the digest of what it holds
        bad["not UTF-8"] = hashlib.sha256(text).digest() + text
        path.write_bytes(bad[damage])
    with pytest.warns(RuntimeWarning, match="passed over") as caught:
        report = planned(budget)[1]
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    assert not any("earlier process" in note for note in report.notes)
    assert path.read_bytes() == content, "made anew"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any("earlier process" in note for note in planned(budget)[1].notes)


def test_a_plan_that_the_checker_refuses_is_passed_over(folder, budget, monkeypatch):
    planned(budget)
    real = recall.replay

    def bent(*args):
        variant, plan = real(*args)
        program = replace(plan.program, origin=(*plan.program.origin[1:], 0))
        return variant, replace(plan, program=program)

    monkeypatch.setattr(recall, "replay", bent)
    with pytest.warns(RuntimeWarning, match="planned program is wrong"):
        report = planned(budget)[1]
    assert report.fits and not any("earlier process" in note for note in report.notes)


def test_a_plan_that_needs_more_here_is_made_anew(folder, budget, monkeypatch):
    """As after an update of a driver: XLA's number decides, whatever the file says."""
    planned(budget)
    again, calls = trial_compiles.TrialCompiles.again, []

    def larger(*args):
        made = again(*args)
        compiled = made.compiled
        calls.append(made)
        more = replace(compiled, memory=replace(compiled.memory, temp=compiled.memory.temp + budget))
        return replace(made, compiled=more)

    monkeypatch.setattr(trial_compiles.TrialCompiles, "again", larger)
    report = planned(budget)[1]
    assert len(calls) == 1 and report.compiled.device <= budget
    assert not any("earlier process" in note for note in report.notes)


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, budget, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(VARIABLE, str(file / "plans"))
    plan_cache._say_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="no plan is kept") as caught:
        assert planned(budget)[1].fits
        assert planned(budget)[1].fits
    assert len(caught) == 1


@pytest.mark.parametrize("word", ["off", "0", "OFF", "none"])
def test_it_can_be_switched_off(word, monkeypatch):
    monkeypatch.setenv(VARIABLE, word)
    assert plan_cache.plan_cache() is None


def test_it_lies_in_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/u")
    assert plan_cache.plan_cache() == PlanCache(Path("/var/cache/u/jaxtensile/plans"))


def test_the_least_used_plans_are_forgotten(folder, budget, monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST", 10)
    planned(budget)
    (path,) = folder.iterdir()
    for i in range(10):
        other = folder / f"{i}.plan"
        other.write_bytes(b"")
        os.utime(other, (i, i))
    planned(budget + 1)
    left = files(folder)
    assert len(left) == 9 and path.name in left and "0.plan" not in left and "9.plan" in left
    assert MOST > 100


PROCESS = """
import sys, jax
sys.path.insert(0, {tests!r})
from programs import FAST, chain_args, step
import jaxtensile
made = jaxtensile.jit(step, budget={budget}, compiler_options=FAST)
args = chain_args(layers=8, width=8, rows=256)
report = made.plan(*args)
print("recalled" if any("earlier process" in n for n in report.notes) else "solved", report.compiled.device)
"""


def test_another_process_finds_it(folder, budget):
    program = PROCESS.format(tests=str(TESTS), budget=budget)
    told = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert [word for word, _ in told] == ["solved", "recalled"]
    assert told[0][1] == told[1][1]
