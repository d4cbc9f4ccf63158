"""What was decided and what XLA said of it, for people (text) and programs (JSON).

Invariant: a figure that XLA gave is marked as compiled, a figure of our own as predicted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtensile.plan import Action, Keep, MemoryUse, Remat
from jaxtensile.units import Bytes, Flops, Seconds, format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One kept or recomputed residual in the user's words."""

    kind: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: Bytes
    source: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one plan. Bytes are device bytes, times predicted seconds unless said otherwise.

    ``baseline``: the unchanged program (``.exact`` when it was compiled); ``predicted``: the
    planned one by our model; ``compiled``: the planned one by XLA; ``lower_bound``: no plan can
    need less; ``overhead``: extra seconds of a step, ``overhead_ratio`` relative to the step;
    ``rounds``: compiles of planned programs; ``seconds``: wall time per pipeline step.
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
    notes: tuple[str, ...]
    seconds: Mapping[str, Seconds]

    @property
    def fits(self) -> bool:
        """Whether XLA's allocation is within the budget."""
        return self.compiled.device <= self.budget

    @property
    def unchanged(self) -> bool:
        """Whether the program runs as the user wrote it."""
        return not self.actions

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"

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
            "overhead": self.overhead,
            "overhead_ratio": self.overhead_ratio,
            "stages": self.stages,
            "rounds": self.rounds,
            "unknown_primitives": list(self.unknown_primitives),
            "solver": self.solver,
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
            "actions": [
                {
                    "kind": d.kind,
                    "primitive": d.primitive,
                    "dtype": d.dtype,
                    "shape": list(d.shape),
                    "nbytes": d.nbytes,
                    "source": d.source,
                }
                for d in self.decisions
            ],
        }

    def to_json(self, path: str | None = None) -> str:
        """The report as JSON text; also written to ``path`` when given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text


def _lines(report: Report) -> list[str]:
    r = report
    verdict = "fits" if r.fits else "DOES NOT FIT"
    lines = [f"{r.name} on {r.target}: {verdict} {format_bytes(r.budget)}"]
    lines.append(f"  {'':<10} {'device':>10} = {'argument':>10} + {'output':>10} + {'temp':>10} - {'alias':>10}")
    for label, use in (("plain", r.baseline), ("predicted", r.predicted), ("compiled", r.compiled)):
        mark = "XLA" if use.exact else "model"
        row = f"  {label:<10} {format_bytes(use.device):>10} = {format_bytes(use.argument):>10} + "
        row += f"{format_bytes(use.output):>10} + {format_bytes(use.temp):>10} - {format_bytes(use.alias):>10}  {mark}"
        lines.append(row)
    lines.append(f"  no plan by recomputation can need less than {format_bytes(r.lower_bound)}")
    if r.unchanged:
        lines.append("  the program fits as it is: unchanged")
    else:
        lines.extend(_plan_lines(r))
    if r.unknown_primitives:
        lines.append(f"  no cost rule of their own: {', '.join(r.unknown_primitives)}")
    lines.extend(f"  note: {note}" for note in r.notes)
    times = ", ".join(f"{name} {format_seconds(t)}" for name, t in r.seconds.items())
    lines.append(f"  took {times}")
    return lines


def _plan_lines(r: Report) -> list[str]:
    keeps = [a for a in r.actions if isinstance(a, Keep)]
    remats = [a for a in r.actions if isinstance(a, Remat)]
    lines = [
        f"  keep {len(keeps)} residuals ({format_bytes(sum(a.nbytes for a in keeps))}), recompute {len(remats)} "
        f"({format_bytes(sum(a.nbytes for a in remats))}) in {r.stages} stages; {r.rounds} "
        f"{'round' if r.rounds == 1 else 'rounds'}",
        f"  matrix FLOPs x {1 + r.recompute_flops / r.flops if r.flops else 1:.3f}, predicted step time "
        f"+{format_seconds(r.overhead)} ({100 * r.overhead_ratio:.1f} %)",
    ]
    for kind in ("keep", "recompute"):
        groups: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for d in r.decisions:
            if d.kind == kind:
                label = f"{d.primitive} {d.dtype}{list(d.shape)} at {d.source}"
                groups[label] += d.nbytes
                counts[label] += 1
        for label, nbytes in groups.most_common(6):
            lines.append(f"    {kind:<9} {format_bytes(nbytes):>10}  {counts[label]:>3} x {label}")
        rest = len(groups) - 6
        if rest > 0:
            lines.append(f"    {kind:<9} … and {rest} more kinds")
    return lines
