"""How fast is the simulator, and what becomes of 5,000 jobs on 1,000 cards?

    python -m benchmarks.concurrent.simulated [--quick]

*Mixes*: the jobs of ``mixes.py`` on one card, events of the simulation a CPU second, one core; how many there are
depends on whether jobs wait for turns, since each hand-over is a decision of the coordinator. *Fleet*: machines of
eight cards with a coordinator each, placed by ``runtime.placement``; jobs on one to four cards, of the workloads of
``ladders.json`` with 50 to 400 steps. A grant above a card's bytes ends the run, and so does a job that waits for ever:
there was none. Results go to ``simulated.json`` and ``simulated.md``; ``--quick`` prints 40 cards and 200 jobs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.concurrent.ladders import WORKLOADS
from benchmarks.concurrent.mixes import COMPILE, COUNTS, GIVES, GPU, TAKES, Steps, jain
from benchmarks.isolate import heading, save
from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.simulate.jobs import Job
from jaxtensile.runtime.simulate.simulation import Node, Simulation

HERE = Path(__file__).parent
CARD: Final = "nvidia-a100-40gb"
SETTINGS: Final = Settings(lease_ttl=float("inf"))
WIDTH: Final = 8
"""Cards of a machine."""


def timed(it: Simulation) -> dict[str, Any]:
    """A simulation to its end."""
    gc.collect()
    gc.freeze()
    started = time.process_time()
    outcomes = it.run()
    took = time.process_time() - started
    return {
        "events": it.clock.events,
        "cpu": took,
        "rate": it.clock.events / took,
        "steps": sum(o.steps for o in outcomes),
        "turns": sum(o.turns for o in outcomes),
        "moves": sum(o.moves for o in outcomes),
        "seconds": max(o.ended or 0.0 for o in outcomes),
        "ended otherwise": sum(bool(o.why) for o in outcomes),
    }


def mix(of: dict[str, Steps], count: int, share: float) -> Simulation:
    """So many different jobs on one card that has that share of what they want beyond their smallest plans."""
    ladders = [of[WORKLOADS[k % len(WORKLOADS)]].ladder(of[WORKLOADS[k % len(WORKLOADS)]].batch) for k in range(count)]
    stay = sum(ladder[0].persistent for ladder in ladders)
    most = stay + sum(ladder[-1].temp for ladder in ladders)
    least = stay + max(ladder[0].temp for ladder in ladders)
    room = {GPU: Capacity(capacity=int(least + share * (most - least)) + 1, gated=True)}
    given = {"steps": 3000, "devices": (GPU,), "gives": GIVES, "takes": TAKES}
    jobs = [Job(name=f"job{k}", ladder=ladder, **given) for k, ladder in enumerate(ladders)]
    return Simulation({"machine": Node(capacities=room)}, SETTINGS).add(jobs)


def fleet(of: dict[str, Steps], cards: int, count: int) -> tuple[Simulation, dict[str, Any]]:
    """So many jobs on so many cards."""
    rnd, limit = random.Random(5), next(iter(of.values())).limit
    room = {f"gpu:{k}": Capacity(capacity=limit, gated=True) for k in range(WIDTH)}
    nodes = {
        f"machine{k:04d}": Node(capacities={**room, HOST: Capacity(capacity=1 << 40)}) for k in range(cards // WIDTH)
    }
    jobs: list[Job] = []
    for k in range(count):
        steps = of[rnd.choice(WORKLOADS)]
        jobs.append(
            Job(
                name=f"job{k}",
                ladder=steps.ladder(max(int(steps.batch * rnd.uniform(0.3, 1.2)), 1)),
                steps=rnd.randint(50, 400),
                arrives=rnd.uniform(0, 100),
                starts=5.0,
                compiles=COMPILE,
                gives=GIVES,
                takes=TAKES,
                count=rnd.choice((1, 1, 1, 1, 2, 4)),
                priority=rnd.choice((0, 0, 0, 1)),
                killed=rnd.uniform(0, 100) if rnd.random() < 0.05 else None,
            )
        )
    it = Simulation(nodes, SETTINGS).add(jobs)
    row = timed(it)
    waits = sorted(o.waited for o in it.outcomes)
    turns = sorted(w for o in it.outcomes for w in o.waits)
    speeds = [
        o.steps * o.job.ladder[-1].seconds / (o.ended - o.first_step) for o in it.outcomes if o.ended and o.first_step
    ]
    row |= {
        "cards": cards,
        "jobs": count,
        "killed": sum(o.why == "killed" for o in it.outcomes),
        "most": max(used / limit for m in it.machines.values() for used in m.most.values()),
        "admission p99": waits[int(0.99 * len(waits))],
        "turn p50": turns[len(turns) // 2] if turns else 0.0,
        "turn p99": turns[int(0.99 * len(turns))] if turns else 0.0,
        "jain": jain(speeds),
    }
    return it, row


def table(result: dict[str, Any]) -> str:
    lines = [
        *heading("The simulator", result["machine"], __doc__),
        f"Commit {result['commit']}. The machine had other work ",
    ]
    lines[-1] += f"(load {result['load']:.1f} at the start)."
    lines += [
        "",
        "| jobs on a card | bytes beyond the least | steps | turns | events | CPU | events/s |",
        "|---" * 7 + "|",
    ]
    for row in result["mixes"]:
        lines.append(
            f"| {row['count']} | {row['share']:.0%} | {row['steps']:,} | {row['turns']:,} | {row['events']:,} | "
            f"{row['cpu']:.2f} s | {row['rate']:,.0f} |"
        )
    lines += [
        "",
        "| cards | jobs | killed | steps | turns | moves | virtual | events | CPU | events/s | most of a card | "
        "admitted after, p99 | turn after, p50, p99 |",
        "|---" * 13 + "|",
    ]
    for row in result["fleets"]:
        lines.append(
            f"| {row['cards']:,} | {row['jobs']:,} | {row['killed']} | {row['steps']:,} | {row['turns']:,} | "
            f"{row['moves']:,} | {row['seconds']:,.0f} s | {row['events']:,} | {row['cpu']:.0f} s | {row['rate']:,.0f} "
            f"| {row['most']:.1%} | {row['admission p99']:.1f} s | {row['turn p50']:.2f}, {row['turn p99']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    import os

    from benchmarks.machine import commit, describe

    known = json.loads((HERE / "ladders.json").read_text())["cases"]
    of = {name: Steps(name, CARD, known[f"{name} {CARD}"]) for name in WORKLOADS}
    result: dict[str, Any] = {"machine": describe(), "commit": commit(), "load": os.getloadavg()[0]}
    result |= {"mixes": [], "fleets": []}
    for share in (1.0, 0.3):
        for count in (1, *COUNTS):
            result["mixes"].append({"count": count, "share": share, **timed(mix(of, count, share))})
    for cards, count in [(40, 200)] if options.quick else [(8, 40), (104, 520), (1000, 5000)]:
        result["fleets"].append(fleet(of, cards, count)[1])
        if not options.quick:
            save(HERE / "simulated.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
