"""What ``jaxtensile tune`` found, as a table, as data, and as a page with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from jaxtensile.report.chart import HEIGHT, WIDTH
from jaxtensile.report.html import PAGE_STYLE, STYLE, table
from jaxtensile.tuning.tune import Point, Tuned
from jaxtensile.units import format_bytes, format_seconds

_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 30, 20, 48
"""Units around its axes, by eye."""
_HEAD: Final = ("batch", "", "needs", "of", "step", "samples/s", "by")


def as_text(tuned: Tuned) -> str:
    """The table, and the best."""
    names = list(dict.fromkeys(name for p in tuned.points for name in p.given))
    head = [_HEAD[0], *names, *_HEAD[1:]]
    rows = [head, *(_row(p, names) for p in tuned.points)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    left = {len(names) + 1, len(head) - 1}
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    lines = [f"{tuned.name} on {tuned.target}", *(line.rstrip() for line in lines), verdict(tuned)]
    return "\n".join(lines)


def verdict(tuned: Tuned) -> str:
    """The best in one line, and whether all was looked at."""
    best = tuned.best
    if best is None:
        said = "nothing fits: give smaller batches, a larger budget, or --host-budget"
        smallest = min((p for p in tuned.points if p.seconds), key=lambda p: p.needs, default=None)
        if smallest is not None:
            said += f"; the least found is {format_bytes(smallest.needs)} at {_name(tuned, smallest)}"
        return said if tuned.whole else f"nothing fits so far: interrupted after {len(tuned.points)} rows"
    what = f"best: {_name(tuned, best)}, {best.rate:.4g} samples/s, {_by(best)}"
    return what if tuned.whole else f"{what}; interrupted: there may be better ones"


def as_dict(tuned: Tuned) -> dict[str, Any]:
    """For JSON: bytes and seconds."""

    def point(p: Point) -> dict[str, Any]:
        return {
            "batch": p.batch,
            "given": dict(p.given),
            "planned": p.planned,
            "needs": p.needs,
            "room": p.room,
            "fits": p.fits,
            "seconds": p.seconds,
            "measured": p.measured,
            "samples_per_second": p.rate,
            "parts": p.parts,
            "by": "clock" if p.measured is not None else "XLA" if p.checked else "prediction",
            "why": p.why,
        }

    best = tuned.best
    return {
        "name": tuned.name,
        "target": tuned.target,
        "whole": tuned.whole,
        "best": None if best is None else point(best),
        "points": [point(p) for p in tuned.points],
    }


def as_page(tuned: Tuned) -> str:
    """A whole document: nothing is loaded, and no script runs."""
    title = escape(f"{tuned.name} on {tuned.target}")
    names = list(dict.fromkeys(name for p in tuned.points for name in p.given))
    head = "".join(f"<th>{escape(name)}</th>" for name in (_HEAD[0], *names, *_HEAD[1:]))
    best = tuned.best
    body = ""
    for p in tuned.points:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _row(p, names))
        bold = ' style="font-weight:600"' if p is best else ""
        body += f"<tr{bold}>{cells}</tr>\n"
    legend = (
        '<p class="jt-legend jt-muted"><span><i class="jt-swatch plain"></i>as it is</span>'
        '<span><i class="jt-swatch planned"></i>planned</span><span>faint: does not fit</span></p>'
    )
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{PAGE_STYLE}{STYLE}</style>\n</head>\n<body>",
            f'<div class="jt"><h1>{title}</h1><p class="jt-muted">{escape(verdict(tuned))}</p>',
            f"<h2>Samples per second by batch</h2>{legend}{_picture(tuned)}",
            f"<h2>All that was looked at</h2>{table(head, body)}",
            "</div>\n</body>\n</html>",
        )
    )


def _picture(tuned: Tuned) -> str:
    """Samples per second over the batch, which is drawn by its rank: sizes double."""
    points = [p for p in tuned.points if p.rate]
    sizes = sorted({p.batch for p in points})
    top = max((p.rate for p in points), default=1.0) * 1.08
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(batch: int) -> float:
        return _LEFT + width * (sizes.index(batch) + 0.5) / len(sizes)

    def y(rate: float) -> float:
        return _TOP + height * (1 - rate / top)

    parts = [f'<svg class="jt-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Samples per second">']
    for k in range(4 + 1):
        rate = top * k / 4
        parts.append(
            f'<line class="jt-grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y(rate):.1f}" dy=".32em" text-anchor="end">{rate:.3g}</text>')
    for size in sizes:
        parts.append(f'<text x="{x(size):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{_LEFT + width / 2:.1f}" y="{HEIGHT - 4}" text-anchor="middle">batch</text>')
    for p in points:
        kind = "planned" if p.planned else "plain"
        faint = "" if p.fits else ' style="opacity:.3"'
        radius = 7 if p is tuned.best else 5
        what = escape(f"{_name(tuned, p)}: {p.rate:.4g} samples/s, {format_bytes(p.needs)}, {_by(p)}")
        parts.append(
            f'<circle class="jt-{kind}" cx="{x(p.batch):.1f}" cy="{y(p.rate):.1f}" r="{radius}"{faint}>'
            f"<title>{what}</title></circle>"
        )
    return "\n".join((*parts, "</svg>"))


def _row(p: Point, names: Sequence[str]) -> list[str]:
    needs = format_bytes(p.needs)
    rate = f"{p.rate:.4g}" if p.rate and p.fits else "-"
    kind = f"planned, in {p.parts} parts" if p.parts > 1 else "planned" if p.planned else "as it is"
    by = p.why or ("does not fit" if not p.fits else "") or _by(p)
    took = format_seconds(p.measured or p.seconds) if p.seconds else "-"
    given = [str(p.given.get(name, "")) for name in names]
    return [str(p.batch), *given, kind, needs, format_bytes(max(p.room, 0)), took, rate, by]


def _by(p: Point) -> str:
    return "measured" if p.measured is not None else "compiled" if p.checked else "predicted"


def _name(tuned: Tuned, p: Point) -> str:
    given = "".join(f", {name} {value}" for name, value in p.given.items())
    return f"{tuned.batch} {p.batch}{given}, {'planned' if p.planned else 'as it is'}"


__all__ = ["as_dict", "as_page", "as_text", "verdict"]
