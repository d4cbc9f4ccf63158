"""A report as an HTML page, or as a notebook's fragment of it.

Invariant: nothing is loaded, no script runs, and all text from the user's program is escaped. Colours suit light and
dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from jaxtensile.ir.plan import MemoryUse
from jaxtensile.report.chart import Line, memory_chart
from jaxtensile.report.facts import Facts
from jaxtensile.report.text import (
    Group,
    accounts,
    by_xla,
    dropped,
    groups,
    kept,
    offloaded,
    passing,
    price,
    slower,
    told_settings,
    verdict,
)
from jaxtensile.units import format_bytes, format_seconds

_NOTEBOOK_COLUMNS = 160
"""Columns of the chart in a notebook (480 on the page): each has its own text, which notebooks store. A guess."""
_NOTEBOOK_ROWS = 8
"""Groups of kept and of dropped values shown in a notebook: what fits below a cell. A guess."""
_SMALL = 0.01
"""Groups below this share of the largest are folded away: their bars would be two pixels of 220."""

STYLE = """
.jt{--jt-soft:rgba(128,136,150,.16);--jt-line:rgba(128,136,150,.32);--jt-plain:#8a93a3;--jt-planned:#3d82f0;
--jt-budget:#e0503a;font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:inherit;max-width:1060px}
.jt h1{font-size:20px;line-height:1.3;margin:0 0 4px}.jt h2{font-size:15px;margin:30px 0 8px}
.jt p{margin:4px 0}.jt .jt-muted{opacity:.68}
.jt .jt-tiles{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0 4px}
.jt .jt-tile{border:1px solid var(--jt-line);border-radius:8px;padding:8px 14px;min-width:112px}
.jt .jt-tile b{display:block;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.jt .jt-tile span{font-size:12px;opacity:.68}
.jt table{border-collapse:collapse;font-variant-numeric:tabular-nums;background:none;color:inherit;margin:0}
.jt th,.jt td{padding:3px 18px 3px 0;text-align:left;border:0;border-bottom:1px solid var(--jt-line);white-space:nowrap;
background:none;color:inherit;font-size:13px}
.jt th{font-weight:500;opacity:.68;font-size:12px}.jt td.n,.jt th.n{text-align:right}
.jt code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:none;color:inherit;padding:0}
.jt .jt-wide{overflow-x:auto}.jt .jt-bar{display:inline-block;height:9px;border-radius:2px;min-width:1px}
.jt .jt-swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.jt .jt-legend span{margin-right:18px;font-size:13px}
.jt details{margin:10px 0}.jt summary{cursor:pointer}
.jt .plain{background:var(--jt-plain)}.jt .planned{background:var(--jt-planned)}
.jt .jt-chart{width:100%;height:auto;display:block;margin-top:8px;overflow:visible}
.jt-chart text{font-size:12px;fill:currentColor;fill-opacity:.72;font-variant-numeric:tabular-nums}
.jt-chart .jt-grid{stroke:var(--jt-line);stroke-width:1}
.jt-chart .jt-plain{fill:var(--jt-plain);fill-opacity:.28;stroke:var(--jt-plain);stroke-width:1}
.jt-chart .jt-planned{fill:var(--jt-planned);fill-opacity:.42;stroke:var(--jt-planned);stroke-width:1}
.jt-chart .jt-lane{fill:var(--jt-soft)}.jt-chart .jt-again{fill:var(--jt-planned)}
.jt-chart .jt-line{fill:none;stroke-width:1.2}.jt-chart .jt-lead{fill:none;stroke-width:1;opacity:.6}
.jt-chart .jt-budget-line{stroke:var(--jt-budget);stroke-dasharray:6 4}
.jt-chart .jt-plain-line{stroke:var(--jt-plain);stroke-dasharray:2 3}
.jt-chart .jt-planned-line{stroke:var(--jt-planned);stroke-dasharray:2 3}
.jt-chart .jt-lead{stroke-dasharray:none}
.jt-chart .jt-budget-text{fill:var(--jt-budget);fill-opacity:1;font-weight:600}
.jt-chart .jt-planned-text{fill:var(--jt-planned);fill-opacity:1}
.jt-chart .jt-column{fill:currentColor;fill-opacity:0}.jt-chart .jt-column:hover{fill-opacity:.16}
"""
PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0;padding:28px 32px 48px;background:#fff;color:#1c2026}
@media (prefers-color-scheme:dark){body{background:#14171c;color:#e3e6eb}}
"""


def as_page(report: Facts) -> str:
    """A whole document."""
    title = escape(verdict(report))
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{PAGE_STYLE}{STYLE}</style>\n</head>\n<body>",
        '<div class="jt">',
        *_top(report),
        *_chart(report, columns=480),
        *_memory(report),
        *_decisions(report),
        *_time(report),
        *_notes(report),
        "</div>\n</body>\n</html>",
    ]
    return "\n".join(parts)


def as_fragment(report: Facts) -> str:
    """The fragment below a notebook cell."""
    parts = [
        f'<div class="jt"><style>{STYLE}</style>',
        *_top(report),
        *_chart(report, columns=_NOTEBOOK_COLUMNS),
        *_decisions(report, most=_NOTEBOOK_ROWS),
        *_notes(report),
        "</div>",
    ]
    return "\n".join(parts)


def _top(r: Facts) -> list[str]:
    tiles = [
        (format_bytes(r.baseline.device), f"plain, {_by(r.baseline)}"),
        (format_bytes(r.compiled.device), "planned, by XLA"),
        (format_bytes(r.budget), "budget"),
        (slower(r), "step time, predicted"),
        (f"{1 + r.recompute_flops / r.flops if r.flops else 1:.3f} ×", "matrix FLOPs"),
        (str(r.stages), "stage" if r.stages == 1 else "stages"),
    ]
    if r.unchanged and r.xla.count:
        tiles = [tiles[0], (format_bytes(r.compiled.device), "as XLA recomputes it"), *tiles[2:5]]
    elif r.unchanged:
        tiles = [(format_bytes(r.compiled.device), "as it is, by XLA"), tiles[2]]
    cells = "".join(f'<div class="jt-tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    again = f"{by_xla(r)}. " if r.xla.count else ""
    least = f"{again}No plan by recomputation can need less than {format_bytes(r.lower_bound)}."
    return [
        f"<h1>{escape(verdict(r))}</h1>",
        f'<p class="jt-muted">{least}</p>',
        f'<div class="jt-tiles">{cells}</div>',
    ]


def _by(use: MemoryUse) -> str:
    return "by XLA" if use.exact else "predicted"


def _chart(r: Facts, *, columns: int) -> list[str]:
    if r.timeline is None or not r.timeline.plain.device:
        return []
    lines = [Line(label="budget", nbytes=r.budget, kind="budget")]
    if r.baseline.exact and r.baseline != r.compiled:
        lines.append(Line(label="XLA, plain", nbytes=r.baseline.device, kind="plain"))
    lines.append(Line(label="XLA", nbytes=r.compiled.device, kind="plain" if r.unchanged else "planned"))
    legend = '<span><i class="jt-swatch plain"></i>plain</span>'
    if r.timeline.planned is not None:
        again = "; below the axis, where its ops run again" if r.timeline.planned.stages() else ""
        legend += f'<span><i class="jt-swatch planned"></i>planned{again}</span>'
    return [
        "<h2>Device bytes while each op runs, predicted</h2>",
        f'<p class="jt-legend jt-muted">{legend}</p>',
        f'<div class="jt-wide">{memory_chart(r.timeline, lines, columns=columns)}</div>',
    ]


def _memory(r: Facts) -> list[str]:
    rows = accounts(r)
    most = max(use.device for _, use, _ in rows) or 1
    body = ""
    for name, use, by in rows:
        sizes = (use.device, use.argument, use.output, use.temp, use.alias, use.host)
        cells = "".join(f'<td class="n">{format_bytes(n)}</td>' for n in sizes)
        body += f"<tr><td>{name}</td><td>{by}</td>{cells}<td>{_bar(use.device / most, name)}</td></tr>\n"
    names = ("device", "= argument", "+ output", "+ temp", "− alias", "host")
    head = "".join(f'<th class="n">{name}</th>' for name in names)
    return ["<h2>Memory</h2>", table(f"<th></th><th></th>{head}<th></th>", body)]


def _decisions(r: Facts, most: int | None = None) -> list[str]:
    if r.unchanged:
        return []
    out = ["<h2>Decisions</h2>", f"<p>{escape(price(r))}</p>"]
    for word, decisions, colour in (
        ("Kept for the backward pass", kept(r), "planned"),
        ("In host memory until the backward pass", offloaded(r), "planned"),
        ("Dropped, and computed again when the backward pass needs them", dropped(r), "plain"),
    ):
        found = groups(decisions)
        if not found:
            continue
        total = format_bytes(sum(g.nbytes for g in found))
        out.append(f'<p style="margin-top:14px"><b>{word}</b>: {total} in {len(decisions)} values</p>')
        large = [g for g in found if g.nbytes > _SMALL * found[0].nbytes][:most]
        out.append(_groups(large, colour))
        if rest := found[len(large) :]:
            size = format_bytes(sum(g.nbytes for g in rest))
            more = f"and {size} in {sum(g.count for g in rest)} more values of {len(rest)} kinds"
            inside = f"<details><summary>{more}</summary>{_groups(rest, None)}</details>"
            out.append(inside if most is None else f'<p class="jt-muted">{more}</p>')
    on_the_way = passing(r)
    if on_the_way and most is None:
        out.append(
            f"<details><summary>On the way: {len(on_the_way)} values that are computed again where they are read, and "
            f"are not there where the plain program needs most</summary>{_groups(groups(on_the_way), None)}</details>"
        )
    return out


def _groups(found: Sequence[Group], colour: str | None) -> str:
    most = max((g.nbytes for g in found), default=0) or 1
    body = ""
    for g in found:
        bar = f"<td>{_bar(g.nbytes / most, colour)}</td>" if colour else ""
        body += (
            f'<tr><td class="n">{format_bytes(g.nbytes)}</td>{bar}<td class="n">{g.count} ×</td>'
            f"<td><code>{escape(g.what)}</code></td><td><code>{escape(g.where)}</code></td></tr>\n"
        )
    space = "<th></th>" if colour else ""
    return table(f'<th class="n">bytes</th>{space}<th class="n">values</th><th>of</th><th>where</th>', body)


def _time(r: Facts) -> list[str]:
    most = max(r.seconds.values(), default=0.0) or 1.0
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{format_seconds(s)}</td><td>{_bar(s / most, "plain")}</td></tr>\n'
        for name, s in r.seconds.items()
    )
    rounds = f"{r.rounds} {'round' if r.rounds == 1 else 'rounds'} of planning and compiling"
    note = f'<p class="jt-muted">{rounds}; solver {escape(r.solver)}</p>' if r.rounds else ""
    return ["<h2>Time it took to plan</h2>", table('<th>step</th><th class="n">wall</th><th></th>', body), note]


def _notes(r: Facts) -> list[str]:
    said = [*told_settings(r.settings), *(f"Note: {note}" for note in r.notes)]
    if r.unknown_primitives:
        said.append(f"Without a cost rule of their own: {', '.join(r.unknown_primitives)}")
    return [f"<p>{escape(text)}</p>" for text in said]


def _bar(share: float, colour: str | None) -> str:
    return f'<i class="jt-bar {colour}" style="width:{220 * share:.0f}px"></i>'


def table(head: str, body: str) -> str:
    return f'<div class="jt-wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
