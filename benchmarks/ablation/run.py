"""What each switch is worth: plans with it off beside those with everything on, for an H200 that is not there.

    python -m benchmarks.ablation.run [--short] [--idle] [--again] [--compile] [--on WORKLOAD] [SWITCH ...]

Each workload is planned by the model alone for shares of its temporaries, in several ways (``WAYS``): as it is, in
parts, with bytes and with its state on the host, with a checkpoint around every block, and finished as plans are before
they are compiled; and it is estimated for several targets. A switch is turned off where it was asked for while
everything was on: elsewhere it changes nothing. Plans that are other then are looked at with everything on again: bytes
and seconds of their schedules by the whole model, and their FLOPs, so that what a model says of itself plays no part.
Times are CPU seconds.

``--short``: with two layers and one share, some fifty times as fast. ``--idle``: only switches that have changed
nothing so far, to find those that never do. ``--compile``: what differs is planned once more, both ways, and compiled,
for XLA's bytes. Results go to ``results[-short]-jax<version>.json`` and ``.md`` row by row; what is there is not
measured again without ``--again``. What the planner does between compiles is asked for there alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.fit.run import HOST, TARGET, fit
from benchmarks.house.plans import SHARES, digest, request_of
from benchmarks.isolate import heading, save
from jaxtensile import switches

HERE = Path(__file__).parent
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in parts": {"chunk": True},
    "host": {"host_budget": HOST},
    "state": {"host_budget": HOST, "offload_state": True},
    "checkpointed": {},
    "finished": {},
}
ESTIMATES = (TARGET, "nvidia-v100-16gb", "cpu", "tpu-v5e")
SHORT: dict[str, dict[str, Any]] = {
    "gpt2_small": {"layers": 2},
    "llama": {"layers": 2},
    "vit_b": {"layers": 2},
    "resnet50": {"stages": (2, 1)},
    "unet": {"multipliers": (1, 2), "res_blocks": 1},
    "bert_base": {"layers": 2},
    "moe": {"layers": 1},
    "mixer": {"layers": 2},
}
SHORT_SHARES = SHARES[1:2]
NOTICED = 1e-4
"""Relative differences of bytes, FLOPs and seconds that are none."""

Cells = list[dict[str, Any]]


def given(name: str, short: bool, way: str = "") -> Any:
    import jax

    remat = jax.checkpoint_policies.nothing_saveable if way == "checkpointed" else None
    return workloads.workload(name, remat=remat, **(SHORT.get(name, {}) if short else {}))


def budgets(request: Any, short: bool) -> list[int]:
    """Shares of the temporaries, with everything on."""
    from jaxtensile.planner.page import opened

    live = opened(request).program.predicted
    return [live.device - int((1 - share) * live.temp) for share in (SHORT_SHARES if short else SHARES)]


def plans(request: Any, wanted: list[int], finished: bool = False) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """The cheapest plan for each budget, and what is said of it where it is made; ``finished``: as it is compiled."""
    from jaxtensile.planner.page import opened
    from jaxtensile.search.variant import charge_of

    for budget in wanted:
        started = time.process_time()
        page = opened(replace(request, budget=budget))
        start, _ = page.lightest()
        written = page.written()
        candidates = page.candidates(start, [written] if start is not written else [])
        variant, plan = page.rounds.cheapest(candidates, budget) if finished else candidates.cheapest(budget)
        cpu = time.process_time() - started
        row = {"budget": budget, "predicted": plan.predicted.device, "charge": charge_of(variant, plan)}
        yield variant, plan, {**row, "cpu": cpu, "digest": digest(variant, plan)}


def judged(variant: Any, plan: Any) -> dict[str, Any]:
    """A plan by the whole model."""
    from jaxtensile.passes.lifetimes.liveness import live_ranges
    from jaxtensile.passes.seconds.cost import op_costs

    graph = plan.program.graph
    return {
        "device": live_ranges(graph).device,
        "flops": variant.traced.graph.flops + plan.recompute_flops,
        "seconds": sum(op_costs(graph, variant.request.device).seconds)
        + plan.wait
        + sum(loop.wait for loop in variant.loops),
    }


def planned(request: Any, wanted: list[int], off: tuple[str, ...], finished: bool) -> Cells:
    try:
        with switches.off(*off):
            made = list(plans(request, wanted, finished))
        return [{**row, **judged(variant, plan)} for variant, plan, row in made]
    except Exception as error:
        return [{"crash": f"{type(error).__name__}: {error}"[:500]}]


def estimated(work: Any, off: tuple[str, ...] = ()) -> Cells:
    """Static bytes for each target."""
    from jaxtensile.estimation.estimate import estimate_on

    started = time.process_time()
    with switches.off(*off):
        found = estimate_on(work.fun, work.args, work.jit_options, targets=ESTIMATES)
    cpu = (time.process_time() - started) / len(found)
    return [{"target": e.target, "device": e.use.device, "low": e.low, "high": e.high, "cpu": cpu} for e in found]


def questions(name: str, short: bool) -> dict[str, Callable[..., Cells]]:
    """What is asked of a workload, each to be answered with some switches off."""
    found: dict[str, Callable[..., Cells]] = {}
    for way, asked in WAYS.items() if name in workloads.NAMES else ():
        request = cache(lambda way=way, asked=asked: request_of(given(name, short, way), **asked))
        wanted = cache(lambda request=request: budgets(request(), short))
        done = way == "finished"
        found[way] = lambda *off, request=request, wanted=wanted, done=done: planned(request(), wanted(), off, done)
    work = given(name, short)
    return {**found, "estimates": lambda *off: estimated(work, off)}


def everything_on(ask: Callable[..., Cells], short: bool) -> dict[str, Any]:
    """What is asked for, and the answer: in a run of its own where there is the time, as noting takes some."""
    with switches.asked() as names:
        cells = ask()
    return {"asked": sorted(names), "cells": cells if short else ask()}


def compiled(name: str, short: bool, way: str, budget: int, *off: str) -> dict[str, Any]:
    """The same question, compiled; with everything on also what is asked for meanwhile."""
    with switches.off(*off) if off else switches.asked() as names:
        try:
            found = fit(given(name, short, way), budget, **WAYS[way])
        except Exception as error:
            found = {"crash": f"{type(error).__name__}: {error}"[:500]}
    told = ("fits", "device", "host", "flops", "rounds", "needs", "wall_seconds", "crash")
    return {"budget": budget, "asked": sorted(names or ()), **{key: found[key] for key in told if key in found}}


def to_compile(on: dict[str, Any], off: Cells, switch: str) -> list[int]:
    """Budgets whose plans are other with a switch off, or for which it is asked between compiles alone."""
    between = {c["budget"] for c in on["compiled"] if switch in c["asked"]} if switch not in on["asked"] else set()
    other = {a["budget"] for a, b in zip(on["cells"], off, strict=False) if a["digest"] != b.get("digest")}
    return sorted(between | other)


# ---- what it comes to ----------------------------------------------------------------------------


def change(on: float, off: float) -> float:
    """Relative; what is within ``NOTICED`` is none."""
    found = off / on - 1 if on else float(off > 0)
    return found if abs(found) > NOTICED else 0.0


def beside(result: dict[str, Any], switch: str) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Workload, way, and cells with everything on and with a switch off."""
    for name, row in result["workloads"].items():
        for way, cells in row["off"].get(switch, {}).items():
            known = row["on"][way]["cells"]
            if "crash" in known[0]:
                continue
            crashed = cells * len(known) if "crash" in cells[0] else cells
            yield from ((name, way, a, b) for a, b in zip(known, crashed, strict=True))


def summary(result: dict[str, Any], switch: str) -> dict[str, Any]:
    """What a switch changes, over all that was asked."""
    pairs = list(beside(result, switch))
    crashes = sum("crash" in b for *_, b in pairs)
    both = [pair for pair in pairs if "crash" not in pair[3]]
    plans = [(a, b) for _, way, a, b in both if way != "estimates"]
    guesses = [(a, b) for _, way, a, b in both if way == "estimates"]
    other = [(a, b) for a, b in plans if a["digest"] != b["digest"]]

    def fits(cell: dict[str, Any]) -> bool:
        return cell["device"] <= cell["budget"] * (1 + NOTICED)

    fitting = [(a, b) for a, b in other if fits(a) and fits(b)]
    return {
        "asked": sorted({name for name, row in result["workloads"].items() if switch in row["off"]}),
        "plans": len(plans),
        "other": len(other),
        "crashes": crashes,
        "lost": sum(fits(a) and not fits(b) for a, b in other),
        "won": sum(fits(b) and not fits(a) for a, b in other),
        "smaller": [change(a["device"], b["device"]) for a, b in other if not fits(a) and not fits(b)],
        "flops": [change(a["flops"], b["flops"]) for a, b in fitting],
        "seconds": [change(a["seconds"], b["seconds"]) for a, b in fitting],
        "estimates": [change(a["device"], b["device"]) for a, b in guesses],
        "cpu": [sum(x["cpu"] for x in side) for side in zip(*plans, strict=True)] if plans else [0.0, 0.0],
    }


def nothing(found: dict[str, Any]) -> bool:
    """Whether it changes no byte, FLOP or second."""
    figures = (*found["smaller"], *found["flops"], *found["seconds"], *found["estimates"])
    return not any((found["crashes"], found["lost"], found["won"], *figures))


def span(figures: list[float]) -> str:
    """From the least to the most, in per cent."""
    changed = [f for f in figures if f]
    if not changed:
        return "–"
    low, high = min(changed), max(changed)
    return f"{low:+.1%}" if len(changed) == 1 else f"{low:+.1%} … {high:+.1%} ({len(changed)})"


def table(result: dict[str, Any]) -> str:
    lines = heading("Each switch off alone", result["machine"], __doc__)
    sizes = "with two layers" if result["short"] else "at published sizes"
    names = ", ".join(result["workloads"])
    lines += [
        f"Commit {result['commit']}, {sizes}: {names}.",
        "",
        "*plans*: those that asked for it, and how many of them become other ones. *lost*, *won*: budgets that are "
        "no longer met, or newly, by the whole model. Where nothing fits either way, *smallest* is what the bytes of "
        "the smallest change by; where both fit, *FLOPs* and *seconds* of the step: a plus, and it is worse without. "
        "*estimates*: what static bytes change by; which are right says `benchmarks/estimate`. *planning*: CPU "
        "seconds, off and on. In brackets: how many change.",
        "",
        "| switch | plans, other | lost, won | smallest | FLOPs | seconds | estimates | planning |",
        "|---|---|---|---|---|---|---|---|",
    ]
    same, silent, later = list[str](), list[str](), list[str]()
    for switch in switches.NAMES:
        found = summary(result, switch)
        if not any(switch in on["asked"] for row in result["workloads"].values() for on in row["on"].values()):
            silent.append(switch)
            continue
        if not next(beside(result, switch), None):
            later.append(switch)
            continue
        if nothing(found):
            same.append(f"`{switch}` ({found['other']} of {found['plans']} plans are other ones, {ratio(found)})")
            continue
        crashed = f", {found['crashes']} crash" if found["crashes"] else ""
        lines.append(
            f"| `{switch}` | {found['plans']}, {found['other']}{crashed} | {found['lost']}, {found['won']} | "
            f"{span(found['smaller'])} | {span(found['flops'])} | {span(found['seconds'])} | "
            f"{span(found['estimates'])} | {ratio(found)} |"
        )
    lines += ["", f"Not measured yet: {', '.join(f'`{name}`' for name in later) or 'none'}."]
    lines += ["", f"No byte, FLOP or second anywhere: {', '.join(same) or 'none'}.", ""]
    lines += [
        f"Asked for by no plan here, at most between compiles: {', '.join(f'`{name}`' for name in silent) or 'none'}.",
        "",
    ]
    rows = list(pairs_compiled(result))
    if rows:
        lines += [
            "## Compiled",
            "",
            "Device MB by XLA, TFLOPs and plans that were compiled, with everything on and with the switch off.",
            "",
            "| switch | workload | way | budget | MB | TFLOPs | compiles |",
            "|---|---|---|---|---|---|---|",
        ]
        for switch, name, way, on, off in rows:
            shown = [
                " → ".join(f"{side[key] / by:.{digits}f}" if key in side else "–" for side in (on, off))
                for key, by, digits in (("device", 1e6, 0), ("flops", 1e12, 3), ("rounds", 1, 0))
            ]
            lines.append(f"| `{switch}` | {name} | {way} | {on['budget'] / 1e6:.0f} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def pairs_compiled(result: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """Switch, workload, way, and what was compiled with everything on and with the switch off."""
    for name, row in result["workloads"].items():
        for switch, ways in row.get("compiled", {}).items():
            for way, cells in ways.items():
                on = {cell["budget"]: cell for cell in row["on"][way]["compiled"]}
                yield from ((switch, name, way, on[cell["budget"]], cell) for cell in cells)


def ratio(found: dict[str, Any]) -> str:
    on, off = found["cpu"]
    return f"{off:.1f} / {on:.1f} s" if on else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("switches", nargs="*", choices=[*switches.NAMES, []], metavar="SWITCH")
    parser.add_argument("--short", action="store_true", help="with fewer layers")
    parser.add_argument("--idle", action="store_true", help="only what has changed nothing so far")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--compile", action="store_true", help="compile what differs")
    parser.add_argument("--on", action="append", choices=[*workloads.NAMES, *workloads.IN_PAPERS], metavar="WORKLOAD")
    parser.add_argument("--way", action="append", choices=[*WAYS, "estimates"])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so many")
    asked = parser.parse_args()

    from benchmarks import machine

    described = machine.describe()
    path = HERE / f"results{'-short' * asked.short}-jax{described['jax']}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"workloads": {}}
    result |= {"machine": described, "commit": machine.commit(), "short": asked.short}
    end = time.monotonic() + 60 * asked.minutes
    for name in asked.on or (*workloads.NAMES, *workloads.IN_PAPERS):
        row = result["workloads"].setdefault(name, {"on": {}, "off": {}})
        for way, ask in questions(name, asked.short).items():
            if asked.way and way not in asked.way:
                continue
            if time.monotonic() > end:
                return 0
            if asked.again or way not in row["on"]:
                row["on"][way] = everything_on(ask, asked.short)
            on = row["on"][way]
            compiling = asked.compile and way != "estimates" and "crash" not in on["cells"][0]
            if compiling and (asked.again or "compiled" not in on):
                on["compiled"] = [compiled(name, asked.short, way, cell["budget"]) for cell in on["cells"]]
            there = {*on["asked"]}.union(*(cell["asked"] for cell in on.get("compiled", ()) if compiling))
            wanted = [s for s in asked.switches or switches.NAMES if s in there]
            print(f"{name}, {way}: {len(wanted)} switches", flush=True)
            for switch in wanted:
                if time.monotonic() > end:
                    break
                if asked.idle and not nothing(summary(result, switch)):
                    continue
                known = row["off"].setdefault(switch, {})
                if switch in on["asked"] and (asked.again or way not in known):
                    known[way] = ask(switch)
                done = row.setdefault("compiled", {}).setdefault(switch, {}) if compiling else {}
                if compiling and (asked.again or way not in done):
                    wanted_bytes = to_compile(on, known.get(way, []), switch)
                    done[way] = [compiled(name, asked.short, way, budget, switch) for budget in wanted_bytes]
                    save(path, result, table)
            save(path, result, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
