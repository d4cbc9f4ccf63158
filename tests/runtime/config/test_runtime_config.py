"""What is written in jaxtensile.toml is what counts, and what cannot be is refused with its place and a way out."""

import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.errors import ConfigError
from jaxtensile.runtime.config.config import NAME, VARIABLE, find, parse, read
from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.units import GIB

EVERYTHING = """
[device]
capacity = "80GiB"
reserve  = "1GiB"
host     = "64GiB"
turns    = false
[device."cuda:1"]
reserve = "10%"
turns   = true
[coordinator]
socket = "/run/user/1000/jaxtensile.sock"
policy = "fair"
lease_ttl = "5s"
min_hold = "1m"
min_gain = 0.1
revoke_deadline = 30
on_overdue = "terminate"
max_clients = 7
[jobs.bert]
command = ["python", "train_bert.py"]
least = "4GiB"
want = "50%"
priority = 1
weight = 2
max_overhead = 1.3
hosts = 4
devices = 8
kind = "cuda"
retries = 2
[jobs."two words"]
[cluster]
address = "head:6379"
hold_after = "1h"
refuse_after = "5m"
move_after = 7
"""


def test_every_key_is_read():
    config = parse(EVERYTHING)
    assert config.settings == Settings(
        policy="fair",
        lease_ttl=5.0,
        min_hold=60.0,
        min_gain=0.1,
        revoke_deadline=30.0,
        on_overdue="terminate",
        max_clients=7,
    )
    assert config.socket == "/run/user/1000/jaxtensile.sock"
    bert = config.jobs["bert"]
    assert (bert.command, bert.least, bert.want) == (("python", "train_bert.py"), 4 * GIB, 40 * GIB)
    assert (bert.priority, bert.weight, bert.max_overhead) == (1, 2.0, 1.3)
    assert (bert.hosts, bert.devices, bert.kind, bert.retries) == (4, 8, "cuda", 2)
    assert config.cluster.address == "head:6379"
    assert config.cluster.rules == Rules(hold_after=3600.0, refuse_after=300.0, move_after=7.0)
    other = config.jobs["two words"]
    assert (other.least, other.want, other.max_overhead, other.weight) == (0, None, None, 1.0)
    assert (other.hosts, other.devices, other.kind, other.retries) == (1, 1, "", 0)
    assert parse("").cluster.address is None and parse("").cluster.rules == Rules()


def test_what_the_file_does_not_say_has_the_documented_defaults():
    assert parse("").settings == Settings()
    assert parse("").settings.max_clients == 1024
    assert (parse("").devices[""].capacity, parse("").jobs) == (None, {})
    assert parse("").takes_turns("cuda:0") and parse("").capacities({"cuda:0": 9}, host=0)["cuda:0"].gated


def test_the_nearest_table_of_a_device_counts():
    config = parse(EVERYTHING)
    found = config.capacities({"cuda:0": 100 * GIB, "cuda:1": 100 * GIB}, host=32 * GIB)
    assert found == {
        "cuda:0": Capacity(capacity=80 * GIB, reserve=GIB),
        "cuda:1": Capacity(capacity=80 * GIB, reserve=8 * GIB, gated=True),
        HOST: Capacity(capacity=32 * GIB),
    }
    kinds = parse('[device]\nreserve = 1\n[device.tpu]\nreserve = 2\n[device."tpu:1"]\nreserve = 3')
    reserves = {k: c.reserve for k, c in kinds.capacities({"tpu:0": 9, "tpu:1": 9, "cuda:0": 9}, host=0).items()}
    assert reserves == {"tpu:0": 2, "tpu:1": 3, "cuda:0": 1, HOST: 0}


def test_a_device_that_the_file_does_not_mention_keeps_a_reserve():
    config = parse('[device]\nturns = false\n[device.tpu]\nreserve = 0\n[device."cuda:1"]\ncapacity = "2GiB"')
    found = config.granted(dict.fromkeys(("cuda:0", "cuda:1", "tpu:0"), 80 * GIB) | {"cpu:0": 4 * GIB}, host=GIB)
    assert {name: c.reserve for name, c in found.items()} == {
        "cuda:0": GIB,
        "cuda:1": 0,
        "tpu:0": 0,
        "cpu:0": GIB // 2,
        HOST: 0,
    }
    assert found["cuda:0"].capacity == 80 * GIB and not found["cuda:0"].gated


def test_a_device_with_less_than_the_file_says_grants_what_it_has():
    assert parse("[device]\ncapacity = 100").capacities({"cuda:0": 60}, host=0)["cuda:0"].limit == 60
    with pytest.raises(ConfigError, match="leaves nothing"):
        parse("[device]\ncapacity = 100\nreserve = 70").capacities({"cuda:0": 60}, host=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[coordinator]\npolciy = 1",
            "jaxtensile.toml:2: unknown key 'polciy' in [coordinator]: did you mean 'policy'?",
        ),
        ("[corodinator]", "jaxtensile.toml:1: unknown key 'corodinator': did you mean 'coordinator'?"),
        ("[jobs.a]\nxyzzy = 1", "there are command, least, want, priority, weight, max_overhead"),
        ("[device]\ncapacity = '1XB'", "jaxtensile.toml:2: device.capacity: unknown unit 'XB'"),
        ("[device]\ncapacity = true", "must be a size"),
        ("[device]\ncapacity = 0", "device.capacity = 0: must be a size above 0"),
        (
            "[device]\ncapacity = 5\nreserve = 5",
            "jaxtensile.toml:3: device.reserve = 5: must be less than the capacity",
        ),
        ('[device."cuda:0"]\nreserve = "200%"\ncapacity = 5', 'device."cuda:0".reserve'),
        ("[device]\nreserve = '5%'", "whose capacity is unknown"),
        ("device = 3", "jaxtensile.toml:1: device = 3: must be a table"),
        ("[coordinator]\npolicy = 'best'", "coordinator.policy = 'best': must be slowdown, fair, priority or fcfs"),
        ("[coordinator]\non_overdue = 'kill'", "must be wait or terminate"),
        ("[coordinator]\nlease_ttl = '10 parsecs'", "cannot read '10 parsecs' as a time"),
        ("[coordinator]\nlease_ttl = 0", "must be a time from 100ms to 2592000s"),
        ("[coordinator]\nmin_hold = '-1s'", "must be finite and not negative"),
        ("[coordinator]\nmin_hold = [1]", "must be a time"),
        ("[coordinator]\nmin_gain = 1", "must be a share from 0 to below 1"),
        ("[coordinator]\nmin_gain = nan", "must be a share from 0 to below 1"),
        ("[coordinator]\nmax_clients = 0", "must be a whole number from 1 to 1048576"),
        ("[coordinator]\nmax_clients = 'many'", "must be a whole number"),
        ("[coordinator]\nsocket = '/" + "x" * 107 + "'", "107 bytes at most: this one has 108"),
        ("[coordinator]\nsocket = 'here'", "must be an absolute path"),
        ("[jobs]\na = 1", "jobs.a = 1: must be a table"),
        ("[jobs.a]\nleast = 5\nwant = 4", "jaxtensile.toml:2: jobs.a.least = 5: must be at most what it wants, 4B"),
        ("[device]\ncapacity = 9\nreserve = 1\n[jobs.a]\nleast = 9", "must be at most 8B, capacity less reserve"),
        ("[jobs.a]\nweight = 0", "must be a number from 0.001 to 1000"),
        ("[jobs.a]\nweight = inf", "must be a number from 0.001 to 1000"),
        ("[jobs.a]\nmax_overhead = 0.9", "must be a factor from 1 to 1000, or left out"),
        ("[jobs.a]\nhosts = 0", "jobs.a.hosts = 0: must be a whole number from 1 to 10000"),
        ("[jobs.a]\nretries = -1", "must be a whole number from 0 to 10000"),
        ("[jobs.a]\nkind = 1", "jobs.a.kind = 1: must be a text"),
        ("[cluster]\nhold_after = 'soon'", "cannot read 'soon' as a time"),
        ("[cluster]\nadress = 'x'", "unknown key 'adress' in [cluster]: did you mean 'address'?"),
        ("[jobs.a]\ncommand = 'python'", "must be a list of texts"),
        ("[jobs.a]\nleast = '1e999'", "jobs.a.least"),
        ("[jobs", "not TOML"),
        (
            r'[jobs."\u001b[31mred"]',
            r"'\x1b[31mred' in [jobs]: a name must have letters that can be printed",
        ),
        (r'[jobs."a\nb"]', r"'a\nb' in [jobs]: a name must have letters that can be printed"),
        (r'[jobs."\u0000"]', r"'\x00' in [jobs]"),
        ('[jobs.""]', "'' in [jobs]: a name must have 1 to 128 letters, not 0"),
        ("[jobs." + "x" * 129 + "]", "a name must have 1 to 128 letters, not 129"),
        (r"[jobs.a]" + "\n" + r'kind = "\u001b"', r"jobs.a.kind = '\x1b': must be a text that can be printed"),
        (r"[jobs.a]" + "\n" + r'command = ["sh", "a\u0000b"]', r"= 'a\x00b': must be a text without NUL"),
        (r'[functions."\u0007*"]', r"'\x07*' in [functions]"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place_and_a_way_out(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        parse(text)
    assert str(caught.value).startswith("jaxtensile.toml")


@pytest.mark.parametrize("table", ["device", "coordinator", "cluster", "jobs.a", "functions.f"])
def test_every_number_has_bounds(table):
    """Whatever key is a number: one that is not finite, below zero or absurdly large or small is refused."""
    numbers = {
        "device": ("capacity", "reserve", "host"),
        "coordinator": ("lease_ttl", "min_hold", "min_gain", "revoke_deadline", "max_clients"),
        "jobs.a": ("least", "want", "priority", "weight", "max_overhead", "hosts", "devices", "retries"),
        "cluster": ("hold_after", "refuse_after", "move_after"),
        "functions.f": ("budget", "host_budget"),
    }
    absurd = ["inf", "nan", "-1e30", str(10**18 * 2), "1e30"]
    for key in numbers[table]:
        for value in [*absurd, "1e-9"] if key in ("lease_ttl", "revoke_deadline", "weight") else absurd:
            with pytest.raises(ConfigError, match=f":2: {table}.{key}"):
                parse(f"[{table}]\n{key} = {value}")


tables = st.dictionaries(
    st.sampled_from(["device", "coordinator", "jobs", "capacity", "min_hold", "a"]),
    st.recursive(
        st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=2)),
        lambda inner: st.dictionaries(
            st.sampled_from(["least", "reserve", "policy", "weight", "x", "b"]), inner, max_size=3
        ),
        max_leaves=6,
    ),
    max_size=3,
)


def as_toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08x}" if not 0xD800 <= ord(c) < 0xE000 else "?" for c in value) + '"'
    return repr(value)


@given(tables)
def test_any_file_is_read_or_refused(values):
    try:
        parse("\n".join(f"{k} = {as_toml(v)}" for k, v in values.items()))
    except ConfigError as refused:
        assert str(refused).startswith("jaxtensile.toml")


def test_commands_may_have_lines():
    assert parse('[jobs.a]\ncommand = ["sh", "-c", """\ntrue\ntrue"""]').jobs["a"].command[-1] == "true\ntrue"


def test_the_option_goes_first_then_the_variable_then_the_nearest_file_upward(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find(below, None, {}) is None or not str(find(below, None, {})).startswith(str(tmp_path))
    (tmp_path / NAME).write_text("")
    assert find(below, None, {}) == tmp_path / NAME
    (tmp_path / "a" / NAME).write_text("")
    assert find(below, None, {}) == tmp_path / "a" / NAME
    assert find(below, None, {VARIABLE: "/elsewhere.toml"}) == Path("/elsewhere.toml")
    assert find(below, "given.toml", {VARIABLE: "/elsewhere.toml"}) == Path("given.toml")


def test_a_file_that_is_just_being_written_is_waited_for_and_an_empty_one_refused(tmp_path):
    (file := tmp_path / NAME).write_text("")
    for wait in (0.0, 0.02):
        with pytest.raises(ConfigError, match="is empty: if it is to say nothing, write a comment"):
            read(file, wait)
    writer = threading.Timer(0.05, file.write_text, ("[device]\ncapacity = 4\n",))
    writer.start()
    assert read(file, 30.0).devices[""].capacity == 4
    writer.join()
    file.write_text("# nothing\n")
    assert read(file).devices == read(Path("/dev/null")).devices == parse("").devices


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "binary.toml")
    (tmp_path / NAME).write_text("[jobs.a]")
    assert read(tmp_path / NAME).jobs.keys() == {"a"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[device]\ncapacity = " + "9" * 5000, "not TOML"),
        ("a = " + "[\n" * 100_000 + "]\n" * 100_000, "nested too deeply"),
        (".".join(["a"] * 50_000) + " = 1", "a line has 100003 letters"),
        ("#\n" * 600_000, "is larger than 1.00MiB"),
        ("[jobs.a]\npriority = 5000", "from -1000 to 1000"),
        ("[jobs.a]\nweight = 1e-9", "from 0.001 to 1000"),
        ("[jobs.a]\nweight = nan", "from 0.001 to 1000"),
    ],
    ids=["digits", "nesting", "parts", "bytes", "priority", "weight", "nan"],
)
def test_an_attack_is_a_mistake_like_any_other(text, said, tmp_path):
    path = tmp_path / "jaxtensile.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(path)


def test_what_never_ends_is_not_waited_for(tmp_path):
    path = tmp_path / "jaxtensile.toml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe"):
        read(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="is larger than"):
        read(path)
