"""Two reports of one function beside each other: what grew, and what is treated otherwise.

They are plain data, as ``Report.to_dict`` and ``jaxtensile plan --json`` give it: of two budgets, versions or commits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtensile.places import short_place
from jaxtensile.report.text import ROWS, short_type
from jaxtensile.units import Bytes, format_bytes, format_seconds

_KINDS = {"keep": "kept", "recompute": "recomputed", "offload": "on the host"}
_NEEDED = ("name", "target", "budget", "baseline", "compiled", "flops", "recompute_flops", "step", "actions", "notes")


def is_report(data: Any) -> bool:
    """Whether this can be compared: it has what ``Report.to_dict`` gives."""
    return isinstance(data, Mapping) and all(key in data for key in _NEEDED)


def difference(
    before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str] = ("before", "after")
) -> str:
    """Bytes, FLOPs and seconds of both, then the values that are treated otherwise, most bytes first."""
    lines = [f"{name}: {_titled(data)}" for name, data in zip(names, (before, after), strict=True)]
    lines.append(f"  {'':<22}{'before':>12}{'after':>12}{'change':>12}")
    for what, of, form in _FIGURES:
        old, new = of(before), of(after)
        shown = form(abs(new - old)).removeprefix("x ")
        change = "" if old == new else f"{'+' if new > old else '-'}{shown}"
        lines.append(f"  {what:<22}{form(old):>12}{form(new):>12}{change:>12}".rstrip())
    old, new = _values(before), _values(after)
    changed = sorted(
        (key for key in {**old, **new} if old.get(key) != new.get(key)), key=lambda k: (-_moved(old, new, k), k)
    )
    if not changed:
        lines.append("  every value is treated alike")
    for key in changed[: 2 * ROWS]:
        lines.append(
            f"  {format_bytes(_moved(old, new, key)):>10}  {key}: {_treated(old, key)} -> {_treated(new, key)}"
        )
    if rest := changed[2 * ROWS :]:
        lines.append(f"  {format_bytes(sum(_moved(old, new, k) for k in rest)):>10}  {len(rest)} more")
    for name, mine, others in ((names[0], before, after), (names[1], after, before)):
        lines += [f"  only {name}: {note}" for note in mine["notes"] if note not in others["notes"]]
    return "\n".join(lines)


def _titled(data: Mapping[str, Any]) -> str:
    return f"{data['name']} on {data['target']}, budget {format_bytes(data['budget'])}"


def _factor(value: float) -> str:
    return f"x {value:.3f}"


def _flops(data: Mapping[str, Any]) -> float:
    return (data["flops"] + data["recompute_flops"]) / data["flops"] if data["flops"] else 1.0


_FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], Any], Callable[[Any], str]], ...] = (
    ("as written", lambda d: d["baseline"]["device"], format_bytes),
    ("planned", lambda d: d["compiled"]["device"], format_bytes),
    ("  argument", lambda d: d["compiled"]["argument"], format_bytes),
    ("  output", lambda d: d["compiled"]["output"], format_bytes),
    ("  temp", lambda d: d["compiled"]["temp"], format_bytes),
    ("  alias", lambda d: d["compiled"]["alias"], format_bytes),
    ("host", lambda d: d["compiled"]["host"], format_bytes),
    ("matrix FLOPs", _flops, _factor),
    ("step, predicted", lambda d: d["step"], format_seconds),
)


def _values(data: Mapping[str, Any]) -> dict[str, dict[str, Bytes]]:
    """Bytes by value (op, type, line) and by what is done with it."""
    found: dict[str, dict[str, Bytes]] = {}
    for action in data["actions"]:
        what = f"{action['primitive']} {short_type(action['dtype'], action['shape'])}  {short_place(action['source'])}"
        of = found.setdefault(what, {})
        of[action["kind"]] = of.get(action["kind"], 0) + action["nbytes"]
    return found


def _moved(old: Mapping[str, Mapping[str, Bytes]], new: Mapping[str, Mapping[str, Bytes]], key: str) -> Bytes:
    """Bytes of a value that are treated otherwise."""
    a, b = old.get(key, {}), new.get(key, {})
    return max(
        sum(max(a.get(k, 0) - b.get(k, 0), 0) for k in _KINDS), sum(max(b.get(k, 0) - a.get(k, 0), 0) for k in _KINDS)
    )


def _treated(of: Mapping[str, Mapping[str, Bytes]], key: str) -> str:
    parts = [f"{format_bytes(n)} {_KINDS.get(kind, kind)}" for kind, n in sorted(of.get(key, {}).items())]
    return ", ".join(parts) or "as written"
