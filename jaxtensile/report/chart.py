"""Device bytes over the steps of a schedule, as an inline SVG for light and dark pages.

Both programs share the axis: the same place is the same work. While the planned one repeats ops, the plain one stands
still (see ``Timeline.aligned``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from jaxtensile.ir.timeline import Stage, Timeline, Track
from jaxtensile.report.text import short_place
from jaxtensile.units import GIB, KIB, MIB, TIB, Bytes, format_bytes

WIDTH, HEIGHT = 960, 368
"""Units of the SVG, which browsers scale to the page: its size, by eye."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 150, 14, 70
"""Units of the SVG between its edges and the axes, for the labels: by eye."""
_LANE = 10
"""Height of the strip of repeated ops, in units of the SVG: by eye."""
_LABEL = 15
"""Least distance between two labels at the right, in units of the SVG: a line of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named horizontal line: the budget, or a figure of XLA's. ``kind`` is its CSS class."""

    label: str
    nbytes: Bytes
    kind: str


def memory_chart(timeline: Timeline, lines: Sequence[Line], *, columns: int = 480) -> str:
    """The chart; on hover every column tells what runs there."""
    track = timeline.planned or timeline.plain
    steps = len(track.device)
    if not steps:
        return ""
    plain, planned = timeline.aligned(), list(track.device)
    edges = _edges(steps, columns)
    top = max(max(plain), max(planned), *(line.nbytes for line in lines)) * 1.06
    scale = _Scale(steps, top)
    parts = [
        f'<svg class="jt-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Live device bytes over the steps of the schedule">'
    ]
    parts += _grid(scale)
    parts.append(_area("plain", plain, edges, scale))
    if timeline.planned is not None:
        parts.append(_area("planned", planned, edges, scale))
        parts += _lane(track.stages(), scale)
    parts += _lines(lines, scale)
    parts += _columns(track, plain, planned, edges, scale, both=timeline.planned is not None)
    parts.append("</svg>")
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Scale:
    steps: int
    top: float

    def x(self, step: float) -> str:
        return _short(_LEFT + (WIDTH - _LEFT - _RIGHT) * step / self.steps)

    def y(self, nbytes: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * nbytes / self.top


def _short(pixels: float) -> str:
    return f"{pixels:.1f}".removesuffix(".0")


def _edges(steps: int, columns: int) -> list[int]:
    count = min(steps, columns)
    return [i * steps // count for i in range(count + 1)]


def _area(kind: str, device: Sequence[Bytes], edges: Sequence[int], scale: _Scale) -> str:
    path = [f"M{scale.x(0)} {_short(scale.y(0))}"]
    last = ""
    for a, b in pairwise(edges):
        height = _short(scale.y(max(device[a:b])))
        if height != last:
            path.append(f"H{scale.x(a)}V{height}")
        last = height
    path.append(f"H{scale.x(scale.steps)}V{_short(scale.y(0))}Z")
    return f'<path class="jt-{kind}" d="{"".join(path)}"/>'


def _grid(scale: _Scale) -> list[str]:
    parts: list[str] = []
    unit, name = next(
        (u, n) for u, n in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")) if _fits(scale, u)
    )
    for tick in _ticks(scale.top / unit):
        y = _short(scale.y(tick * unit))
        parts.append(f'<line class="jt-grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy=".32em" text-anchor="end">{tick:g} {name}</text>')
    bottom = HEIGHT - _BOTTOM
    for tick in (t for t in _ticks(scale.steps) if t == int(t)):
        x = scale.x(tick)
        parts.append(f'<text x="{x}" y="{bottom + 39}" text-anchor="middle">{tick:g}</text>')
    middle = _short((_LEFT + WIDTH - _RIGHT) / 2)
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step of the schedule</text>')
    return parts


def _fits(scale: _Scale, unit: int) -> bool:
    return scale.top >= 2 * unit or unit == 1


def _ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0 to ``most``."""
    step = 10 ** floor(log10(most)) if most > 0 else 1.0
    while most / step < 4:
        step /= 2
    step = max(step, 1e-9)
    return [i * step for i in range(ceil(most / step)) if i * step <= most]


def _lane(stages: Sequence[Stage], scale: _Scale) -> list[str]:
    if not stages:
        return []
    y = HEIGHT - _BOTTOM + 12
    middle = _LANE / 2
    parts = [f'<text x="{_LEFT - 8}" y="{_short(y + middle)}" dy=".32em" text-anchor="end">again</text>']
    parts.append(f'<rect class="jt-lane" x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT - _RIGHT}" height="{_LANE}"/>')
    for number, stage in enumerate(stages, 1):
        x, end = float(scale.x(stage.start)), float(scale.x(stage.stop))
        what = f"stage {number}: {stage.repeated} ops run again, steps {stage.start} to {stage.stop - 1}"
        parts.append(
            f'<rect class="jt-again" x="{_short(x)}" y="{y}" width="{_short(max(end - x, 1))}" height="{_LANE}">'
            f"<title>{what}</title></rect>"
        )
    return parts


def _lines(lines: Sequence[Line], scale: _Scale) -> list[str]:
    parts: list[str] = []
    end = WIDTH - _RIGHT
    bottom = HEIGHT - _BOTTOM
    wanted = sorted(lines, key=lambda line: -line.nbytes)
    places: list[float] = []
    for line in wanted:
        y = scale.y(line.nbytes)
        places.append(max(y, places[-1] + _LABEL) if places else max(y, _TOP))
    if places and places[-1] > bottom:
        for i in range(len(places)):
            places[i] = min(places[i], bottom - _LABEL * (len(places) - 1 - i))
    for line, place in zip(wanted, places, strict=True):
        y = _short(scale.y(line.nbytes))
        parts.append(f'<path class="jt-line jt-{line.kind}-line" d="M{_LEFT} {y}H{end}"/>')
        parts.append(f'<path class="jt-lead jt-{line.kind}-line" d="M{end} {y}L{end + 8} {_short(place)}"/>')
        parts.append(
            f'<text class="jt-{line.kind}-text" x="{end + 12}" y="{_short(place)}" dy=".32em">'
            f"{escape(line.label)} {format_bytes(line.nbytes)}</text>"
        )
    return parts


def _columns(
    track: Track, plain: Sequence[Bytes], planned: Sequence[Bytes], edges: Sequence[int], scale: _Scale, *, both: bool
) -> list[str]:
    """Invisible columns that tell what runs there."""
    parts: list[str] = []
    height = HEIGHT - _BOTTOM - _TOP
    for a, b in pairwise(edges):
        worst = max(range(a, b), key=planned.__getitem__)
        o = track.origin[worst]
        what = "barrier" if o < 0 else f"{track.sites.primitives[o]} at {short_place(track.sites.sources[o])}"
        told = f"step {worst}: {what}\nplain {format_bytes(max(plain[a:b]))}"
        if both:
            told += f"\nplanned {format_bytes(planned[worst])}"
        x, end = float(scale.x(a)), float(scale.x(b))
        parts.append(
            f'<rect class="jt-column" x="{_short(x)}" y="{_TOP}" width="{_short(end - x)}" height="{height}">'
            f"<title>{escape(told)}</title></rect>"
        )
    return parts
