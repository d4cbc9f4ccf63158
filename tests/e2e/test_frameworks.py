"""The scripts of examples/frameworks, which know nothing of jaxtensile, print the same under a budget that they miss.

Those that compile for long, or of libraries that the tests do not install, are run by hand:
examples/frameworks/README.md.
"""

import contextlib
import io
import re
import runpy
import sys

import jax
import pytest

import jaxtensile
from jax_lines import in_a_soak
from jaxtensile.api import install
from paths import ROOT

FOLDER = ROOT / "examples" / "frameworks"
SIZES = {
    "linen_lm": "--layers 1 --width 32 --batch 16 --context 32 --steps 2",
    "linen_decode": "--layers 4 --width 64 --batch 4 --context 256 --steps 2",
    "nnx_scan": "--layers 3 --width 32 --batch 256 --steps 2",
}


def run(name, monkeypatch):
    """The numbers that a script prints."""
    monkeypatch.setattr(sys, "argv", [name, *SIZES[name].split()])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return [float(number) for number in re.findall(r"\d+\.\d+", printed.getvalue())]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("linen_lm", marks=in_a_soak), "linen_decode", "nnx_scan"])
def test_a_script_prints_the_same_within_a_budget(name, monkeypatch):
    expected = run(name, monkeypatch)
    assert len(expected) >= 2
    jax.clear_caches()  # what JAX has compiled is not compiled again
    with jaxtensile.installed(budget="64KiB", best_effort=True):
        found = run(name, monkeypatch)
        programs = install._installed._session.tally.programs
    assert found == pytest.approx(expected, rel=1e-4)
    faults = [p.why for p in programs if "fault" in p.why]
    assert programs and not faults
    smaller = [p for p in programs if p.report is not None and p.report.compiled.device < p.report.baseline.device]
    assert smaller, [(p.name, p.why) for p in programs]
