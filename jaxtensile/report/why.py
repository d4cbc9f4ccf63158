"""What was decided for the values of one place of the code, and what the other choice would have cost."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Final

from jaxtensile.places import short_place
from jaxtensile.report.facts import Decision, Facts
from jaxtensile.report.text import ROWS, dropped, groups, kept, offloaded, passing, what_and_where
from jaxtensile.units import format_bytes, format_seconds

_SAID: Final = (
    (kept, "kept", "to compute them again: {}, and what they are made of has to be there"),
    (offloaded, "on the host", "to compute them again: {}"),
    (dropped, "recomputed", "costs {}; kept, they would be there at the peak of the program as written"),
)


def why(report: Facts, place: str) -> str:
    """The decisions at ``place``, with their prices by the model.

    ``place``: ``"model.py:41"``, ``"model.py"`` or a function, ``"block"``; longer paths are more exact.
    """
    if report.unchanged:
        return f"{report.name} fits {format_bytes(report.budget)} as it is written: nothing was decided"
    if not any(_is_at(d, place) for d in report.decisions):
        return _nothing(report, place)
    lines = [f"{report.name} on {report.target}, budget {format_bytes(report.budget)}, at {place}, by the model:"]
    for decided, verb, reason in _SAID:
        alike = [d for d in decided(report) if _is_at(d, place)]
        for group in (of := groups(alike))[:ROWS]:
            same = [d for d in alike if what_and_where(d) == (group.what, group.where)]
            lines.append(f"  {verb:<11}{format_bytes(group.nbytes):>10}  {group.count} x {group.what}  {group.where}")
            lines.append(f"  {'':<23}{reason.format(_price(report, same))}")
        if rest := of[ROWS:]:
            count, size = sum(g.count for g in rest), format_bytes(sum(g.nbytes for g in rest))
            lines.append(f"  {verb:<11}{size:>10}  {count} more, of {len(rest)} kinds")
    if between := [d for d in passing(report) if _is_at(d, place)]:
        lines.append(f"  and {len(between)} on the way to those that are recomputed: {_price(report, between)}")
    return "\n".join(lines)


def _is_at(decision: Decision, place: str) -> bool:
    where = short_place(decision.source)
    path = rf"(?:^|/){re.escape(place)}(?:$|[: ])"
    function = rf"\((?:.*\.)?{re.escape(place)}(?:\.<locals>.*)?\)$"
    return any(re.search(*pair) for pair in ((path, where), (path, decision.source), (function, where)))


def _price(report: Facts, same: list[Decision]) -> str:
    priced = [d.again for d in same if d.again is not None]
    if not priced:
        return "a part of their loop's price"
    share = f", {100 * sum(priced) / report.step:.1f} % of the step" if report.step else ""
    return f"{format_seconds(sum(priced))}{share}"


def _nothing(report: Facts, place: str) -> str:
    known = list(dict.fromkeys(short_place(d.source) for d in report.decisions if d.source))
    near = get_close_matches(place, known, n=ROWS, cutoff=0.3) or known[:ROWS]
    at = f"; there are some at {', '.join(near)}" if near else ""
    return f"{report.name}: no decision at {place}: its values do not live to the backward pass, or have no bytes{at}"
