"""``jaxtensile.Report``: the facts of a plan, and the ways to read them.

``text`` is for people, ``html`` a page with a chart, ``trace`` a timeline for Perfetto, JSON for programs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from jaxtensile.ir.plan import CompiledTime, MemoryUse
from jaxtensile.report.facts import Facts
from jaxtensile.report.text import as_text


@dataclass(frozen=True, kw_only=True)
class Report(Facts):
    __doc__ = Facts.__doc__

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        from jaxtensile.report.html import as_fragment

        return as_fragment(self)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """The report as one self-contained HTML page; also written to ``path`` if given."""
        from jaxtensile.report.html import as_page

        return _written(as_page(self), path)

    def to_perfetto(self, path: str | PathLike[str] | None = None) -> str:
        """Live bytes and predicted times as trace JSON, for ui.perfetto.dev; also written to ``path`` if given."""
        from jaxtensile.report.trace import as_trace

        return _written(as_trace(self), path)

    def why(self, place: str) -> str:
        """What was decided for the values made at ``place``, and what the other choice would cost by the model.

        ``place``: ``"model.py:41"``, ``"model.py"``, or the name of a function.
        """
        from jaxtensile.report.why import why

        return why(self, place)

    def diff(self, other: Report) -> str:
        """What is otherwise in ``other``, a later report: bytes, FLOPs, seconds, and the values treated otherwise."""
        from jaxtensile.report.difference import difference

        return difference(self.to_dict(), other.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""

        def by_kernels(time: CompiledTime | None) -> dict[str, Any] | None:
            return None if time is None else asdict(time)

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
            "kernels": by_kernels(self.kernels),
            "plain_kernels": by_kernels(self.plain_kernels),
            "stages": self.stages,
            "rounds": self.rounds,
            "parts": self.parts,
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
                    "again": d.again,
                }
                for d in self.decisions
            ],
        }

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The report as JSON text; also written to ``path`` if given."""
        return _written(json.dumps(self.to_dict(), indent=1), path)


def _written(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text
