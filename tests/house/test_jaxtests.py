"""The harness that runs JAX's tests with ours in the place of ``jax.jit``, on a test file of our own."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks.jaxtests.run import compared
from paths import ROOT

MINIATURE = """
import functools
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit
from jax._src import api, test_util


@jax.jit
def decorated(x):
    return x + 1


@functools.partial(jax.jit, static_argnums=1)
def partly(x, n):
    return x + n


class Test(unittest.TestCase):
    def test_values(self):
        for f in (decorated, jit(lambda x: x + 1), api.jit(lambda x: x + 1)):
            np.testing.assert_array_equal(f(jnp.zeros(3)), np.ones(3))

    def test_static(self):
        self.assertEqual(partly(1, 2), 3)

    def test_whose(self):
        self.assertIs(type(decorated), type(jax.numpy.sin))

    def test_inside(self):
        self.assertIs(type(jax.jit(lambda x: x)), type(jax.jit(lambda x: x)))
        self.assertIsInstance(jax.nn.relu(1.0), jax.Array)

    def test_checkpoint(self):
        wave = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
        self.assertEqual(jit(jax.value_and_grad(lambda x: wave(x).sum()))(jnp.zeros(1 << 18))[1][0], 1.0)

    def test_stdout(self):
        with test_util.capture_stdout() as output:
            print("here")
        self.assertIn("here", output())

    def test_of_both(self):
        self.fail("whoever runs it")

    @unittest.skip("of nobody")
    def test_of_nobody(self):
        pass
"""
PLANTED = """
import sys

if "jaxtensile" in sys.modules:
    from jaxtensile.api.jit import Planned

    right = Planned.__call__
    Planned.__call__ = lambda self, *a, **k: right(self, *a, **k) + 1
"""


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """What the harness says of the file in mode one, with a bug and without."""
    tests = tmp_path_factory.mktemp("checkout") / "tests"
    tests.mkdir()
    results = {}
    for name, planted in (("sound", ""), ("planted", PLANTED)):
        (tests / "miniature_test.py").write_text(planted + MINIATURE)
        command = [sys.executable, "-m", "benchmarks.jaxtests.run", "--mode", "one", "--again", "miniature"]
        folders = ["--out", str(tests.parent / name), "--keep", str(tests.parent)]
        environment = {**os.environ, "JAX_TESTS": str(tests), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, *folders], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        file = tests.parent / name / f"results-jax{jax.__version__}.json"
        results[name] = json.loads(file.read_text())["modes"]["one"][0]
        assert "only ours" in file.with_suffix(".md").read_text().lower()
    return results


def only_ours(row):
    return [test["id"].partition("::")[2] for test in row["only_ours"]]


def test_a_test_that_only_ours_fails_is_told(miniature):
    assert only_ours(miniature["sound"]) == ["test_whose"]
    assert sorted(only_ours(miniature["planted"])) == ["test_checkpoint", "test_static", "test_values", "test_whose"]
    assert [i.partition("::")[2] for i in miniature["planted"]["wrong_values"]] == ["test_values"]


def test_what_fails_with_jax_and_what_is_skipped_is_nobodys(miniature):
    row = miniature["sound"]
    assert (row["tests"], row["passed"], row["failed_with_both"], row["skipped"]) == (8, 5, 1, 1)


def test_programs_are_counted(miniature):
    assert miniature["sound"]["programs"] == 1  # the others have ample room
    assert miniature["sound"]["planned"] == 1  # its checkpoint is undone


def test_a_test_that_never_ended_is_told():
    ours = [{"id": "a", "outcome": "died", "error": "status -6"}, {"id": "b", "outcome": "late"}]
    row = compared("file", ours, [{"id": "a", "outcome": "passed"}, {"id": "b", "outcome": "failed"}])
    assert [(t["id"], t["outcome"]) for t in row["only_ours"]] == [("a", "died")]
