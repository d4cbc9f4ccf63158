"""What the README and the guides show is so: their Python runs, the config has all keys, commands and links exist."""

import re
import shlex
import tomllib
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.cli import main as cli
from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.functions import KEYS
from paths import ROOT

PAGES = [
    ROOT / name
    for name in ("README.md", "docs/guide.md", "docs/jobs.md", "docs/tune.md", "docs/index.md", "docs/howto.md")
]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"(?ms)^( *)```(\w*)\n(.*?)^\1```$", TEXT)
PYTHON = list(dict.fromkeys(dedent(text) for _, language, text in BLOCKS if language == "python"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]+))?\)")
LINKING = sorted({*PAGES, *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"})
WORDS = {"README.md": 1500, "constants.md": 13_000}  # the latter is made, and as long as there are constants


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state, *batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def prepared():
    """What a reader would have at hand."""
    x = jax.random.normal(jax.random.key(0), (64, 16))
    state = {"in": jnp.ones((16, 32)), "out": jnp.ones((32, 16))}
    batches = [(x, jnp.sin(x)), (x, jnp.cos(x))]
    return {"train_step": train_step, "state": state, "batch": batches[0], "batches": batches, "x": x, "y": x}


def flax():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    return {"nnx": nnx, "optax": optax, "model": model, "loss_fn": lambda m, x, y: jnp.mean((m(x) - y) ** 2)}


@pytest.mark.parametrize("block", PYTHON, ids=[text.strip().splitlines()[0][:40] for text in PYTHON])
def test_its_python_runs(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"jax": jax, "jnp": jnp, "jaxtensile": jaxtensile, **prepared()}
    if "nnx" in block:
        names |= flax()
    if "def train_step" in block:  # the first one: of weights, as in examples/quickstart.py
        x = jax.random.normal(jax.random.key(1), (64, 32))
        names |= {"weights": [jnp.eye(32), 2 * jnp.eye(32)], "x": x, "y": jnp.sin(x)}
    exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("page", LINKING, ids=lambda p: p.name)
def test_its_links_lead_somewhere(page):
    for target, _ in LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
    assert len(page.read_text().split()) <= WORDS.get(page.name, 12_000)


def test_its_config_has_every_key():
    budgets, tables = (tomllib.loads(text) for _, language, text in BLOCKS if language == "toml")
    configs.from_tables(budgets)
    configs.from_tables(tables)
    (job,) = tables["jobs"].values()
    known = (("device", "_Device"), ("coordinator", "_Coordinator"), ("cluster", "_Cluster"))
    for table, struct in (*((tables[name], struct) for name, struct in known), (job, "_Job")):
        assert set(table) == set(getattr(configs, struct).__struct_fields__)
    assert set(budgets["device"]) == set(configs._Device.__struct_fields__)
    assert {key for table in budgets["functions"].values() for key in table} == set(KEYS)
    defaults = configs.from_tables({"coordinator": {"socket": tables["coordinator"]["socket"]}})
    assert configs.from_tables({"coordinator": tables["coordinator"]}).settings == defaults.settings
    assert configs.from_tables({"cluster": tables["cluster"]}).cluster.rules == defaults.cluster.rules


def commands():
    shown = [line for _, language, text in BLOCKS if not language for line in dedent(text).splitlines()]
    shown += re.findall(r"`(jaxtensile [^`]+)`", re.sub(r"(?ms)^ *```.*?```$", "", TEXT))
    for line in shown:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["jaxtensile"] and words[1:]:
            yield words[1:]


def test_its_commands_exist():
    found = list(commands())
    assert {words[0] for words in found} >= {
        "estimate",
        "plan",
        "serve",
        "status",
        "top",
        "run",
        "config",
        "doctor",
        "calibrate",
    }
    for words in found:
        if len(words) > 1:
            cli._parser().parse_args(words)
