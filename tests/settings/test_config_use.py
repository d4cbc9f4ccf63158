"""``jaxtensile.toml`` in use: what it says of a function is what the function is planned with, key by key."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.api import jit as api
from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.jobs.job import job as make_job
from jaxtensile.planner import pipeline
from jaxtensile.settings import identity, options
from jaxtensile.settings.options import RESERVE
from jaxtensile.units import GIB, MIB

N = 512


def train_step(state, x):
    """Momentum: the mean of 1 MiB may wait on the host."""
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
    mean = 0.9 * state["m"] + gradient
    return {"m": mean, "w": state["w"] - 0.1 * mean}, value


def state():
    return {"m": jnp.zeros((N, N)), "w": jnp.eye(N)}


def loss(weights, x):
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    for w in weights:
        x = block(x, w)
    return jnp.mean(x**2)


def gradients(weights, x):
    return jax.grad(loss)(weights, x)


X = jnp.ones((64, N))
WEIGHTS_AND_ROWS = [jnp.eye(64)] * 4, jnp.ones((2048, 64))


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No config but a test's own, and nothing left to tell of it when the tests end."""
    monkeypatch.setattr(identity, "_files", {})
    monkeypatch.delenv("JAXTENSILE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """What plans were asked for."""
    found = []
    fit = pipeline.fit

    def record(job, **how):
        found.append(job)
        return fit(job, **how)

    monkeypatch.setattr(pipeline, "fit", record)
    return found


def write(text, folder="."):
    Path(folder, "jaxtensile.toml").write_text(text)


def where(report):
    return {s.name: (s.value, Path(s.source).name, s.table) for s in report.settings if s.table}


# ---- a test per key -------------------------------------------------------------------------------


def test_budget():
    write('[functions.gradients]\n\nbudget = "3MiB"\n')
    step = jaxtensile.jit(gradients)
    report = step.plan(*WEIGHTS_AND_ROWS)
    assert report.budget == 3 * MIB >= report.compiled.device
    assert where(report) == {"budget": ("3.00MiB", "jaxtensile.toml:3", "functions.gradients")}
    assert "\n  budget 3.00MiB from jaxtensile.toml:3 [functions.gradients]\n" in str(report)
    assert "objective time, undo True, chunk auto, offload_state False, host_budget 0B by default" in str(report)
    assert "budget 3.00MiB from jaxtensile.toml:3" in report.to_html()
    (first, *_) = report.to_dict()["settings"]
    assert (first["name"], first["value"], first["table"]) == ("budget", "3.00MiB", "functions.gradients")
    for ours, plain in zip(step(*WEIGHTS_AND_ROWS), jax.jit(gradients)(*WEIGHTS_AND_ROWS), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-7)


def test_host_budget(asked):
    write('[functions.train_step]\nhost_budget = "64MiB"\n')
    jaxtensile.jit(train_step).plan(state(), X)
    assert asked[-1].host_budget == 64 * MIB


@pytest.mark.parametrize("objective", list(WEIGHTS))
def test_objective(asked, objective):
    write(f'[functions.train_step]\nobjective = "{objective}"\n')
    jaxtensile.jit(train_step).plan(state(), X)
    assert asked[-1].device.traffic_weight == WEIGHTS[objective]


@pytest.mark.parametrize("undo", [True, False])
def test_undo(undo):
    write(f"[functions.gradients]\nundo = {str(undo).lower()}\n")
    assert jaxtensile.jit(gradients).plan(*WEIGHTS_AND_ROWS).undone == undo


def test_chunk():
    write('[functions.gradients]\nbudget = "1MiB"\nchunk = true\n')
    report = jaxtensile.jit(gradients).plan(*WEIGHTS_AND_ROWS)
    assert any("work on 2048 rows is done in" in note for note in report.notes)
    assert report.fits and report.budget == MIB


def test_offload_state():
    write("[functions.train_step]\noffload_state = true\n")
    step = jaxtensile.jit(train_step, donate_argnums=0)
    new, _ = step(state(), X)
    assert new["m"].sharding.memory_kind == "pinned_host"
    assert new["w"].sharding.memory_kind == "device"
    new, value = step(new, X)
    plain, theirs = state(), None
    for _ in range(2):
        plain, theirs = jax.jit(train_step)(plain, X)
    np.testing.assert_allclose(value, theirs, rtol=1e-5)
    with jax.disable_jit():  # what waits on the host is brought back for it
        step(new, X)


def test_host_of_the_device_bounds_the_state_that_waits():
    write("[device]\nhost = 1000\n[functions.train_step]\noffload_state = true\n")
    new, _ = jaxtensile.jit(train_step, donate_argnums=0)(state(), X)
    assert new["m"].sharding.memory_kind == "device"


def test_capacity_and_reserve():
    write('[device]\ncapacity = "64MiB"\n[device.cpu]\nreserve = "32MiB"\n')
    report = jaxtensile.jit(train_step).plan(state(), X)
    assert report.budget == 32 * MIB
    assert where(report) == {"budget": ("32.00MiB", "jaxtensile.toml:2", "device")}
    assert jaxtensile.jit(train_step, budget="50%").plan(state(), X).budget == 32 * MIB


# ---- code, file, default --------------------------------------------------------------------------


def test_the_code_wins(asked):
    write('[functions."*"]\nbudget = "1KiB"\nchunk = true\nundo = false\nobjective = "time"\noffload_state = true\n')
    step = jaxtensile.jit(
        train_step, budget="1GiB", chunk=False, undo=True, objective="flops", offload_state=False, host_budget=0
    )
    step(state(), X)
    job = asked[-1]
    assert (job.budget, job.chunk, job.undo, job.state_budget) == (GIB, False, True, 0)
    assert {s.source for s in job.settings} == {"code"}


def test_without_a_file_all_is_as_it_was(asked):
    report = jaxtensile.jit(train_step).plan(state(), X)
    assert report.budget == asked[-1].device.capacity - RESERVE
    assert {s.source for s in report.settings} == {"default"}
    assert "by default" not in str(report)


def test_a_call_that_the_code_asks_nothing_of_is_planned_where_the_file_does(asked):
    jaxtensile.jit(train_step)(state(), X)
    assert not asked  # it has ample room
    write('[device]\ncapacity = "3MiB"\n')
    with pytest.raises(jaxtensile.BudgetError, match=r"budget 3\.00MiB is below"):
        jaxtensile.jit(train_step)(state(), X)
    write('[functions.train_step]\nbudget = "1GiB"\n')
    jaxtensile.jit(train_step)(state(), X)
    assert [job.budget for job in asked] == [3 * MIB, GIB]


def test_a_decorator_and_a_method_are_named_by_where_they_are(asked):
    write(
        f'[functions."Trainer.step"]\nbudget = "3MiB"\n[functions."{Path(__file__).name}:*"]\nbudget = "2GiB"\n'
        '[functions."elsewhere.py:*"]\nbudget = 1\n'
    )

    class Trainer:
        @jaxtensile.jit(static_argnums=0)
        def step(self, x):
            return x * 2

    jaxtensile.jit(train_step)(state(), X)
    assert asked[-1].budget == 2 * GIB
    Trainer().step(X)
    assert asked[-1].budget == 3 * MIB


def test_filter_jit_is_named_by_the_function_of_the_user(asked):
    pytest.importorskip("equinox")
    write(f'[functions."{Path(__file__).name}:train_step"]\nbudget = "1GiB"\n')
    jaxtensile.filter_jit(train_step)(state(), X)
    assert asked[-1].budget == GIB
    jaxtensile.filter_jit(train_step, config={"functions": {"train_step": {"budget": "2GiB"}}})(state(), X)
    assert asked[-1].budget == 2 * GIB


# ---- when it is read ------------------------------------------------------------------------------


def test_it_is_read_at_the_first_call_and_again_after_clear_cache(asked, monkeypatch):
    reads = []
    read = options.configs.read
    monkeypatch.setattr(options.configs, "read", lambda *a, **k: reads.append(a) or read(*a, **k))
    step = jaxtensile.jit(lambda x: x + 1)
    assert step.eval_shape(X).shape == X.shape
    write('[functions."<lambda>"]\nbudget = "1GiB"\n')  # written after the function
    step(X), step(X)
    write('[functions."<lambda>"]\nbudget = "2GiB"\n')
    step(X), step(X[:2])
    assert ([job.budget for job in asked], len(reads)) == ([GIB, GIB], 1)
    step.clear_cache()
    step(X), step(X)
    assert ([job.budget for job in asked], len(reads)) == ([GIB, GIB, 2 * GIB], 2)


def test_later_calls_do_not_come_to_python(monkeypatch):
    write('[functions."<lambda>"]\nbudget = "1GiB"\n')
    step = jaxtensile.jit(lambda x: x + 1)
    step(X), step(X)
    monkeypatch.setattr(api.Planned, "_chosen", None)
    monkeypatch.setattr(options, "config_of", None)
    assert step(X)[0, 0] == 2


def test_an_error_in_the_file_is_one_of_the_call_until_it_is_mended():
    write("[functions.train_step]\nbudget = 1GiB\n")
    step = jaxtensile.jit(train_step)
    for _ in range(2):
        with pytest.raises(jaxtensile.ConfigError, match=r"jaxtensile\.toml: not TOML"):
            step(state(), X)
    write('[functions.train_step]\nbugdet = "1GiB"\n')
    with pytest.raises(jaxtensile.ConfigError, match=r"toml:2: unknown key 'bugdet' in .* did you mean 'budget'"):
        step(state(), X)
    write('[functions.train_step]\nbudget = "1GiB"\n')
    step(state(), X)


def test_inside_another_program_and_without_jit_it_is_not_asked_for():
    write("this is no TOML")
    step = jaxtensile.jit(lambda x: x + 1, config="jaxtensile.toml")
    assert jax.jit(step)(1.0) == jax.vmap(step)(jnp.ones(1))[0] == 2
    with jax.disable_jit():
        assert step(1.0) == 2


def test_tables_in_the_code_are_checked_where_they_are_written():
    with pytest.raises(jaxtensile.ConfigError, match=r"config: unknown key 'function': did you mean 'functions'"):
        jaxtensile.jit(config={"function": {}})
    jaxtensile.jit(train_step, config="not there")  # a file may come later


def test_names_that_nothing_has_are_told_once(recwarn):
    write('[functions.train_stpe]\nbudget = "1GiB"\n[functions.other]\nbudget = "1GiB"\n')
    for _ in range(2):
        jaxtensile.jit(train_step)(state(), X)
    (said,) = [w for w in recwarn if w.category is jaxtensile.ConfigWarning]
    assert (Path(said.filename).name, said.lineno) == ("jaxtensile.toml", 2)
    assert "did you mean 'train_step'?" in str(said.message)


# ---- jobs -----------------------------------------------------------------------------------------


def test_a_step_of_a_job_has_its_lease_and_the_other_options_of_its_config():
    config = {"device": {"cpu": {"capacity": "64MiB"}}, "functions": {"train_step": {"budget": 1, "undo": False}}}
    with make_job("one", config=config) as job:
        step = jaxtensile.jit(train_step, job=job)
        step(state(), X)
        settings = {s.name: s for s in step.plan(state(), X).settings}
        assert (settings["budget"].source, settings["undo"].value, settings["undo"].table) == (
            "job",
            "False",
            "functions.train_step",
        )
        assert 0 < job.budget <= 64 * MIB
        other = {**config, "functions": {}}  # which is nothing to the coordinator
        with make_job("two", config=other):
            pass


# ---- estimate, plan, doctor -----------------------------------------------------------------------


def test_estimate_heeds_the_budget_of_the_function_and_the_device():
    known = jaxtensile.estimate(train_step, state(), X)
    assert known.fits() and known.budget is None and not known.settings
    write('[device]\ncapacity = "1GiB"\n[functions.train_step]\nbudget = "1MiB"\n[functions."*"]\nchunk = true\n')
    found = jaxtensile.estimate(train_step, state(), X)
    assert (found.budget, found.capacity, found.fits()) == (MIB, GIB, False)
    assert "budget 1.00MiB from jaxtensile.toml:4 [functions.train_step]" in str(found)
    assert found.to_dict()["budget"] == MIB
    other = jaxtensile.estimate(gradients, *WEIGHTS_AND_ROWS, target="nvidia-l4")
    assert (other.budget, other.capacity, other.fits()) == (GIB, GIB, True)
    assert not jaxtensile.estimate(train_step, state(), X, config={"device": {"cuda": {"capacity": MIB}}}).fits(
        "nvidia-l4"
    )
    assert jaxtensile.estimate(train_step, state(), X, config={}).fits("nvidia-l4")
