"""What a function is asked for: its code first, then the config, then the defaults, and each says where it is from."""

import copy
import inspect
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtensile
from jaxtensile.devices.hardware import host_memory
from jaxtensile.errors import BudgetError, ConfigError
from jaxtensile.runtime.config.config import Config, from_tables, parse
from jaxtensile.runtime.config.functions import KEYS, Identity
from jaxtensile.settings.options import RESERVE, Asked, Unsaid, config_of, resolved
from jaxtensile.units import GIB, MIB

STEP = Identity(("step",))
SAID = {
    "budget": "5GiB",
    "host_budget": "2GiB",
    "objective": "time",
    "undo": False,
    "chunk": True,
    "offload_state": True,
}
CODE = {
    "budget": 3 * GIB,
    "host_budget": GIB,
    "objective": "flops",
    "undo": True,
    "chunk": False,
    "offload_state": False,
}
DEFAULTS = {"host_budget": 0, "objective": "time", "undo": True, "chunk": "auto", "offload_state": False}


def config(device=None, **step):
    return from_tables({"device": device or {}, "functions": {"step": step} if step else {}})


def outcome(found, capacity=80 * GIB):
    """The values that count, by the names of the options."""
    return {
        "budget": found.budget(["cuda:0"], capacity)[0],
        "host_budget": found.host_budget,
        "objective": found.objective,
        "undo": found.undo,
        "chunk": found.chunk,
        "offload_state": found.offloads,
    }


def sources(found):
    budget = found.budget(["cuda:0"], 80 * GIB)[1]
    return {s.name: (s.source, s.table) for s in (budget, *found.settings)}


@given(st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS)))
def test_the_code_wins_over_the_file_and_the_file_over_the_default(in_code, in_file):
    known = config(**{key: SAID[key] for key in in_file})
    found = resolved(Asked(**{key: CODE[key] for key in in_code}), known, STEP)
    values, where = outcome(found), sources(found)
    sizes = {"budget": 5 * GIB, "host_budget": 2 * GIB}
    for key in KEYS:
        if key in in_code:
            assert (values[key], where[key]) == (CODE[key], ("code", ""))
        elif key in in_file:
            assert (values[key], where[key]) == (sizes.get(key, SAID[key]), ("config", "functions.step"))
        else:
            assert (values[key], where[key]) == (DEFAULTS.get(key, 80 * GIB - RESERVE), ("default", ""))


def test_a_default_can_be_told_from_the_same_value_in_the_code():
    known = config(chunk=True, undo=False, objective="time")
    assert resolved(Asked(), known, STEP).chunk
    assert not resolved(Asked(chunk=False), known, STEP).chunk
    parameters = inspect.signature(jaxtensile.jit).parameters
    shown = {name: repr(p.default) for name, p in parameters.items() if name in KEYS}
    defaults = {"objective": "'time'", "undo": "True", "chunk": "'auto'", "offload_state": "False"}
    assert shown == {"budget": "None", "host_budget": "None", **defaults}
    for name in defaults:
        default = parameters[name].default
        assert bool(default) == bool(default.value)
        assert all(
            isinstance(c, Unsaid) and c.value == default.value
            for c in (copy.deepcopy(default), pickle.loads(pickle.dumps(default)))
        )


# ---- the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name", "bytes_", "table"),
    [
        ({}, "cuda:0", 80 * GIB - RESERVE, ""),
        ({"capacity": "60GiB"}, "cuda:0", 60 * GIB, "device"),
        ({"capacity": "60GiB", "reserve": "10%"}, "cuda:0", 54 * GIB, "device"),
        ({"reserve": "2GiB"}, "cuda:0", 78 * GIB, "device"),
        ({"capacity": "100GiB"}, "cuda:0", 80 * GIB, "device"),  # no more than there is
        ({"capacity": "60GiB", "cuda": {"capacity": "50GiB"}}, "cuda:0", 50 * GIB, "device.cuda"),
        ({"cuda": {"capacity": "50GiB"}, "cuda:0": {"reserve": "1GiB"}}, "cuda:0", 49 * GIB, "device.cuda"),
        ({"cuda:1": {"capacity": "50GiB"}}, "cuda:0", 80 * GIB - RESERVE, ""),
        ({"tpu": {"capacity": "50GiB"}}, "cuda:0", 80 * GIB - RESERVE, ""),
        ({"cuda:0": {"capacity": "50GiB"}}, "cuda", 80 * GIB - RESERVE, ""),  # a target is no device of this machine
        ({"cuda": {"capacity": "50GiB"}}, "cuda", 50 * GIB, "device.cuda"),
        ({"host": "1GiB"}, "cuda:0", 80 * GIB - RESERVE, ""),
    ],
)
def test_the_device_bounds_what_no_budget_was_given_for(device, name, bytes_, table):
    size, setting = resolved(Asked(), config(device), STEP).budget([name], 80 * GIB)
    assert (size, setting.table, setting.source) == (bytes_, table, "config" if table else "default")


def test_of_several_devices_the_smallest_counts():
    known = config({"cuda:0": {"capacity": "40GiB"}, "cuda:1": {"capacity": "30GiB"}})
    found = resolved(Asked(budget="50%"), known, STEP)
    assert resolved(Asked(), known, STEP).budget(["cuda:0", "cuda:1", "cuda:2"], 80 * GIB)[0] == 30 * GIB
    assert found.budget(["cuda:0", "cuda:1", "cuda:2"], 80 * GIB)[0] == 15 * GIB


def test_percentages_are_of_the_configured_capacity():
    half = {"capacity": "40GiB"}
    assert resolved(Asked(budget="50%"), config(half), STEP).budget(["cpu:0"], 80 * GIB)[0] == 20 * GIB
    assert resolved(Asked(), config(half, budget="50%"), STEP).budget(["cpu:0"], 80 * GIB)[0] == 20 * GIB
    assert resolved(Asked(), config(budget="50%"), STEP).budget(["cpu:0"], 80 * GIB)[0] == 40 * GIB
    host = {"host": GIB}
    assert resolved(Asked(host_budget="50%"), config(host), STEP).host_budget == GIB // 2
    assert resolved(Asked(), config(host, host_budget="50%"), STEP).host_budget == GIB // 2
    assert resolved(Asked(), config(host_budget="50%"), STEP).host_budget == host_memory() // 2


def test_code_may_say_more_than_the_device_table():
    assert (
        resolved(Asked(budget="70GiB"), config({"capacity": "40GiB"}), STEP).budget(["cuda:0"], 80 * GIB)[0] == 70 * GIB
    )


def test_state_waits_in_the_host_budget_else_in_what_the_config_has_of_the_host():
    state = {"offload_state": True}
    assert resolved(Asked(), config(**state), STEP).state_budget is None
    assert resolved(Asked(), config({"host": GIB}, **state), STEP).state_budget == GIB
    assert resolved(Asked(), config({"host": GIB}, host_budget=MIB, **state), STEP).state_budget == MIB
    assert resolved(Asked(host_budget=0), config({"host": GIB}, **state), STEP).state_budget == 0
    assert resolved(Asked(host_budget=MIB, offload_state=True), config(), STEP).state_budget == MIB
    assert resolved(Asked(), config({"host": GIB}), STEP).state_budget == 0


def test_a_job_has_its_lease_and_the_other_options():
    known = config({"capacity": "40GiB"}, budget="1GiB", chunk=True)
    found = resolved(Asked(), known, STEP)
    size, setting = found.lease(["cuda:0"], 80 * GIB)
    assert (size, setting.source, found.chunk) == (80 * GIB - RESERVE, "job", True)
    assert resolved(Asked(budget=GIB), known, STEP).lease(["cuda:0"], 80 * GIB)[0] == GIB
    device = resolved(Asked(), config({"capacity": "40GiB"}), STEP).lease(["cuda:0"], 80 * GIB)
    assert (device[0], device[1].source) == (80 * GIB - RESERVE, "job")


# ---- what cannot be -------------------------------------------------------------------------------

FILE = """
[device]
reserve = "70%"
capacity = "10GiB"
[functions.step]
budget = "BUDGET"
host_budget = "1GiB"
offload_state = true
"""


def refused(call):
    with pytest.raises(ConfigError) as wrong:
        call()
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


def test_a_budget_of_the_file_above_what_it_leaves_of_this_device():
    known = parse('[device.cuda]\ncapacity = "8GiB"\n[functions.step]\nbudget = "9GiB"', "there.toml")
    found = resolved(Asked(), known, STEP)
    assert found.budget(["cpu:0"], 80 * GIB)[0] == 9 * GIB
    said = refused(lambda: found.budget(["cuda:0"], 80 * GIB))
    assert said == (
        "there.toml:4: functions.step.budget = '9GiB': must be at most 8.00GiB, what [device.cuda] leaves of cuda:0"
    )


def test_a_reserve_that_leaves_nothing_of_this_device():
    known = parse('[device]\nreserve = "8GiB"', "there.toml")
    assert "leaves nothing of the 8.00GiB of cpu:0" in refused(
        lambda: resolved(Asked(), known, STEP).budget(["cpu:0"], 8 * GIB)
    )


def test_options_of_the_file_that_do_not_go_together_with_the_code():
    known = parse(FILE.replace("BUDGET", "2GiB"), "there.toml")
    said = refused(lambda: resolved(Asked(solver="chain", to_host=False), known, STEP))
    assert said.startswith("there.toml:7: functions.step.host_budget = '1GiB': solver='chain' of the code")
    said = refused(lambda: resolved(Asked(options={"in_shardings": None}), known, STEP))
    assert said.startswith("there.toml:8: functions.step.offload_state = True: in_shardings= is given in the code")
    assert resolved(Asked(options={"in_shardings": None}, offload_state=False), known, STEP).state_budget == 0
    assert resolved(Asked(solver="chain", to_host=False, host_budget=0), known, STEP).host_budget == 0


@pytest.mark.parametrize("size", ["1XB", -1, True, 0, float("nan"), object()])
def test_a_size_of_the_code_that_cannot_be(size):
    with pytest.raises(BudgetError, match=r"^budget="):
        resolved(Asked(budget=size), Config(), STEP).budget(["cpu:0"], GIB)
    if size != 0 or isinstance(size, bool):
        with pytest.raises(BudgetError, match=r"^host_budget="):
            resolved(Asked(host_budget=size), Config(), STEP)


# ---- which file -----------------------------------------------------------------------------------


def test_the_argument_then_the_variable_then_upward(tmp_path, monkeypatch):
    for name in ("given", "named", "up"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "jaxtensile.toml").write_text(f"[functions.{name}]\nbudget = 1\n")
    monkeypatch.delenv("JAXTENSILE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path / "up" / "deep")
    assert set(config_of(None).functions) == {"up"}
    monkeypatch.setenv("JAXTENSILE_CONFIG", str(tmp_path / "named" / "jaxtensile.toml"))
    assert set(config_of(None).functions) == {"named"}
    assert set(config_of(tmp_path / "given" / "jaxtensile.toml").functions) == {"given"}
    assert set(config_of({"functions": {"dict": {"budget": 1}}}).functions) == {"dict"}
    assert config_of(known := Config()) is known


def test_no_file_is_no_error_and_a_named_one_that_is_not_there_is(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXTENSILE_CONFIG", raising=False)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert config_of(None) == Config()
    gone.rmdir()  # a working directory that was removed has no config
    assert config_of(None) == Config()
    assert "cannot be read" in refused(lambda: config_of(Path(tmp_path) / "no.toml"))
    assert "config=5: give the path of a file" in refused(lambda: config_of(5))
    assert "the key 1 is no text" in refused(lambda: config_of({"functions": {1: {"budget": 1}}}))
