"""What is it worth to know that the copies of all jobs on a card share one link?

    python -m benchmarks.concurrent.link

Simulated, without turns (``turns = false``): all jobs of a card run at once, so that their steps share its compute and
its link (``runtime.simulate.sharing``). Ladders are those of ``ladders.json``, by recomputation and with copies to the
host, both: a job brings for each size of memory the plans of either kind. *Streams* copies its optimizer's state in
and out at each step of a small batch: GPT-2's 1.0 GB of moments at the rate that copies are planned for, which takes
longer than the step's work. The coordinator is told the ladders with the seconds of their copies, or without these, as
before it knew of them; the policy is ``slowdown``. Seconds are until all jobs have made as many steps as they make in
120 s alone; lower is better. Results go to ``link.json`` and ``link.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from benchmarks.concurrent.ladders import HOSTED
from benchmarks.concurrent.mixes import ALONE, GPU
from benchmarks.isolate import heading, save
from jaxtensile.devices.profiles import profile
from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.runtime.simulate.jobs import Job
from jaxtensile.runtime.simulate.simulation import Node, Simulation
from jaxtensile.search.request import LINK_SHARE
from jaxtensile.units import GIB

HERE = Path(__file__).parent
MOMENTS: Final = 2 * 4 * 124_439_808
"""Bytes of Adam's moments of GPT-2 small, in f32."""
SHARES: Final = (0.35, 0.5, 0.65, 0.8)
"""Of what the jobs of a mix want, what there is."""


SAME: Final = 5e-3
"""Relative difference of slowdowns below which they are equal."""
WHY: Final = (
    "What knowing gains is bounded here by how little the plans copy: a tenth to a quarter of a step's seconds, "
    "since the planner takes copies only where they are hidden. Such jobs are in each other's way by their work "
    "before they are by their copies; a job that is bound by the link is what makes the difference. Where a plan "
    "copies for as long as it computes, and another job is bound by the link, both end in 0.6 of the time "
    "(`tests/runtime/simulate/test_simulation.py`). A job's own ladder has one plan for each size of memory so "
    "far, so that it seldom has the choice that is given here. Where knowing is worse, jobs stay where they are "
    "for less than `min_gain`, 5 %, and where that is depends on who came first."
)
"""Of what the figures say."""


def both(known: dict[str, Any], name: str, card: str) -> tuple[Rung, ...]:
    """The plans of either kind by ascending bytes, without those that another beats in bytes, seconds and copies."""
    rungs = [Rung(**r) for k in (f"{name} {card}", f"{name} {card} host") for r in known[k]["ladder"]]
    kept = [
        r
        for k, r in enumerate(rungs)
        if not any(
            (o.level, o.seconds, o.into) <= (r.level, r.seconds, r.into)
            and o.level <= r.level
            and o.seconds <= r.seconds
            and o.into <= r.into
            and n != k
            and ((o.level, o.seconds, o.into) != (r.level, r.seconds, r.into) or n < k)
            for n, o in enumerate(rungs)
        )
    ]
    found: dict[int, Rung] = {r.level: r for r in sorted(kept, key=lambda r: -r.seconds)}
    return tuple(found[level] for level in sorted(found))


def streams(known: dict[str, Any], card: str) -> tuple[Rung, ...]:
    """Steps of a quarter of a quarter of GPT-2's batch, whose optimizer's state is on the host between them."""
    quarter = Rung(**known[f"gpt2_small {card}"]["quarter"])
    work, copy = quarter.seconds / 4, MOMENTS / (profile(card).link_bandwidth * LINK_SHARE)
    seconds = max(work, copy)
    return (
        Rung(
            persistent=quarter.persistent,
            temp=quarter.temp // 4,
            host=MOMENTS,
            seconds=seconds,
            wait=seconds - work,
            into=copy,
            out=copy,
        ),
    )


def blind(ladder: Sequence[Rung]) -> tuple[Rung, ...]:
    """The ladder without what its copies take."""
    return tuple(structs.replace(r, wait=0.0, into=0.0, out=0.0) for r in ladder)


def took(jobs: Sequence[Job], room: int) -> dict[str, Any]:
    """Seconds until all have ended, and where each ran most steps."""
    nodes = {"card": Node(capacities={GPU: Capacity(capacity=room), HOST: Capacity(capacity=1 << 50)})}
    outcomes = Simulation(nodes, Settings(lease_ttl=float("inf"), min_hold=1.0)).add(jobs).run()
    assert not any(o.why for o in outcomes)
    chosen = {o.job.name: max(o.rungs, key=lambda k, o=o: o.rungs[k]) for o in outcomes}
    return {
        "seconds": max(o.ended or 0.0 for o in outcomes),
        "mean": sum((o.ended or 0.0) / ALONE for o in outcomes) / len(outcomes),
        "rungs": chosen,
        "copies": sum(o.job.ladder[chosen[o.job.name]].into > 0 for o in outcomes),
    }


def table(result: dict[str, Any]) -> str:
    lines = [*heading("One link for all jobs of a card", result["machine"], __doc__), f"Commit {result['commit']}.", ""]
    lines += [
        "| card | mix | bytes | knows: seconds, mean slowdown, jobs that copy | does not know | gain |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        a, b = row["knows"], row["blind"]
        cells = [f"{x['seconds']:.0f} s, {x['mean']:.2f}, {x['copies']}" for x in (a, b)]
        lines.append(
            f"| {row['card']} | {row['mix']} | {row['room'] / GIB:.1f} GiB | {' | '.join(cells)} | "
            f"{b['mean'] / a['mean']:.3f} x |"
        )
    gains = [r["blind"]["mean"] / r["knows"]["mean"] for r in result["rows"]]
    better, worse = sum(g > 1 + SAME for g in gains), sum(g < 1 - SAME for g in gains)
    lines += [
        "",
        f"Better in {better}, worse in {worse} of {len(gains)} mixes; {min(gains):.2f} to {max(gains):.2f} x.",
    ]
    return "\n".join([*lines, "", WHY]) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from benchmarks.machine import commit, describe

    known = json.loads((HERE / "ladders.json").read_text())["cases"]
    result: dict[str, Any] = {"machine": describe(), "commit": commit(), "rows": []}
    for name, card in HOSTED:
        ladder, stream = both(known, name, card), streams(known, card)
        for trainings, streaming in ((1, 1), (2, 1), (2, 2), (3, 0)):
            kinds = [("trains", ladder)] * trainings + [("streams", stream)] * streaming
            least, most = (sum(rungs[end].level for _, rungs in kinds) for end in (0, -1))
            for share in SHARES:
                room = int(least + share * (most - least))
                row: dict[str, Any] = {
                    "card": card,
                    "mix": f"{trainings} x {name}, {streaming} x streams",
                    "room": room,
                }
                for how, tell in (("knows", tuple), ("blind", blind)):
                    jobs = [
                        Job(
                            name=f"{kind}-{k}",
                            ladder=rungs,
                            told=tell(rungs),
                            steps=round(ALONE / min(r.seconds for r in rungs)),
                            devices=(GPU,),
                        )
                        for k, (kind, rungs) in enumerate(kinds)
                    ]
                    row[how] = took(jobs, room)
                result["rows"].append(row)
    save(HERE / "link.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
