"""What was decided and what XLA said of it: the data, and the ways to read it.

``report_text`` is what people read first, ``report_html`` a page with a chart, ``report_trace``
a timeline for Perfetto; JSON is for programs.

Invariant: a figure that XLA gave is marked as compiled, a figure of our own as predicted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from jaxtensile.plan import NOTHING_AGAIN, Action, Leaf, MemoryUse, Recomputed
from jaxtensile.report_text import as_text
from jaxtensile.timeline import Timeline
from jaxtensile.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One kept or recomputed residual in the user's words.

    ``stored``: the plain program has it in memory where it needs most. What is recomputed and is not is a step on the
    way to others, or in memory for a moment alone.
    """

    kind: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: Bytes
    source: str
    stored: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a function, its value as text, and who says so.

    ``source``: ``"code"``, ``"default"``, ``"job"`` (its lease), or file and line of the config, whose ``table`` it is.
    """

    name: str
    value: str
    source: str
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one plan. Bytes are device bytes, times predicted seconds unless said otherwise.

    ``baseline``: the unchanged program (``.exact`` when it was compiled); ``predicted``: the
    planned one by our model; ``compiled``: the planned one by XLA; ``lower_bound``: no plan can
    need less; ``overhead``: extra seconds of a step, ``overhead_ratio`` relative to the step;
    ``rounds``: compiles of planned programs; ``seconds``: wall time per pipeline step;
    ``timeline``: the model's bytes while each op runs; ``undone``: runs without the user's own
    ``jax.checkpoint``s; ``solver``: which made the plan, and ``gap``: what share of its recomputation
    another plan around the same turn might spare, by the model (0.0: none, proven; None: not known);
    ``offload_bytes``: what leaves for the host in a step, ``state``: the arguments that wait there between steps, by
    their names, ``wait``: the part of ``overhead`` that is waiting for copies.
    ``rewritten``: its loops, branches or large products are made in another way;
    ``step``: predicted seconds of a step of what runs, ``measured``: median seconds of a few of its first calls (None
    until there were enough, and where it runs unchanged), ``renewed``: how often those led to another plan.
    ``settings``: the options that it was planned by, and where each is from; ``xla``: what XLA recomputes by itself in
    what runs, which ``overhead`` and ``recompute_flops`` hold too.
    ``flops`` are those of the program as written, so ``recompute_flops`` and ``overhead`` are negative
    where a checkpoint recomputed more than the budget needs.
    """

    name: str
    target: str
    budget: Bytes
    baseline: MemoryUse
    predicted: MemoryUse
    compiled: MemoryUse
    lower_bound: Bytes
    actions: tuple[Action, ...]
    decisions: tuple[Decision, ...] = field(repr=False)
    flops: Flops
    recompute_flops: Flops
    offload_bytes: Bytes = 0
    overhead: Seconds
    overhead_ratio: float
    stages: int
    rounds: int
    unknown_primitives: tuple[str, ...]
    solver: str
    gap: float | None = None
    notes: tuple[str, ...]
    seconds: Mapping[str, Seconds]
    timeline: Timeline | None = field(default=None, repr=False)
    undone: bool = False
    rewritten: bool = False
    wait: Seconds = 0.0
    state: tuple[Leaf, ...] = ()
    step: Seconds = 0.0
    measured: Seconds | None = None
    renewed: int = 0
    settings: tuple[Setting, ...] = ()
    xla: Recomputed = NOTHING_AGAIN

    @property
    def fits(self) -> bool:
        """Whether XLA's allocation is within the budget; False where XLA cannot tell it."""
        return self.compiled.exact and self.compiled.device <= self.budget

    @property
    def unchanged(self) -> bool:
        """Whether the program runs as the user wrote it."""
        return not (self.actions or self.undone or self.state or self.rewritten)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        from jaxtensile.report_html import as_fragment

        return as_fragment(self)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """The report as one HTML page that needs nothing else; also written to ``path`` when given."""
        from jaxtensile.report_html import as_page

        return _written(as_page(self), path)

    def to_perfetto(self, path: str | PathLike[str] | None = None) -> str:
        """Live bytes and predicted times as trace JSON, for ui.perfetto.dev; also written to ``path`` when given."""
        from jaxtensile.report_trace import as_trace

        return _written(as_trace(self), path)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""

        def use(m: MemoryUse) -> dict[str, Any]:
            return {
                "argument": m.argument,
                "output": m.output,
                "temp": m.temp,
                "alias": m.alias,
                "host": m.host,
                "device": m.device,
                "exact": m.exact,
            }

        return {
            "name": self.name,
            "target": self.target,
            "budget": self.budget,
            "fits": self.fits,
            "baseline": use(self.baseline),
            "predicted": use(self.predicted),
            "compiled": use(self.compiled),
            "lower_bound": self.lower_bound,
            "flops": self.flops,
            "recompute_flops": self.recompute_flops,
            "offload_bytes": self.offload_bytes,
            "wait": self.wait,
            "step": self.step,
            "measured": self.measured,
            "renewed": self.renewed,
            "state": [{"name": leaf.name, "nbytes": leaf.nbytes} for leaf in self.state],
            "overhead": self.overhead,
            "overhead_ratio": self.overhead_ratio,
            "xla": {"recomputed": self.xla.count, "flops": self.xla.flops, "seconds": self.xla.seconds},
            "stages": self.stages,
            "rounds": self.rounds,
            "undone": self.undone,
            "unknown_primitives": list(self.unknown_primitives),
            "solver": self.solver,
            "gap": self.gap,
            "notes": list(self.notes),
            "settings": [
                {"name": s.name, "value": s.value, "source": s.source, "table": s.table} for s in self.settings
            ],
            "seconds": dict(self.seconds),
            "actions": [
                {
                    "kind": d.kind,
                    "primitive": d.primitive,
                    "dtype": d.dtype,
                    "shape": list(d.shape),
                    "nbytes": d.nbytes,
                    "source": d.source,
                    "stored": d.stored,
                }
                for d in self.decisions
            ],
        }

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The report as JSON text; also written to ``path`` when given."""
        return _written(json.dumps(self.to_dict(), indent=1), path)


def _written(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text
