"""What do copies of a network that share a card save and pay, beside the figures of TENSILE for several workloads?

    python -m benchmarks.concurrent.tensile

One to four copies of a network's training step at batch 2, and the four networks together, on a V100, simulated
(``runtime.simulate``) with ladders that are predicted, not compiled. MSR = 1 - peak / peak0, EOR = t / t0 - 1,
CBR = MSR / EOR (TENSILE, arXiv 2105.13336), where peak0 and t0 are of as many steps as they are, all at once. *As they
are*: in turns, with room for all states and the largest temporaries. *Least*: with room for the smallest plans only.
*Cold*: from the first process's start, with a compile of 5 s for each plan; *warm*: the steps and hand-overs alone. A
hand-over takes 5 ms, a guess that is long beside steps of so small a batch. The authors' figures are of three copies,
for their card and optimizer, which their data do not name. Results go to ``tensile.json`` and ``tensile.md``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from benchmarks.concurrent.ladders import ladder
from benchmarks.concurrent.mixes import COMPILE, GIVES, GPU, TAKES
from benchmarks.isolate import heading, isolated, save
from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.runtime.simulate.jobs import Job
from jaxtensile.runtime.simulate.simulation import Node, Simulation

HERE = Path(__file__).parent
MODULE = "concurrent.tensile"
CARD: Final = "nvidia-v100-16gb"
BATCH: Final = 2
STEPS: Final = 2000
AUTHORS: Final = {
    "vgg16": (0.242, 0.565),
    "inception_v3": (0.272, 0.193),
    "resnet50": (0.297, 0.435),
    "densenet121": (0.212, 0.070),
}
"""MSR and EOR of TENSILE for three copies at batch 2, from the data its authors publish with their code; InceptionV4,
which is not here, has 0.422 and 0.070."""
COLD: Final = {"vgg16": 0.167, "inception_v3": 0.188, "resnet50": 0.183, "densenet121": 0.125}
"""Their MSR from a cold start."""
LIMIT: Final = 400.0


def shared(ladders: list[tuple[Rung, ...]], rung: int) -> dict[str, float]:
    """The jobs of those ladders with room for that rung of each, in turns; against all as they are at once."""
    tops, room = [ladder[-1] for ladder in ladders], 0
    room = sum(ladder[0].persistent for ladder in ladders) + max(ladder[rung].temp for ladder in ladders)
    usual = sum(r.level for r in tops)
    steps = [max(round(STEPS * tops[0].seconds / r.seconds), 1) for r in tops]
    alone = sum(n * r.seconds for n, r in zip(steps, tops, strict=True))
    jobs = [
        Job(name=f"job{k}", ladder=of, steps=n, devices=(GPU,), compiles=COMPILE, gives=GIVES, takes=TAKES)
        for k, (of, n) in enumerate(zip(ladders, steps, strict=True))
    ]
    nodes = {"card": Node(capacities={GPU: Capacity(capacity=room, gated=True)})}
    it = Simulation(nodes, Settings(lease_ttl=float("inf"))).add(jobs)
    outcomes = it.run()
    end = max(o.ended or 0.0 for o in outcomes)
    begun = min(o.first_step or 0.0 for o in outcomes)
    return {
        "msr": 1 - it.machines["card"].most[GPU] / usual,
        "warm": (end - begun) / alone - 1,
        "cold": end / (alone + COMPILE) - 1,
    }


def mixes(known: dict[str, tuple[Rung, ...]]) -> dict[str, list[tuple[Rung, ...]]]:
    """Copies of each network, and one of each together."""
    found = {f"{k} x {name}": [of] * k for name, of in known.items() for k in (1, 2, 3, 4)}
    return {**found, "all together": [*known.values()]}


def table(result: dict[str, Any]) -> str:
    lines = [
        *heading("Copies of networks that share a card", result["machine"], __doc__),
        f"Commit {result['commit']}.",
        "",
    ]
    lines += [
        "| | as they are: MSR | EOR warm | cold | CBR warm | least: MSR | EOR warm | cold | CBR warm "
        "| TENSILE: MSR, cold | EOR | CBR |",
        "|---" * 12 + "|",
    ]
    for name, row in result["rows"].items():
        cells: list[str] = []
        for key in ("as they are", "least"):
            r = row[key]
            ratio = f"{r['msr'] / r['warm']:.1f}" if r["warm"] > 1e-3 else "-"
            cells += [f"{r['msr']:.3f}", f"{r['warm']:.3f}", f"{r['cold']:.3f}", ratio]
        network = name.removeprefix("3 x ")
        if network in AUTHORS:
            msr, eor = AUTHORS[network]
            cells += [f"{msr:.3f}, {COLD[network]:.3f}", f"{eor:.3f}", f"{msr / eor:.1f}"]
        else:
            cells += ["", "", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    left = [name for name, of in result["ladders"].items() if "ladder" not in of]
    if left:
        lines += ["", f"Without {' and '.join(left)}, whose ladders were not made within {LIMIT:.0f} s each."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps({"ladder": ladder(options.case, CARD, 4, batch=BATCH)}))
        return
    from benchmarks.machine import commit, describe

    path = HERE / "tensile.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    result: dict[str, Any] = {
        "machine": describe(),
        "commit": commit(),
        "ladders": before.get("ladders", {}),
        "rows": {},
    }
    for name in AUTHORS:
        if "ladder" not in result["ladders"].get(name, {}):
            result["ladders"][name] = isolated(MODULE, name, limit=LIMIT)
            save(path, result, table)
    known = {n: tuple(Rung(**r) for r in of["ladder"]) for n, of in result["ladders"].items() if "ladder" in of}
    for name, ladders in mixes(known).items():
        result["rows"][name] = {"as they are": shared(ladders, -1), "least": shared(ladders, 0)}
    save(path, result, table)
    print(table(result))


if __name__ == "__main__":
    main()
