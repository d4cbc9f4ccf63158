"""What a function may be called in a config, and that a name which nothing has is told once."""

import functools
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

import jaxtensile
from jaxtensile.errors import ConfigError, ConfigWarning
from jaxtensile.runtime.config.config import from_tables, parse
from jaxtensile.settings import identity
from jaxtensile.settings.identity import identity_of, planned, stand_in, tell
from paths import ROOT

HERE = str(Path(__file__).resolve())


def step(x):
    return x


class Trainer:
    def step(self, x):
        return x

    def __call__(self, x):
        return x

    @jaxtensile.jit
    def planned(self, x):
        return x


def logged(fun):
    @functools.wraps(fun)
    def run(*args):
        return fun(*args)

    return run


def made():
    def inner(x):
        return x

    return inner


@pytest.mark.parametrize(
    ("fun", "name", "long"),
    [
        (step, "step", "step"),
        (logged(step), "step", "step"),
        (functools.partial(functools.partial(step)), "step", "step"),
        (jax.jit(step), "step", "step"),
        (jaxtensile.jit(step), "step", "step"),
        (jax.value_and_grad(step), "step", "step"),
        (Trainer().step, "step", "Trainer.step"),
        (Trainer.step, "step", "Trainer.step"),
        (Trainer.planned, "planned", "Trainer.planned"),
        (Trainer(), "Trainer", "Trainer"),
        (functools.partial(Trainer()), "Trainer", "Trainer"),
        (made(), "inner", "made.inner"),
        (logged(made()), "inner", "made.inner"),
    ],
    ids=range(13),  # what the functions are printed as differs from process to process
)
def test_names_and_file_of(fun, name, long):
    who = identity_of(fun)
    assert {name, long, f"{__name__}.{long}"} <= set(who.names)
    assert who.names[0] == name
    assert who.file == HERE


def test_what_is_no_python_has_names_and_no_file():
    assert identity_of(len).names[0] == "len"
    assert identity_of(len).file == ""


def test_a_stand_in_is_called_what_it_stands_for():
    def run(x):
        return x

    stand_in(run, step)
    assert identity_of(run) == identity_of(step)
    count = len(identity._stand_ins)
    del run
    assert len(identity._stand_ins) == count - 1


# ---- names that nothing has -----------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(identity, "_files", {})


def config(*names, file="jaxtensile.toml"):
    return parse("\n".join(f'[functions."{name}"]\nbudget = "1GiB"' for name in names), file)


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(w.category is ConfigWarning for w in found)
    return [(w.filename, w.lineno, str(w.message)) for w in found]


def test_nothing_is_told_of_names_that_are_there(fresh):
    known = config("step", "*.step", "test_identity.py:step", "*")
    assert warned(lambda: planned(known, identity_of(step))) == []
    assert warned(tell) == []


def test_a_near_miss_is_told_at_once_and_once(fresh):
    known = config("step", "train_stpe")
    who = identity.Identity(("train_step",))
    assert warned(lambda: planned(known, who)) == [
        ("jaxtensile.toml", 4, "[functions.train_stpe] names no function so far: did you mean 'train_step'?")
    ]
    assert warned(lambda: planned(known, who)) == []
    assert [text for _, _, text in warned(tell)] == [
        "[functions.step] names no function that was planned: the nearest of 1 is 'train_step'"
    ]
    assert warned(tell) == []


def test_a_function_with_its_own_table_is_no_near_miss_of_another(fresh):
    known = config("train_step", "train_steps", "*")
    assert warned(lambda: planned(known, identity.Identity(("train_step",)))) == []
    assert warned(lambda: planned(known, identity.Identity(("train_steps",)))) == []
    assert warned(tell) == []


def test_what_nothing_is_near_to_is_told_at_the_end(fresh):
    known = config("trainer.py:evaluate", "*_later")
    assert warned(lambda: planned(known, identity.Identity(("step",)))) == []
    told = warned(tell)
    assert [line for _, line, _ in told] == [2, 4]
    assert all("the nearest of 1 is 'step'" in text for _, _, text in told)


def test_tables_of_scripts_that_were_not_loaded_are_theirs(fresh, tmp_path):
    (tmp_path / "evaluate.py").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "serve.py").touch()
    names = "evaluate.py:step", "project/*.py:*", "evalaute.py:step", "test_identity.py:no_such", "*.txt:step", "/x/*:a"
    shared = config(*names, file=str(tmp_path / "jaxtensile.toml"))
    assert [line for _, line, _ in warned(lambda: planned(shared, identity.Identity(("step",))))] == [6]
    assert [line for _, line, _ in warned(tell)] == [8, 10, 12]


def test_where_warnings_are_errors_it_is_one_of_the_config(fresh):
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=r"toml:2: \[functions\.stepp\] names no function"):
        warnings.simplefilter("error")
        planned(config("stepp"), identity_of(step))


def test_a_name_that_was_mended_is_no_more_told_of(fresh):
    assert warned(lambda: planned(config("*_later"), identity_of(step))) == []
    assert warned(lambda: planned(config("step"), identity_of(step))) == []
    assert warned(tell) == []


def test_tables_of_the_code_are_files_of_their_own(fresh):
    for name in ("first", "second"):
        planned(from_tables({"functions": {name: {"budget": 1}}}), identity_of(step))
    assert [(where, text.split()[0]) for where, _, text in warned(tell)] == [
        ("config", "[functions.first]"),
        ("config", "[functions.second]"),
    ]


def test_nothing_is_told_where_nothing_was_planned(fresh):
    config("step")
    assert warned(tell) == []


def test_the_process_tells_it_on_its_way_out(tmp_path):
    (tmp_path / "jaxtensile.toml").write_text('[functions.evaluate]\nbudget = "1GiB"\n')
    (tmp_path / "train.py").write_text(
        "from jaxtensile.settings.identity import identity_of, planned\n"
        "from jaxtensile.settings.options import config_of\n"
        "def step(x): ...\nfor _ in range(2): planned(config_of(None), identity_of(step))\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")
    where = tmp_path / "jaxtensile.toml"
    assert done.stderr.splitlines()[0] == (
        f"{where}:2: ConfigWarning: [functions.evaluate] names no function that was planned: the nearest of 1 is 'step'"
    )
