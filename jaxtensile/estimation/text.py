"""An estimate for people, and for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxtensile.estimation.figures import Figures, Held
from jaxtensile.places import short_place
from jaxtensile.report.text import operations, short_type, told_settings
from jaxtensile.units import format_bytes, format_seconds

_ROWS = 8
"""Groups of values shown; the rest shares one line. So an estimate is one screen."""


def as_text(estimate: Figures) -> str:
    """One screen: the figure, its parts, and what is live at the peak."""
    e = estimate
    source = "XLA" if e.exact else "static"
    if e.refusal:
        head = f"{e.name} does not compile for {e.target}: {e.refusal}"
    else:
        over = e.budget is not None and e.device > e.budget
        verdict = "fits" if e.fits() else "DOES NOT FIT"
        if e.budget is not None and over != e.fits():
            verdict += f" its budget of {format_bytes(e.budget)}"
        between = "" if e.exact else f", between {format_bytes(e.low)} and {format_bytes(e.high)}"
        head = f"{e.name} on {e.target} needs {format_bytes(e.device)} ({source}{between}): {verdict}"
    lines = [head, _division(e)]
    lines += [f"  {format_bytes(p.nbytes):>12} {p.name}: {p.how}" for p in e.parts]
    if len(e.parts) > 1:
        lines.append(f"  {format_bytes(e.process):>12} the whole process")
    if e.held:
        lines.append("  at the peak, by the model")
        lines += [f"  {format_bytes(h.nbytes):>12} {described(h)}" for h in e.held[:_ROWS]]
        rest = e.held[_ROWS:]
        if rest:
            lines.append(f"  {format_bytes(sum(h.nbytes for h in rest)):>12} in {len(rest)} more groups")
    lines += [f"  {line}" for line in told_settings(e.settings)]
    lines += [f"  note: {note}" for note in (*e.notes, *_by_xla(e), *_way_out(e))]
    lines.append("  " + ", ".join(f"{step} {format_seconds(s)}" for step, s in e.seconds.items()))
    return "\n".join(lines)


def _way_out(e: Figures) -> Iterator[str]:
    if e.budget is not None and e.device > e.budget and not e.refusal:
        yield f'jaxtensile.jit(..., budget="{format_bytes(e.budget)}"), or jaxtensile plan, looks for a plan that fits'


def described(held: Held) -> str:
    """A group of values at the peak in one line."""
    times = f"{held.count} x " if held.count > 1 else ""
    if not (held.dtype or held.source):
        return held.primitive
    kind = short_type(held.dtype, held.shape) if held.dtype else "inside"
    return f"{times}{held.primitive} {kind}  {short_place(held.source)}"


def as_dict(estimate: Figures) -> dict[str, Any]:
    """Every figure, bytes as integers."""
    e = estimate
    return {
        "name": e.name,
        "target": e.target,
        "exact": e.exact,
        "capacity": e.capacity,
        "device": e.device,
        "argument": e.argument,
        "output": e.output,
        "temp": e.temp,
        "alias": e.alias,
        "host": e.host,
        "low": e.low,
        "high": e.high,
        "process": e.process,
        "fits": e.fits(),
        "budget": e.budget,
        "refusal": e.refusal,
        "xla": {"recomputed": e.xla.count, "seconds": e.xla.seconds, "device": e.spared},
        "shards": e.shards,
        "parts": [{"name": p.name, "bytes": p.nbytes, "how": p.how} for p in e.parts],
        "held": [
            {
                "primitive": h.primitive,
                "type": short_type(h.dtype, h.shape),
                "source": short_place(h.source),
                "count": h.count,
                "bytes": h.nbytes,
            }
            for h in e.held
        ],
        "notes": list(e.notes),
        "seconds": dict(e.seconds),
    }


def _by_xla(e: Figures) -> Iterator[str]:
    if e.xla.count:
        to = f" to get from {format_bytes(e.device)} to {format_bytes(e.spared)}" if e.spared is not None else ""
        took = f"predicted +{format_seconds(e.xla.seconds)} a step"
        yield f"XLA recomputes {operations(e.xla.count)} by itself under jax.jit{to}, {took}"


def _division(e: Figures) -> str:
    sizes = [format_bytes(n) for n in (e.argument, e.output, e.temp, e.alias)]
    return "  argument {} + output {} + temp {} - alias {}".format(*sizes)
