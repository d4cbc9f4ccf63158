"""What the GPU benchmark measured, for its own table and for those of other benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
TOLERANCE, COMPARED = 0.02, 5
"""Relative difference of losses that is taken for rounding, over so many first steps: training amplifies it."""


def line(path: Path = RESULTS) -> str:
    """One sentence: what a real GPU showed, or that none was asked yet."""
    if not path.exists():
        return "On a real GPU: not yet measured (`benchmarks/gpu/run.sh`)."
    result = json.loads(path.read_text())
    rows, at = compared(result["cases"]), result.get("device", "a GPU")
    held = [row for row in rows if within(row) is not None]
    kept = sum(bool(within(row)) for row in held)
    differences = [d for row in rows if (d := difference(row, result["cases"])) is not None]
    same = sum(d <= TOLERANCE for d in differences)
    return (
        f"On a real {at} (jax {result['machine']['jax']}, {result['machine']['date']}): {kept} of {len(held)} planned "
        f"programs peak within their budget by `memory_stats`, {same} of {len(differences)} have the plain program's "
        f"losses within {TOLERANCE:.0%}; times in `benchmarks/gpu/results.md`."
    )


def compared(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases in which a program of ours ran."""
    return [row for row in cases if "step_seconds" in row.get("ours", {})]


def within(row: dict[str, Any]) -> bool | None:
    """Whether the device's own peak is within the budget; None where it does not tell."""
    peak = row["ours"].get("peak_bytes")
    return None if peak is None else peak <= row["ours"]["budget"]


def unchanged(row: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of the unchanged program of this case: its own, or the plain GPT-2 step's."""
    own = row if row["case"].startswith("suite:") else next((c for c in cases if c["case"] == "gpt2:none"), {})
    return own.get("peer", {})


def difference(row: dict[str, Any], cases: list[dict[str, Any]]) -> float | None:
    """The largest relative difference of our program's losses from the unchanged program's; None: not both ran."""
    ours, plain = row.get("ours", {}).get("losses"), unchanged(row, cases).get("losses")
    if not ours or not plain:
        return None
    pairs = list(zip(ours, plain, strict=False))[:COMPARED]
    if not all(map(math.isfinite, ours[:COMPARED] + plain[:COMPARED])):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, cases = result["machine"], result["cases"]
    where = f"{result.get('device', 'no device')}, jax {m['jax']}, Python {m['python']}, {m['date']}"
    lines = [
        f"# Measured on {where}" + (" (dry run: tiny sizes on a CPU, no measurement)" if result["dry_run"] else ""),
        "",
        f"Step: median of waited-for steps. XLA MB: argument + output + temp - alias. Peak MB: `memory_stats` of the "
        "process, initialisation and autotuning included. Overhead: step time over that of the unchanged program. "
        f"{result['seconds']:.0f} s in all.",
        "",
        "| case | program | budget MB | XLA MB | peak MB | host MB | step ms | overhead | predicted | losses differ by "
        "| compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in cases:
        name = row["case"]
        if "skipped" in row or "crash" in row:
            why = row.get("skipped") or "failed: " + row["crash"].strip().splitlines()[-1][:160].replace("|", "/")
            lines.append(f"| {name} | {why} | | | | | | | | | |")
        base = unchanged(row, cases).get("step_seconds")
        for program in ("peer", "ours"):
            if program in row:
                differ = difference(row, cases) if program == "ours" else None
                lines.append(f"| {name} | {program} {_cells(row[program], base, differ)}")
    if link := next((row["link"] for row in cases if "link" in row), None):
        rates = ", ".join(f"{way.replace('_', ' ')} {rate / 1e9:.1f} GB/s" for way, rate in link.items())
        lines += ["", f"Host link, pinned memory, one copy at a time: {rates}."]
    if result.get("missing"):
        lines += ["", f"Not installed, so that cases which need them failed: {', '.join(result['missing'])}."]
    return "\n".join(lines) + "\n"


def _cells(one: dict[str, Any], base: float | None, differs: float | None) -> str:
    def mb(key: str) -> str:
        return f"{one[key] / 1e6:,.1f}" if one.get(key) is not None else ""

    if "error" in one:
        return f"| {mb('budget')} | does not fit: {mb('needs')} | | | | | | | |"
    step = one.get("step_seconds")
    predicted = f"{one['predicted_overhead']:+.1%}" if "predicted_overhead" in one else ""
    differ = f"{differs:.1e}" if differs is not None else ""
    return (
        f"| {mb('budget')} | {mb('xla_bytes')} | {mb('peak_bytes')} | {mb('host_bytes')} "
        f"| {f'{step * 1e3:,.1f}' if step else 'not run'} | {f'{step / base - 1:+.1%}' if step and base else ''} "
        f"| {predicted} | {differ} | {one['compile_seconds']:.1f} |"
    )
