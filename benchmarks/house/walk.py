"""One call's way through the house: which files and rooms it enters, and how often it goes from one room to another.

    python -m benchmarks.house.walk [--draft LAYOUT.json]

Three walks, each of a small network on this machine's CPU: ``plan()``, the first call of a ``jit``, and a job's first
step. Every Python call from one of our files into another is counted. A *room* is a folder; a *way* is a pair of rooms
of which the first calls the second; a *driver* is a file of the rooms that decide what happens next (``DRIVERS``) and
no plain value (``VALUES``); a *visit* is a call into one from another file, of what that was not handed down itself.
``--draft``: a JSON object from today's modules to those of another layout (below ``jaxtensile``), which is walked
instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUDGET, LAYERS, WIDTH, ROWS = "8MiB", 16, 64, 1024
DRIVERS = ("api", "spmd", "jobs", "search", "planner")
VALUES = ("search.request", "search.variant", "search.modelled", "clock", "search.made")
"""Files of these rooms that say what something is, and decide nothing."""


class Walk:
    """Calls between modules while it is entered."""

    def __init__(self, draft: dict[str, str]) -> None:
        import jaxtensile

        self.root = str(Path(jaxtensile.__file__).parent) + os.sep
        self.draft = draft
        self.calls: Counter[tuple[str, str]] = Counter()
        self.visits: Counter[str] = Counter()
        self._where: list[str] = [""]
        self._names: dict[str, str] = {}

    def __enter__(self) -> Walk:
        sys.setprofile(self._saw)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _saw(self, frame: Any, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            name = (code.co_name != "<module>" and self._module(code.co_filename)) or self._where[-1]
            if name != self._where[-1] and self._where[-1]:
                self.calls[self._where[-1], name] += 1
                self.visits[name] += "<locals>" not in code.co_qualname
            self._where.append(name)
        elif event == "return" and len(self._where) > 1:
            self._where.pop()

    def _module(self, file: str) -> str:
        if file not in self._names:
            name = file[len(self.root) : -len(".py")].replace(os.sep, ".") if file.startswith(self.root) else ""
            self._names[file] = self.draft.get(name, name)
        return self._names[file]

    @property
    def modules(self) -> set[str]:
        return {name for call in self.calls for name in call}

    @property
    def ways(self) -> set[tuple[str, str]]:
        return {(room(a), room(b)) for a, b in self.calls if room(a) != room(b)}

    def drivers(self) -> Counter[str]:
        """Visits of each driver."""
        return Counter(
            {name: n for name, n in self.visits.items() if n and room(name) in DRIVERS and name not in VALUES}
        )


def room(module: str) -> str:
    return module.rpartition(".")[0] or "top"


def walks() -> dict[str, Callable[[], object]]:
    import jax
    import jax.numpy as jnp

    import jaxtensile

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jax.nn.gelu(x @ w)
        return (x * x).sum()

    def plan() -> object:
        shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
        step = jaxtensile.jit(jax.grad(loss), budget=BUDGET, target="cpu")
        return step.plan(shapes, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))

    arrays = [jnp.ones((WIDTH, WIDTH))] * LAYERS, jnp.ones((ROWS, WIDTH))

    def first_call() -> object:
        return jaxtensile.jit(jax.grad(loss), budget=BUDGET)(*arrays)

    def lease() -> object:
        with jaxtensile.job("walk") as job:
            return jaxtensile.jit(jax.grad(loss), job=job)(*arrays)

    return {"plan()": plan, "first call of jit": first_call, "first step of a job": lease}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the moves of one call between rooms.")
    parser.add_argument("--draft", type=Path)
    asked = parser.parse_args()
    os.environ["JAXTENSILE_PLAN_CACHE"] = "off"
    draft = json.loads(asked.draft.read_text()) if asked.draft else {}
    for name, run in walks().items():
        run()  # what is imported late is imported now
        with Walk(draft) as walk:
            run()
        drivers = walk.drivers()
        print(
            f"{name}: {len(walk.modules)} files in {len({room(m) for m in walk.modules})} rooms, {len(walk.ways)} ways"
        )
        print(f"  {drivers.total()} visits of {len(drivers)} drivers:", *(f"{n} {c}" for n, c in drivers.most_common()))


if __name__ == "__main__":
    main()
