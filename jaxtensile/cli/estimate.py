"""``jaxtensile estimate``: one workload on several targets, the largest batch that fits each, and what grew.

Invariant: one trace per batch size, for any number of targets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxtensile.errors import JaxtensileError
from jaxtensile.estimation.estimate import Estimate
from jaxtensile.runtime.config.config import Config
from jaxtensile.settings.options import config_of
from jaxtensile.tuning.explained import by_function, by_text
from jaxtensile.tuning.largest import Plans, Sizes, Tell, estimates
from jaxtensile.tuning.making import Maker
from jaxtensile.tuning.saved_error import LARGEST, SavedError, read
from jaxtensile.units import Bytes, format_bytes

_GROWN = 8
"""Most values named that grew. A guess: what is read."""


class BaselineError(JaxtensileError, ValueError):
    """A baseline file that is unreadable, or lacks what is compared."""


@dataclass(frozen=True)
class Table:
    """The estimates by target. ``batches``: the largest that fits each as it is (0: none), if asked for; ``planned``:
    with a plan, as predicted."""

    estimates: Mapping[str, Estimate]
    batches: Mapping[str, int] = field(default_factory=lambda: {})
    planned: Mapping[str, int] = field(default_factory=lambda: {})
    limit: str = ""
    """Why larger batches were not looked at."""

    @property
    def fits(self) -> bool:
        """Whether every target has room."""
        return all(e.fits() for e in self.estimates.values())

    def __str__(self) -> str:
        return self.text(None)

    def text(self, columns: int | None) -> str:
        """The table, and the first estimate. ``columns``: of the terminal; a line for each target if the table is
        wider."""
        rows = _as_rows(self)
        if columns is not None and max(map(len, rows.splitlines())) > columns:
            rows = "\n".join(_in_lines(self))
        return "\n\n".join(filter(None, (rows, self.limit, str(next(iter(self.estimates.values()))))))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: by target, in bytes."""
        return {
            "targets": {name: e.to_dict() for name, e in self.estimates.items()},
            "largest_batch": dict(self.batches),
            "largest_batch_planned": dict(self.planned),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """The versions that estimates depend on."""
    from jaxtensile import __version__

    return {"jaxtensile": __version__, "jax": version("jax"), "jaxlib": version("jaxlib")}


def tabulate(
    maker: Maker,
    targets: Sequence[str],
    *,
    exact: bool,
    largest: bool,
    tell: Tell,
    planned: bool = False,
    budget: str | None = None,
    config: Config | None = None,
) -> Table:
    """Estimate on every target (none: the arguments' device). ``tell`` announces slow work.

    ``largest``: also the largest batch, by XLA's figures with ``exact``; ``planned``: with a plan too, predicted.
    """
    tell(f"estimating {maker.function} ...")
    config = config_of(config)
    asked = {"tell": tell, "budget": budget, "config": config}
    first = estimates(maker(), targets, exact=exact, **asked)
    if not (largest and maker.batch):
        return Table(first)
    sizes = Sizes(maker, targets, **asked)
    batches: dict[str, int] = {}
    with_plan: dict[str, int] = {}
    for name in first:
        target = name if targets else None
        batches[name] = static = sizes.largest(target)
        if exact:
            compiled = Sizes(maker, (name,) if targets else (), exact=True, **asked)
            batches[name] = compiled.largest(target, near=static)
        if planned:
            with_plan[name] = max(Plans(sizes, target, None, {}).largest(near=static), batches[name])
    return Table(first, batches, with_plan, sizes.limit)


def _as_rows(table: Table) -> str:
    head = ["target", "device", "argument", "output", "temp", "alias", "process", "of", "fits"]
    rows = [head + ["largest batch"] * bool(table.batches)]
    for name, e in table.estimates.items():
        sizes = (e.device, e.argument, e.output, e.temp, e.alias, e.process, e.capacity)
        row = [name, *map(format_bytes, sizes), "yes" if e.fits() else "NO"]
        rows.append(row + ([_largest(table, name)] if table.batches else []))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first, *others = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
        for row in rows
    )


def _in_lines(table: Table) -> Iterator[str]:
    for name, e in table.estimates.items():
        yield f"{name}: {'fits' if e.fits() else 'DOES NOT FIT'}"
        yield f"  needs {format_bytes(e.device)}, the process {format_bytes(e.process)} of {format_bytes(e.capacity)}"
        if table.batches:
            yield f"  largest batch {_largest(table, name)}"


def _largest(table: Table, name: str) -> str:
    batch, planned = table.batches[name], table.planned.get(name)
    return str(batch) if planned is None else f"{batch} as it is, {planned} planned"


@dataclass(frozen=True)
class Growth:
    """A target's bytes before and now, and the groups of values at the peak that grew, most first."""

    target: str
    before: Bytes
    after: Bytes
    values: tuple[tuple[str, Bytes, Bytes], ...]

    @property
    def ratio(self) -> float:
        """Growth as a share of the bytes before."""
        return (self.after - self.before) / self.before if self.before else float(self.after > 0)

    def __str__(self) -> str:
        sign = "+" if self.after >= self.before else ""
        change = f"{format_bytes(self.before)} -> {format_bytes(self.after)} ({sign}{100 * self.ratio:.2f} %)"
        lines = [f"{self.target}: {change}"]
        lines += [f"  {format_bytes(a - b):>12} {what}" for what, b, a in self.values[:_GROWN]]
        return "\n".join(lines)


@dataclass(frozen=True)
class Baseline:
    """An earlier ``--json`` file: by target the device bytes, whether they are XLA's, and what was held."""

    path: Path
    targets: Mapping[str, tuple[Bytes, bool, list[dict[str, Any]]]]
    versions: Mapping[str, str] = field(default_factory=lambda: {})

    @property
    def older(self) -> str:
        """The other versions it was made with; empty if they are these."""
        other = [
            f"{name} {was}, now {now}"
            for name, now in versions().items()
            if (was := self.versions.get(name, now)) != now
        ]
        return f"the baseline was made with {'; '.join(other)}" if other else ""


def read_baseline(baseline: Path) -> Baseline:
    """An earlier ``--json`` file; raises ``BaselineError``."""
    try:
        read = json.loads(baseline.read_text())
        known, by = read["targets"], dict(read.get("versions", {}))
        before = {name: (int(t["device"]), bool(t["exact"]), list(t["held"])) for name, t in known.items()}
    except OSError as error:
        raise BaselineError(f"cannot read {baseline}: {error.strerror}; write it with --json {baseline}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BaselineError(f"{baseline} is no estimate: write one with --json {baseline}") from None
    return Baseline(baseline, before, by)


def compare(table: Table, baseline: Baseline) -> list[Growth]:
    """The growth against an earlier file; ``BaselineError`` if they do not match."""
    path, before = baseline.path, baseline.targets
    out: list[Growth] = []
    for name, e in table.estimates.items():
        if name not in before:
            raise BaselineError(f"{path} knows nothing of {name}, but of {', '.join(before)}: name one of those")
        size, exact, held = before[name]
        if exact != e.exact:
            mode = "XLA's own figures: add --exact" if exact else "static figures: leave --exact out"
            raise BaselineError(f"{path} has {mode}")
        out.append(Growth(name, size, e.device, _grown(held, e.to_dict()["held"])))
    return out


def _grown(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[tuple[str, Bytes, Bytes], ...]:
    """Values by op and file that need more than before; lines and sizes may differ."""

    def sums(held: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[Bytes, str]]:
        found: dict[tuple[str, str], tuple[Bytes, str]] = {}
        for h in held:
            file, _, place = str(h["source"]).partition(":")
            function = place.partition("(")[2]
            key = str(h["primitive"]), f"{file} {function}"
            nbytes, what = found.get(key, (0, f"{h['primitive']} {h['type']}  {h['source']}"))
            found[key] = nbytes + int(h["bytes"]), what
        return found

    old, new = sums(before), sums(after)
    rows = [(what, old.get(key, (0, ""))[0], nbytes) for key, (nbytes, what) in new.items()]
    return tuple(sorted((r for r in rows if r[2] > r[1]), key=lambda r: r[1] - r[2]))


def explain(text: Path, maker: Maker | None, target: str | None, *, tell: Tell, config: Config | None) -> list[str]:
    """The lines about the out-of-memory error saved in ``text`` (``-``: standard input), and about a function if there
    is one. Raises ``SavedError``."""
    try:
        if text == Path("-"):
            said = sys.stdin.read(LARGEST)
        else:
            with text.open(errors="replace") as file:
                said = file.read(LARGEST)
    except OSError as error:
        why = f"cannot read {text}: {error.strerror}"
        raise SavedError(f"{why}; save there what the program wrote to standard error") from None
    saved = read(said)
    if maker is None:
        return by_text(saved)
    return by_function(saved, maker, target, tell=tell, config=config)
