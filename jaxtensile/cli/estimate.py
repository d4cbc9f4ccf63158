"""``jaxtensile estimate``: one workload on several targets, the largest batch that fits each, and what grew.

Invariant: one trace per batch size, for any number of targets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxtensile.api.jit import jit
from jaxtensile.cli.loading import Maker, WorkloadError, described
from jaxtensile.errors import JaxtensileError
from jaxtensile.estimation.estimate import Estimate, estimate_on
from jaxtensile.program.workload import Workload, name_of
from jaxtensile.runtime.config.config import Config
from jaxtensile.settings.options import config_of
from jaxtensile.units import Bytes, format_bytes
from jaxtensile.xla.target import tracing_for

Tell = Callable[[str], None]
_LARGEST = 1 << 30
"""Largest batch tried, for workloads whose bytes do not grow with it."""
_FIRST = (1, 2, 4, 8, 16, 32, 64, 128)
"""First batch sizes tried, until the workload takes one; batches in multiples of devices match one."""
_GROWN = 8
"""Most values named that grew. A guess: what is read."""


class BaselineError(JaxtensileError, ValueError):
    """A baseline file that is unreadable, or lacks what is compared."""


@dataclass(frozen=True)
class Table:
    """The estimates by target. ``batches``: the largest that fits each (0: none), if asked for."""

    estimates: Mapping[str, Estimate]
    batches: Mapping[str, int] = field(default_factory=lambda: {})

    @property
    def fits(self) -> bool:
        """Whether every target has room."""
        return all(e.fits() for e in self.estimates.values())

    def __str__(self) -> str:
        return "\n\n".join((_as_rows(self), str(next(iter(self.estimates.values())))))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: by target, in bytes."""
        return {
            "targets": {name: e.to_dict() for name, e in self.estimates.items()},
            "largest_batch": dict(self.batches),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """The versions that estimates depend on."""
    from jaxtensile import __version__

    return {"jaxtensile": __version__, "jax": version("jax"), "jaxlib": version("jaxlib")}


def tabulate(
    maker: Maker, targets: Sequence[str], *, exact: bool, largest: bool, tell: Tell, config: Config | None = None
) -> Table:
    """Estimate on every target (none: the arguments' device). ``tell`` announces slow work."""
    tell(f"estimating {maker.function} ...")
    config = config_of(config)
    workload = maker()
    first = _on(workload, targets, exact, tell, config)
    if not (largest and maker.batch):
        return Table(first)
    search = _Search(maker, targets, tell, config)
    batches = {name: search.largest(name) for name in first}
    if exact:
        for name, batch in batches.items():
            asked_of = (name,) if targets else ()
            batches[name] = _Search(maker, asked_of, tell, config, exact=True).near(name, batch)
    return Table(first, batches)


class _Search:
    """Estimates by batch size, each made once for all targets."""

    def __init__(
        self, maker: Maker, targets: Sequence[str], tell: Tell, config: Config, *, exact: bool = False
    ) -> None:
        self._maker, self._targets, self._tell, self._config, self._exact = maker, targets, tell, config, exact
        self._known: dict[int, Mapping[str, Estimate] | None] = {}

    def largest(self, target: str) -> int:
        """The largest batch that fits, a multiple of the smallest accepted one; 0 if none fits."""
        first = self._first()
        return self._between(first, self._guess(first, target), target) if self._fits(first, target) else 0

    def near(self, target: str, batch: int) -> int:
        """The largest batch that fits, searched from ``batch``."""
        first = self._first()
        return self._between(first, max(batch, first), target)

    def _first(self) -> int:
        return next(b for b in _FIRST if self._at(b) is not None or b == _FIRST[-1])

    def _between(self, unit: int, batch: int, target: str) -> int:
        """The largest multiple of ``unit`` that fits. A step tries where the line through two sizes meets the device,
        else one beside what is known, else halves."""
        low, high = 0, max(_LARGEST, 2 * unit)
        batch = max(batch // unit * unit, unit)
        beside = False
        while True:
            if self._fits(batch, target):
                low = max(low, batch)
            else:
                high = min(high, batch)
            if high - low <= unit:
                return low
            batch = self._aimed(unit, target)
            if low < batch < high:
                continue
            beside = not beside
            if beside:
                batch = low + unit if batch <= low else high - unit
            else:
                batch = low + max((high - low) // (2 * unit), 1) * unit if high < _LARGEST else 2 * low

    def _aimed(self, unit: int, target: str) -> int:
        """Where the line through the two known sizes nearest to the room meets it."""
        sizes = [b for b, found in self._known.items() if found is not None and target in found]
        room = self._room(target)
        near = sorted(sizes, key=lambda b: abs(self._needs(b, target) - room))[:2]
        if len(near) < 2:
            return 2 * near[0] if near else unit
        small, large = sorted(near)
        per_item = max((self._needs(large, target) - self._needs(small, target)) / (large - small), 1.0)
        return min(int(large + (room - self._needs(large, target)) / per_item), _LARGEST) // unit * unit

    def _guess(self, first: int, target: str) -> int:
        """Where bytes that grow with the batch reach the device's; the smallest sizes may not grow like later ones."""
        small, large = 2 * first, 4 * first
        if not (self._fits(small, target) and self._fits(large, target)):
            return first
        return max(self._aimed(first, target), first)

    def _room(self, target: str) -> Bytes:
        found = next(f for f in self._known.values() if f is not None)
        return found[target].capacity

    def _needs(self, batch: int, target: str) -> Bytes:
        found = self._at(batch)
        assert found is not None
        return found[target].process

    def _fits(self, batch: int, target: str) -> bool:
        found = self._at(batch)
        return found is not None and found[target].fits()

    def _at(self, batch: int) -> Mapping[str, Estimate] | None:
        """The estimates of a batch size; None if the workload refuses it."""
        if batch not in self._known:
            self._tell(f"{self._maker.batch} {batch} ...")
            try:
                workload = self._maker(batch)
                self._known[batch] = _on(workload, self._targets, self._exact, self._tell, self._config)
            except WorkloadError:
                if batch == _FIRST[-1] and not any(self._known.values()):
                    raise
                self._known[batch] = None
        return self._known[batch]


@contextmanager
def telling(workload: Workload) -> Iterator[None]:
    """Turn errors of the workload's own function or options into ``WorkloadError``; others pass.

    An error is the workload's own if JAX alone cannot trace it either.
    """
    try:
        yield
    except JaxtensileError:
        raise
    except Exception as error:
        try:
            with tracing_for(args=workload.args):
                jit(workload.fun, config={}, **workload.jit_options).trace(*workload.args)
        except Exception as own:
            name = workload.name or name_of(workload.fun)
            raise WorkloadError(f"{name} cannot be traced: {described(own)}") from error
        raise


def _on(workload: Workload, targets: Sequence[str], exact: bool, tell: Tell, config: Config) -> Mapping[str, Estimate]:
    fun, args, options = workload.fun, workload.args, workload.jit_options
    with telling(workload):
        found = estimate_on(
            fun, args, options, targets=targets, exact=exact, name=workload.name, config=config, tell=tell
        )
    return {e.target: e for e in found}


def _as_rows(table: Table) -> str:
    head = ["target", "device", "argument", "output", "temp", "alias", "process", "of", "fits"]
    rows = [head + ["largest batch"] * bool(table.batches)]
    for name, e in table.estimates.items():
        sizes = (e.device, e.argument, e.output, e.temp, e.alias, e.process, e.capacity)
        row = [name, *map(format_bytes, sizes), "yes" if e.fits() else "NO"]
        rows.append(row + ([str(table.batches[name])] if table.batches else []))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first, *others = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
        for row in rows
    )


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
