"""Every switch is in the table and in the source, and turns off one thing: values stay, report and keys tell."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from benchmarks.ablation import run as ablation
from benchmarks.house import index
from benchmarks.house.plans import request_of
from jaxtensile import _compat, switches
from jaxtensile.api.shared_dispatch import _question
from jaxtensile.errors import OptionError
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.planner.page import opened
from jaxtensile.planner.plan_cache import key_of
from jaxtensile.program.emit import emit
from jaxtensile.search import registry
from jaxtensile.settings.options import Asked
from programs import FAST, chain_args, close, step


def looped(stacked, x):
    """Gradients of a loop of layers, one of whose branches is dear."""

    def layer(h, w):
        h = jax.lax.cond(h.sum() > 0, lambda h: jnp.tanh(h @ w) @ w.T, lambda h: h - 1, h)
        return h + jnp.exp(-jnp.square(h)), None

    return jax.grad(lambda ws: jnp.square(jax.lax.scan(layer, x, ws)[0]).sum())(stacked)


def normed(weights, x):
    """Layers that norm rows, with an update behind all gradients and a checkpoint around each."""

    @jax.checkpoint
    def layer(h, w):
        h = h - h.mean(-1, keepdims=True)
        return h + jax.nn.gelu(h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6) @ w)

    def loss(weights):
        h = x
        for w in weights:
            h = layer(h, w)
        return -jax.nn.log_softmax(h)[:, 0].mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


PROGRAMS = {
    "step": (step, chain_args(layers=3), {}, 0.6),
    "deeper": (step, chain_args(layers=8), {"solver": "greedy"}, 0.6),
    "looped": (looped, (jnp.ones((8, 8, 8)) / 9, jnp.ones((256, 8))), {"chunk": True}, 0.6),
    "normed": (normed, ([jnp.eye(8) / 2] * 2, jnp.ones((256, 8)).at[::3, 2].set(2.0)), {"solver": "greedy"}, 0.4),
}
"""Function, arguments, options, and the share of the temporaries that is allowed."""


def test_with_each_one_off_values_stay():
    """Each in the first program that asks for it; of equal plans one runs."""
    covered, plans = set(), 0
    for fun, args, options, share in PROGRAMS.values():
        request = request_of(jaxtensile.Workload(fun=fun, args=args), **options)
        live = opened(request).program.predicted
        budget = live.device - int((1 - share) * live.temp)
        expected = jax.tree.leaves(jax.jit(fun)(*args))
        seen = set()
        with switches.asked() as asked:
            list(ablation.plans(request, [budget], finished=True))
        for switch in ("", *sorted(asked - covered)):
            with switches.off(*filter(None, [switch])):
                ((variant, plan, row),) = ablation.plans(request, [budget], finished=True)
                if row["digest"] not in seen:
                    seen.add(row["digest"])
                    run = jax.jit(emit(variant.traced, plan.program), compiler_options=FAST)
                    for a, b in zip(run(jax.tree.leaves(args)), expected, strict=True):
                        close(a, b)
        covered |= asked
        plans += len(seen)
    assert len(covered) > 45 and plans > 10, (len(covered), plans)


def test_the_table_and_the_source_have_the_same_names():
    asked = index.asked_for()
    assert sorted(asked) == sorted(switches.NAMES), set(asked) ^ {*switches.NAMES}
    assert {rewrite.key for rewrite in registry.REWRITES} <= {*switches.NAMES}
    table = index.switches((s.name, s.does) for s in switches.SWITCHES)
    assert index.SWITCHES.read_text() == table, "python -m benchmarks.house.index"


def test_a_name_that_is_none_is_an_error_that_names_the_nearest():
    with pytest.raises(OptionError, match=r"'grwo': did you mean 'grow'\?"), switches.off("grwo"):
        pass
    ask = [sys.executable, "-c", "from jaxtensile import switches; print(*sorted(switches.switched_off()))"]

    def told(names):
        return subprocess.run(ask, env={**os.environ, switches.VARIABLE: names}, capture_output=True, text=True)

    assert told(" grow,cse,").stdout == "cse grow\n"
    assert "$JAXTENSILE_OFF: there is no switch 'grwo': did you mean 'grow'?" in told("cse,grwo").stderr


def test_it_is_off_where_it_was_turned_off_and_where_that_plans():
    seen = []

    def look(enter=lambda: True):
        thread = threading.Thread(target=lambda: seen.append((enter(), switches.on("grow"))))
        thread.start()
        thread.join()

    with switches.off("grow"):
        with switches.off("cse"):
            assert switches.switched_off() == {"grow", "cse"} and not switches.on("grow")
        enter = _compat.configuration()
        look()
        look(enter)
    look(enter)  # as where it was begun
    assert switches.on("grow") and seen == [(True, True), (True, False), (True, False)]


def test_what_is_off_is_told_and_part_of_every_key():
    args = chain_args(layers=2)
    request = request_of(jaxtensile.Workload(fun=step, args=args))
    graph = opened(request).program.traced.graph
    known = key_of(request, graph), _question(Asked()), live_ranges(graph)
    with switches.off("prologues"):
        other = key_of(request, graph), _question(Asked()), live_ranges(graph)
        report = jaxtensile.jit(step, budget="1GiB", compiler_options=FAST).plan(*args)
        assert "switched off: prologues" in report.notes and "switched off" in str(report)
        assert "switched off: prologues" in jaxtensile.estimate(step, *args, target="cpu").notes
    assert known[:2] == (key_of(request, graph), _question(Asked())) and live_ranges(graph) is known[2]
    assert known[0] != other[0] and known[1] != other[1] and known[2] is not other[2]
    assert "switched off" not in str(replace(report, notes=()))


def test_what_an_ablation_changes_is_told():
    cell = {"budget": 100, "device": 90, "flops": 10.0, "seconds": 1.0, "cpu": 1.0, "digest": "a"}
    off = {
        "grow": {**cell, "digest": "b", "flops": 11.0},
        "sink": {**cell, "digest": "c"},
        "cse": cell | {"digest": "d"},
    }
    off["cse"]["device"] = 101
    on = {"as it is": {"asked": [*off, "undo"], "cells": [cell]}}
    row = {
        "on": on,
        "off": {name: {"as it is": [c]} for name, c in off.items()} | {"undo": {"as it is": [{"crash": "no"}]}},
    }
    machine = {"jax": "0", "python": "3", "cpus": 2, "machine": "m", "date": "today"}
    result = {"machine": machine, "commit": "c", "short": True, "workloads": {"w": row}}
    found = {name: ablation.summary(result, name) for name in on["as it is"]["asked"]}
    assert found["grow"]["flops"] == [pytest.approx(0.1)] and found["cse"]["lost"] == found["undo"]["crashes"] == 1
    assert [name for name in found if ablation.nothing(found[name])] == ["sink"]
    lines = ablation.table(result).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert any(line.startswith("No byte, FLOP or second anywhere: `sink`") for line in lines)
