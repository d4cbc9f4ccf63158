"""Which tables of ``[functions]`` hold for a function, and what of them counts: the nearest, key by key."""

import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.errors import ConfigError
from jaxtensile.runtime.config.config import parse
from jaxtensile.runtime.config.functions import KEYS, FunctionConfig, Identity, nearest_first, said_of
from paths import ROOT

STEP = Identity(("train_step", "Trainer.train_step", "project.train.Trainer.train_step"), "/home/u/project/train.py")
HOLD = (
    "train_step",
    "Trainer.train_step",
    "project.train.Trainer.train_step",
    "*",
    "train_*",
    "*.train_*",
    "train_ste[pq]",
    "t????_step",
    "train.py:train_step",
    "project/train.py:Trainer.train_step",
    "./train.py:train_step",
    "/home/u/project/train.py:train_step",
    "*.py:*",
    "project/*.py:train_*",
)
DO_NOT = (
    "train",
    "step",
    "Train_step",
    "train_step ",
    "*.eval_*",
    "rain.py:train_step",
    "other/train.py:train_step",
    "/train.py:train_step",
    "train.py:eval_step",
    "train_step[ab]",
)


def says(**functions):
    return {name: FunctionConfig(**keys) for name, keys in functions.items()}


@pytest.mark.parametrize("name", HOLD)
def test_a_name_that_holds(name):
    assert nearest_first([name], STEP) == [name]


@pytest.mark.parametrize("name", DO_NOT)
def test_a_name_that_does_not(name):
    assert nearest_first([name], STEP) == []


def test_a_function_of_no_file_has_no_table_with_one():
    assert nearest_first(["train.py:f", "*:f", "f"], Identity(("f",))) == ["f"]


def test_names_before_patterns_files_before_none_long_before_short_and_the_first_of_equals():
    order = [
        "project/train.py:train_step",
        "train.py:train_step",
        "Trainer.train_step",
        "train_step",
        "project/*.py:train_*",
        "*.py:*",
        "*.train_*",
        "t*_step",
        "*_step*",
        "*",
    ]
    assert nearest_first(order, STEP) == order
    assert nearest_first(reversed(order), STEP)[:7] == order[:7]  # two of the rest are as long


@given(st.permutations(HOLD))
def test_the_order_in_the_file_decides_between_equals_alone(names):
    first = nearest_first(HOLD, STEP)
    found = nearest_first(names, STEP)
    assert sorted(found) == sorted(first)
    key = {name: (not set("*?[") & set(name), ":" in name, len(name)) for name in HOLD}
    assert [key[name] for name in found] == [key[name] for name in first]
    for one, other in pairwise(found):
        assert key[one] > key[other] or names.index(one) < names.index(other)


def test_each_key_is_from_the_nearest_table_that_has_it():
    tables = {
        "*": FunctionConfig(budget="1GiB", chunk=True, objective="time"),
        "train_*": FunctionConfig(budget="2GiB", chunk=False),
        "train_step": FunctionConfig(budget="3GiB"),
        "eval_step": FunctionConfig(undo=False),
    }
    assert said_of(tables, STEP) == {
        "budget": ("3GiB", "train_step"),
        "chunk": (False, "train_*"),
        "objective": ("time", "*"),
    }
    assert said_of(tables, Identity(("other",))) == {
        "budget": ("1GiB", "*"),
        "chunk": (True, "*"),
        "objective": ("time", "*"),
    }


def test_what_a_table_may_say():
    assert FunctionConfig.__struct_fields__ == KEYS
    for objective in WEIGHTS:
        config = parse(f"[functions.f]\nobjective = '{objective}'")
        assert config.functions["f"].said() == {"objective": objective}


def test_a_whole_table_and_its_lines():
    text = """
[device]
capacity = "80GiB"  # 3
reserve = "1GiB"
host = "64GiB"

[functions."*.train_*"]
budget = "50%"      # 8
host_budget = "8GiB"
objective = "time"
undo = false
chunk = true
offload_state = true
[functions.'train.py:step[ab]']
budget = 1          # 15
[functions]
short = { budget = 2 }      # 17
long.budget = 3
"""
    config = parse(text, "there.toml")
    assert config.functions["*.train_*"].said() == {
        "budget": "50%",
        "host_budget": "8GiB",
        "objective": "time",
        "undo": False,
        "chunk": True,
        "offload_state": True,
    }
    lines = {path: int(place.removeprefix("there.toml:")) for path, place in config.places.items()}
    assert lines == {
        **{("device", key): 3 + k for k, key in enumerate(("capacity", "reserve", "host"))},
        **{("functions", "*.train_*", key): 8 + k for k, key in enumerate(KEYS)},
        ("functions", "train.py:step[ab]", "budget"): 15,
        ("functions", "short", "budget"): 17,
        ("functions", "long", "budget"): 18,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[functions.f]\nbugdet = 1", "toml:2: unknown key 'bugdet' in [functions.f]: did you mean 'budget'?"),
        ("[functions.'*.f']\nbudget = 1\nsolver = 'x'", "toml:3: unknown key 'solver' in [functions.\"*.f\"]"),
        ("[function.f]\nbudget = 1", "unknown key 'function': did you mean 'functions'?"),
        ("functions = 1", "toml:1: functions = 1: must be a table"),
        ("[functions]\nf = '1GiB'", "toml:2: functions.f = '1GiB': must be a table"),
        ("[functions.f]\nbudget = true", "toml:2: functions.f.budget = True: must be a size"),
        ("[functions.f]\nbudget = '1XB'", "toml:2: functions.f.budget: unknown unit 'XB'"),
        ("[functions.f]\nbudget = '120%'", "is more than the whole device"),
        ("[functions.f]\nbudget = 0", "functions.f.budget = 0: must be a size above 0"),
        ("[functions.f]\nbudget = '0%'", "functions.f.budget = '0%': must be a size above 0"),
        ("[functions.f]\nbudget = -1", "non-negative"),
        ("[functions.f]\nhost_budget = []", "functions.f.host_budget = []: must be a size"),
        ("[functions.f]\nobjective = 'fast'", "toml:2: functions.f.objective = 'fast': must be flops or time"),
        ("[functions.f]\nundo = 1", "toml:2: functions.f.undo = 1: must be true or false"),
        ("[functions.f]\nchunk = 'yes'", "functions.f.chunk = 'yes': must be true, false or auto"),
        ("[functions.f]\noffload_state = 'host'", "functions.f.offload_state = 'host': must be true or false"),
        ("[functions.'']\nbudget = 1", "names no function: write [functions."),
        ("[functions.'train.py:']\nbudget = 1", 'toml:1: [functions."train.py:"] names no function'),
        ("[functions.':step']\nbudget = 1", "names no function"),
        (
            "[device]\ncapacity = '8GiB'\nreserve = '1GiB'\n[functions.f]\nbudget = '8GiB'",
            "toml:5: functions.f.budget = '8GiB': must be at most 7.00GiB, capacity less reserve",
        ),
        ("[device]\ncapacity = '8GiB'\nreserve = '1GiB'\n[functions.f]\nbudget = '90%'", "must be at most 7.00GiB"),
        (
            "[device]\nhost = '8GiB'\n[functions.f]\nhost_budget = '9GiB'",
            "toml:4: functions.f.host_budget = '9GiB': must be at most 8.00GiB, host of [device]",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text, said):
    with pytest.raises(ConfigError) as wrong:
        parse(text)
    assert said in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_a_size_that_some_device_may_have_is_not_refused_before_it_is_known():
    parse("[device.cuda]\ncapacity = '8GiB'\n[functions.f]\nbudget = '16GiB'")  # for what is no GPU
    parse("[device]\ncapacity = '8GiB'\n[device.tpu]\ncapacity = '32GiB'\n[functions.f]\nbudget = '16GiB'")
    parse("[functions.f]\nbudget = '50%'\nhost_budget = '100%'")


def test_no_jax_is_needed_to_check_a_config(tmp_path):
    file = tmp_path / "jaxtensile.toml"
    file.write_text("[functions.f]\nbudget = '1GiB'\n")
    code = "import sys; from jaxtensile.cli.main import main; code = main(['config']); "
    code += "sys.exit(code or 'jax' in sys.modules)"
    environment = {"PYTHONPATH": str(ROOT)}

    def checked():
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = checked()
    assert done.returncode == 0, done.stderr
    assert re.search(r"functions\.f\.budget +1GiB +jaxtensile\.toml:2", done.stdout), done.stdout
    file.write_text("[functions.f]\nbugdet = '1GiB'\n")
    done = checked()
    assert done.returncode == 2
    assert "jaxtensile.toml:2: unknown key 'bugdet'" in done.stderr
