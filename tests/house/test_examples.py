"""Every example runs, and what it prints holds: bytes within budgets, losses equal, errors that end well."""

import importlib
import math
import re
import runpy
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_lines import in_a_soak
from jaxtensile.runtime.config import config as configs
from jaxtensile.units import MIB, parse_bytes
from paths import ROOT

EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))
gpt = importlib.import_module("gpt")
text = importlib.import_module("text")
search = importlib.import_module("search")

TINY = gpt.GPTConfig(layers=2, width=32, heads=2, context=16, vocab=64)
TINY_DEMO = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--batch", "16"]
SIZE = r"([\d.]+(?:[KMGT]i)?B)"


def run(tmp_path, name, *arguments):
    """Standard output of an example, started from a foreign folder."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def one(pattern, printed):
    """The groups of the only match."""
    found = re.findall(pattern, printed)
    assert len(found) == 1, f"{pattern!r} found {len(found)} times in:\n{printed}"
    return found[0]


def device_bytes(compiled):
    memory = compiled.memory_analysis()
    argument_and_output = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return argument_and_output + memory.temp_size_in_bytes - memory.alias_size_in_bytes


# ---- the scripts ------------------------------------------------------------------------------


def test_quickstart_does_what_its_comments_say(capsys):
    names = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)

    arguments = (names["weights"], names["x"], names["y"])
    plain = jax.jit(names["train_step"], donate_argnums=(0,)).lower(*arguments).compile()
    assert device_bytes(plain) == pytest.approx(204 * 2**20, rel=0.02)
    assert device_bytes(names["step"].lower(*arguments).compile()) <= 128 * 2**20


def test_demo_numbers_hold(tmp_path):
    printed = run(tmp_path, "demo.py", "--steps", "6", "--target", "nvidia-nothing", *TINY_DEMO)

    budget = int(one(r"(?m)^Budget: .* \((\d+) bytes\)", printed))
    before, after = map(int, one(r"\((\d+) to (\d+) bytes by XLA's own account\)", printed))
    assert after <= budget < before
    assert "within its budget" in printed
    assert "NOT within" not in printed

    rows = re.findall(r"(?m)^ +(\d+) +([\d.]+) +([\d.]+) +([+-][\d.e+-]+)$", printed)
    assert [int(step) for step, *_ in rows] == [1, 2, 3, 4, 5, 6]
    plain, fitted, difference = np.array([row[1:] for row in rows], float).T
    np.testing.assert_allclose(fitted - plain, difference, atol=2e-6)
    np.testing.assert_allclose(fitted, plain, rtol=1e-5)
    assert plain[-1] < plain[0] < math.log(256) + 0.1

    told = one(r"(?m)^Losses: .*largest difference ([\d.e+-]+)", printed)
    assert float(told) == pytest.approx(np.abs(difference).max(), rel=0.1, abs=2e-6)
    assert "No plan: " in printed  # an unknown target ends section 4, not the demo
    assert "nvidia-nothing" in one(r"(?m)^No plan: (.*)$", printed)


@pytest.mark.slow
@in_a_soak
@pytest.mark.cuda_aot
def test_demo_fits_gpt2_small_for_an_absent_gpu(tmp_path):
    printed = run(tmp_path, "demo.py", "--steps", "2", *TINY_DEMO)
    before, after = one(rf"GPT-2 small at batch 16 x 1024 went from {SIZE} to {SIZE} for nvidia-h200", printed)
    assert parse_bytes(after) <= parse_bytes("8GiB") < parse_bytes("19GiB") < parse_bytes(before)


def test_demo_refuses_no_steps(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLES / "demo.py", "--steps", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "argument --steps: 0 is below 1" in done.stderr


_LISTEN = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
HEARING = [sys.executable, "-c", _LISTEN]
"""Before a command that is to hear Ctrl-C: where the tests run in the background they ignore it, and pass that on."""


def test_demo_stops_cleanly_on_ctrl_c():
    # With room for all nothing is planned before the first step.
    options = "--no-gpu-plan", "--steps", "100000", "--share", "100", *TINY_DEMO
    with subprocess.Popen(
        [*HEARING, sys.executable, "-u", EXAMPLES / "demo.py", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            assert any("step 1 of" in line for line in demo.stdout)
            demo.send_signal(signal.SIGINT)
            _, errors = demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert (demo.returncode, errors.strip()) == (130, "Stopped by Ctrl-C; nothing was written.")


def test_budgets_are_those_of_the_file(tmp_path):
    printed = run(tmp_path, "budgets.py")
    rows = re.findall(rf"(?m)^(\w+): {SIZE} as it is, {SIZE} within its budget of {SIZE}$", printed)
    assert [(name, budget) for name, *_, budget in rows] == [
        ("train_step", "32.00MiB"),
        ("train_step_in_parts", "16.00MiB"),
        ("evaluate", "48.00MiB"),
    ]
    assert all(parse_bytes(planned) <= parse_bytes(budget) for _, _, planned, budget in rows)
    lines = (EXAMPLES / "budgets.toml").read_text().splitlines()
    told = re.findall(r"(?m)^  (\w+) \S+ from examples/budgets.toml:(\d+) \[.*\]$", printed)
    assert [name for name, _ in told] == ["budget", "undo", "budget", "chunk", "budget"]
    assert [lines[int(line) - 1].split()[0] for _, line in told] == ["budget", "undo", "budget", "chunk", "capacity"]
    assert printed.endswith("train_step with budget='64MiB' in the code: 64.00MiB\n")


def test_inspect_plan_walks_a_report_that_adds_up(tmp_path):
    printed = run(tmp_path, "inspect_plan.py")
    device = {}
    for name in ("baseline", "predicted", "compiled"):
        sizes = one(rf"(?m)^{name} +" + r" +".join([SIZE] * 5) + "$", printed)
        argument, output, temp, alias, device[name] = map(parse_bytes, sizes)
        assert argument + output + temp - alias == pytest.approx(device[name], rel=1e-3)
    assert device["compiled"] <= parse_bytes("56MiB") < device["baseline"]
    dropped, size = one(rf"(?m)^Remat: (\d+) values, {SIZE}$", printed)
    assert int(dropped) > 0
    assert parse_bytes(size) > 0
    assert float(one(r"(?m)^recomputed: ([\d.]+) GFLOP", printed)) >= 0
    assert int(one(r"(?m)^rounds: (\d+);", printed)) >= 1


def test_will_it_fit_answers_and_explains(tmp_path):
    printed = run(tmp_path, "will_it_fit.py", "--targets", "cpu,nvidia-nothing")

    alone = parse_bytes(one(rf"(?m)^cpu, batch 4: needs {SIZE}; fits as it is$", printed))
    before, after = one(rf"(?m)^cpu, batch 16: needs {SIZE}; fits planned in {SIZE}, about \d+% slower$", printed)
    assert max(alone, parse_bytes(after)) <= parse_bytes("48MiB") < parse_bytes(before)
    assert re.findall(r"(?m)^nvidia-nothing, batch \d+: unknown target 'nvidia-nothing'", printed)

    errors = re.findall(
        rf"(?m)^budget {SIZE} is below the smallest (?:reachable|found), {SIZE}, for train_step: ", printed
    )
    assert 1 <= len(errors) <= 3
    given, taken = map(parse_bytes, one(rf"(?m)^with {SIZE} it fits: {SIZE}$", printed))
    assert taken <= given < parse_bytes(before)
    assert given <= parse_bytes(errors[-1][1]) <= given + MIB // 50, "errors round up, to what is enough"


def test_search_trains_eight_in_the_room_of_three(tmp_path):
    printed = run(tmp_path, "search.py", "--steps", "12")
    plain, room, number = one(rf"one training as it is: {SIZE}; the device: {SIZE}, room for (\d)", printed)
    assert parse_bytes(room) // parse_bytes(plain) == int(number) == 3
    rows = re.findall(r"(?m)^ +([\d.e-]+) +(\d+) +([\d.]+)$", printed)
    assert sorted(float(rate) for rate, *_ in rows) == sorted(search.RATES)
    assert [int(steps) for _, steps, _ in rows] == sorted((int(steps) for _, steps, _ in rows), reverse=True)
    assert rows[0][1] == "12" and {steps for _, steps, _ in rows} <= {"4", "8", "12"}
    assert all(parse_bytes(size) <= parse_bytes(room) for size in re.findall(rf"begins with {SIZE}", printed))
    assert float(one(r"(?m)^best: .* no loss differs by more than ([\d.e+-]+)$", printed)) < 1e-4


def test_search_as_processes(tmp_path):
    config = configs.read(EXAMPLES / "search.toml")
    assert config.devices[""].capacity == parse_bytes(search.CAPACITY)
    assert {float(job.command[-1]) for job in config.jobs.values()} == set(search.RATES)
    command = [sys.executable, "-m", "jaxtensile", "run", "rate-3", "rate-4", "--config", EXAMPLES / "search.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(?m)^rate-4 \| +[\d.]+s  rate-4 +is done: loss 0\.\d+$", done.stdout), done.stdout
    assert "2 of 2 jobs done" in done.stdout


def test_queries_come_and_go_beside_a_training_that_stays_the_same(tmp_path):
    printed = run(tmp_path, "queries.py", "--queries", "3", "--steps", "6", "--layers", "2")
    assert len(re.findall(r"query \d +answered after", printed)) == 3
    assert int(one(r"(?m)^the training made (\d+) steps", printed)) > 1
    assert float(one(r"none of its losses differs by more than ([\d.e+-]+)$", printed.strip())) < 1e-4


def test_a_service_of_a_higher_class_waits_for_one_step(tmp_path):
    printed = run(tmp_path, "priority.py", "--seconds", "0.5", "--layers", "2")
    rows = re.findall(r"(?m)^ +([01]) +(\d+) .* ms  (\d+) \+ (\d+) \+ (\d+) in ", printed)
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(int(number) > 0 for row in rows for number in row[1:])


# ---- the model and its data -------------------------------------------------------------------


def test_small_is_gpt2_small():
    state = jax.eval_shape(lambda key: gpt.start(gpt.GPTConfig.small(), key), jax.random.key(0))
    assert gpt.parameters(state) == 124_439_808  # the released checkpoint


def test_loss_starts_at_a_uniform_guess():
    params = gpt.init(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, TINY.context + 1), 0, TINY.vocab)
    assert float(gpt.loss(params, tokens, TINY)) == pytest.approx(math.log(TINY.vocab), rel=0.01)


def test_no_position_sees_what_follows_it():
    block = gpt.init(TINY, jax.random.key(0))["blocks"][0]
    x = jax.random.normal(jax.random.key(1), (1, TINY.context, TINY.width))
    one, two = (gpt._attention(block, value, TINY.heads) for value in (x, x.at[0, 9].add(1.0)))
    assert np.any(one != two, axis=-1)[0].tolist() == [False] * 9 + [True] * (TINY.context - 9)


def test_adam_is_optax_adam(monkeypatch):
    # A loss with clear gradients: Adam divides by their size, and rounding would show where they vanish.
    monkeypatch.setattr(gpt, "loss", lambda params, tokens, config: jnp.sum((params["x"] - tokens) ** 2))
    params = {"x": jnp.linspace(-3.0, 3.0, 8)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = gpt.State(params, zeros, zeros, jnp.int32(0))
    step, adam = jax.jit(gpt.make_step(TINY, 1e-2)), optax.adam(1e-2)
    moments = adam.init(params)
    for tokens in (4.0, -5.0, 6.0, 7.0):
        grads = jax.grad(gpt.loss)(params, tokens, TINY)
        updates, moments = adam.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, tokens)
    np.testing.assert_allclose(state.params["x"], params["x"], rtol=1e-5)


def test_batches_are_windows_of_the_text_and_repeat():
    corpus = text.corpus()
    assert len(corpus) >= 50_000
    first, again = (list(text.batches(corpus, batch=3, context=20, steps=4)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.shape(first) == (4, 3, 21)
    whole = corpus.tobytes()
    assert all(window.astype(np.uint8).tobytes() in whole for batch in first for window in batch)
    assert not np.array_equal(first[0], first[1])


def test_batches_refuse_a_context_longer_than_the_text():
    with pytest.raises(ValueError, match="lower the context"):
        next(text.batches(np.zeros(10, np.uint8), batch=1, context=10, steps=1))
