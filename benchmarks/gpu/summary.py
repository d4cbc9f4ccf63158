"""What the GPU benchmark measured, for its own table and for those of other benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results.json"
TOLERANCE: Final = 0.02
"""Relative difference of losses that is taken for rounding."""

Row = Mapping[str, Any]


def line(path: Path = RESULTS) -> str:
    """One sentence: what a real GPU showed, or that none was asked yet."""
    if not path.exists():
        return "On a real GPU: not yet measured (`benchmarks/gpu/run.sh`)."
    result = json.loads(path.read_text())
    ours = [row for row in result["rows"] if "budget" in row and "least" in row]
    kept = sum(row["card_bytes"] <= row["budget"] for row in ours)
    same = sum((difference(row, result["rows"]) or 0.0) <= TOLERANCE for row in ours)
    return (
        f"On a real {result['device']} (jax {result['machine']['jax']}, {result['machine']['date']}): {kept} of "
        f"{len(ours)} planned programs are allocated within their budget, {same} have the plain program's loss within "
        f"{TOLERANCE:.0%}; times in `benchmarks/gpu/results.md`."
    )


def plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The plain program of the same workload."""
    return next((r for r in rows if r["spec"] == f"{row['workload']}:plain"), None)


def difference(row: Row, rows: Sequence[Row]) -> float | None:
    """Relative difference of the loss from the plain program's; infinite where one is no number, None: not both ran."""
    plain = plain_of(row, rows)
    if plain is None or not row.get("loss") or not plain.get("loss"):
        return None
    pairs = list(zip(row["loss"], plain["loss"], strict=True))
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    machine, rows = result["machine"], result["rows"]
    where = f"{result['device']}, jax {machine['jax']}, Python {machine['python']}, {machine['date']}"
    lines = [
        f"# Measured on {where}" + (" (dry run: tiny sizes, no measurement)" if result["dry_run"] else ""),
        "",
        "Programs that were planned and lowered without a card, compiled and run on one. MB: argument + output + temp "
        "- alias by XLA without the card, and on it. Steps of a workload's programs take turns; least and quartiles of "
        f"waited-for steps. Over: of the least, over the plain program's; beside it what the kernels of the compile "
        f"without a card say, and the model. {result['seconds']:.0f} s in all.",
        "",
        "| program | budget MB | MB | on the card | least ms | quartiles | over % | by kernels | by the model "
        "| loss differs by |",
        "|" + "---|" * 10,
    ]
    lines += [f"| {row['spec']} | {_cells(row, rows)} |" for row in rows]
    if isinstance(link := result.get("link"), dict):
        rates = ", ".join(f"{way.replace('_', ' ')} {rate / 1e9:.1f} GB/s" for way, rate in link.items())
        lines += ["", f"Host link, pinned memory, one copy at a time: {rates}."]
    return "\n".join(lines) + "\n"


def _cells(row: Row, rows: Sequence[Row]) -> str:
    def mb(key: str) -> str:
        return f"{row[key] / 1e6:,.1f}" if row.get(key) is not None else ""

    told = [mb("budget"), mb("bytes"), mb("card_bytes")]
    if why := row.get("error") or row.get("refused") or ("" if "least" in row else "not run"):
        return " | ".join([*told, why.splitlines()[0][:160].replace("|", "/"), *[""] * 5])
    plain = plain_of(row, rows)
    over = ["", "", ""]
    if plain is not None and plain is not row and "least" in plain:
        over[0] = f"{row['least'] / plain['least'] - 1:+.1%}"
        if row.get("kernels_seconds") and plain.get("kernels_seconds"):
            over[1] = f"{row['kernels_seconds'] / plain['kernels_seconds'] - 1:+.1%}"
        over[2] = f"{row['model_overhead']:+.1%}" if row.get("model_overhead") is not None else ""
    differs = difference(row, rows)
    quartiles = " ".join(f"{1e3 * q:.2f}" for q in row["quartiles"])
    return " | ".join(
        [*told, f"{1e3 * row['least']:.2f}", quartiles, *over, f"{differs:.1e}" if differs is not None else ""]
    )
