"""What do the workloads bring to a coordinator: their ladders on each card, as predicted before anything is compiled?

    python -m benchmarks.concurrent.ladders

For each workload and card the ladder of the published step, by recomputation alone and, for some, with copies to the
host; and bytes and seconds of the program as it is at a quarter of its batch, from which other batches follow along a
line. Every case runs in a process of its own; results go to ``ladders.json``, and a run goes on from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

from benchmarks.isolate import isolated

HERE = Path(__file__).parent
MODULE = "concurrent.ladders"
CARDS: Final = ("nvidia-h200", "nvidia-h100-80gb", "nvidia-a100-40gb", "nvidia-rtx-3060")
WORKLOADS: Final = ("gpt2_small", "bert_base", "resnet50", "vit_b")
HOSTED: Final = (("gpt2_small", "nvidia-h100-80gb"), ("bert_base", "nvidia-h100-80gb"))
"""With copies to the host: on a card whose steps are short beside its copies."""
HOST: Final = 64 << 30
LIMIT: Final = 900.0
"""Seconds for one ladder."""


def ladder(name: str, card: str, count: int, host: int = 0, **sizes: Any) -> list[dict[str, Any]]:
    """The rungs that a job of this workload asks to be admitted with; one: of the program as it is."""
    import jax

    from benchmarks import workloads
    from jaxtensile.devices.profiles import profile
    from jaxtensile.jobs.ladder import Ladder, together
    from jaxtensile.search.request import Request

    work = workloads.workload(name, **sizes)
    given = work.jit_options.get("donate_argnums", ())
    donate = (given,) if isinstance(given, int) else given
    request = Request(
        name=name,
        jaxpr=jax.jit(work.fun, **work.jit_options).trace(*work.args).jaxpr,
        donated=tuple(k in donate for k, a in enumerate(work.args) for _ in jax.tree.leaves(a)),
        args=work.args,
        kwargs={},
        budget=1 << 50,
        device=profile(card),
        shards=1,
        make=_compiles_nothing,
        options={},
        host_budget=host,
    )
    found = Ladder(request)
    found.sketch(count)
    return [to_builtins(rung) for rung in together([found])]


def _compiles_nothing(*_: Any) -> Any:
    raise AssertionError("a ladder is predicted without a compile")


def case(what: str) -> dict[str, Any]:
    """The ladders of one case, ``NAME CARD`` or ``NAME CARD host``, in this process."""
    from benchmarks import workloads
    from jaxtensile.jobs.ladder import RUNGS

    name, card, *host = what.split()
    if host:
        return {"ladder": ladder(name, card, RUNGS, HOST)}
    batch = workloads.load(name).Config().batch
    return {
        "batch": batch,
        "ladder": ladder(name, card, RUNGS),
        "quarter": ladder(name, card, 1, batch=batch // 4)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case)))
        return
    from benchmarks.machine import commit, describe

    path = HERE / "ladders.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"cases": {}}
    result |= {"machine": describe(), "commit": commit()}
    cases = [f"{name} {card}" for card in reversed(CARDS) for name in WORKLOADS]
    for what in [*cases, *(f"{name} {card} host" for name, card in HOSTED)]:
        if what not in result["cases"] or "crash" in result["cases"][what]:
            result["cases"][what] = isolated(MODULE, what, limit=LIMIT)
            path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
