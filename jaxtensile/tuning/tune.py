"""``jaxtensile tune``: for sizes of the batch, as it is and planned, what a step needs, takes, and how many samples a
second that makes.

All are predicted; the best two are compiled for the target, which may put them in another order. On a device that is
here they can be run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from jaxtensile.api.jit import jit
from jaxtensile.errors import BudgetError, JaxtensileError, OptionError, unknown
from jaxtensile.program.workload import Workload
from jaxtensile.settings.options import ConfigLike
from jaxtensile.tuning.largest import FIRST, Sizes, needs_of
from jaxtensile.tuning.making import Maker, WorkloadError, telling
from jaxtensile.tuning.predicted import predicted
from jaxtensile.tuning.race import raced
from jaxtensile.units import Bytes, Seconds

CHECKED: Final = 2
"""Points compiled for the target: the best, and one beside it."""
MOST: Final = 12
"""Doublings of the first batch that are looked at. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch size, and values of other parameters, as written or planned.

    ``needs``: device bytes of a step. ``seconds``: of a step. Both are predicted until they are ``checked`` by the
    target's compiler. ``parts``: into how many the plan divides the batch. ``measured``: seconds of a step that ran.
    ``why``: of a point that came to nothing.
    """

    batch: int
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    planned: bool
    needs: Bytes
    room: Bytes
    seconds: Seconds
    parts: int = 1
    checked: bool = False
    measured: Seconds | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return not self.why and self.needs <= self.room

    @property
    def rate(self) -> float:
        """Samples per second: measured, else by the step that is known best."""
        seconds = self.measured or self.seconds
        return self.batch / seconds if seconds else 0.0


@dataclass
class Tuned:
    """What is known so far. ``whole``: whether that is all that was asked for."""

    name: str
    target: str
    batch: str
    points: list[Point] = field(default_factory=list[Point])
    whole: bool = False

    @property
    def best(self) -> Point | None:
        """The most samples per second of what fits; what was checked goes before what was not."""
        fit = [p for p in self.points if p.fits]
        return max(fit, key=lambda p: (p.measured is not None, p.checked, p.rate), default=None)

    def replace(self, old: Point, new: Point) -> None:
        """``new`` for ``old``."""
        self.points[self.points.index(old)] = new


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``batches``: None looks for them. ``vary``: values of other parameters, each with each. ``options``: of
    ``jaxtensile.jit``. ``race``: run the best two here."""

    target: str | None = None
    budget: int | str | None = None
    batches: tuple[int, ...] | None = None
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: ConfigLike | None = None
    race: bool = False


def tune(maker: Maker, asked: Asked, tell: Callable[[str, float | None], None], tuned: Tuned) -> None:
    """Fill ``tuned``; whoever interrupts it keeps what is there. ``tell``: what is done, and the share that is.

    Raises ``OptionError`` for what cannot be tuned, and ``WorkloadError`` if no size is accepted.
    """
    _check(maker, asked)
    names, values = list(asked.vary), list(asked.vary.values())
    makers = [maker.at(**dict(zip(names, chosen, strict=True))) for chosen in product(*values)]
    tell(f"looking at {maker.function} ...", None)
    for k, one in enumerate(makers):
        sizes = Sizes(one, () if asked.target is None else (asked.target,), config=asked.config)
        known = len(tuned.points)
        for share, batch in _batches(sizes, asked):
            tell(f"{_told(one, batch)} ...", (k + share) / len(makers))
            tuned.points += _points(sizes, batch, asked)
        if len(tuned.points) == known:
            sizes.accepted(None)
    for step in (_checked, _raced) if asked.race else (_checked,):
        step(maker, asked, tell, tuned)
    tuned.whole = True


def _check(maker: Maker, asked: Asked) -> None:
    if not maker.batch:
        raise OptionError(f"{maker.function} has no batch to tune: give it a parameter named batch or batch_size")
    for name in asked.vary:
        others = [known for known in maker.parameters if known != maker.batch]
        if name not in others:
            near = unknown(name, others, f"its others are {', '.join(others) or 'none'}")
            raise OptionError(f"{maker.function} has no parameter {name!r} to vary: {near}")
    if asked.race and asked.target is not None:
        raise OptionError(f"{asked.target} is not here to race on: leave the target out to race on this machine")


_FEW: Final = 5
"""Doublings below twice the largest batch that are looked at. A guess."""


def _batches(sizes: Sizes, asked: Asked) -> Iterator[tuple[float, int]]:
    """The batch sizes to look at, each with the share of them before it: doubling from the first that is accepted while
    anything fits, and the largest that fits as it is."""
    if asked.batches is not None:
        for k, batch in enumerate(asked.batches):
            yield k / len(asked.batches), batch
        return
    first = next((b for b in FIRST if sizes.at(b) is not None), None)
    if first is None:
        return
    largest = sizes.largest(asked.target, budget=asked.budget)
    later = 2 * largest if largest else first
    few = [b for k in range(MOST) if (b := later >> k) >= first][:_FEW]
    round_ones = {first << k for k in range(MOST) if few and few[-1] <= (first << k) <= later}
    found = sorted({*round_ones, largest} - {0}) or [first]
    for k, batch in enumerate(found):
        yield k / len(found), batch


def _points(sizes: Sizes, batch: int, asked: Asked) -> Iterator[Point]:
    """A batch size as written, and planned where that changes anything."""
    found = sizes.at(batch)
    if found is None:
        return
    workload, by_target = found
    needs = needs_of(next(iter(by_target.values())), asked.budget)
    given = sizes.maker.given
    plain = Point(batch=batch, given=given, planned=False, needs=needs.nbytes, room=needs.room, seconds=0.0)
    if needs.room <= 0:
        yield replace(plain, why="nothing is left of the device")
        return
    with telling(workload):
        plan = predicted(_step(workload, replace(plain, planned=True), asked).asks(*workload.args))
    yield replace(plain, seconds=plan.plain_seconds)
    unlike = plan.planned != plan.plain or plan.seconds != plan.plain_seconds
    if unlike or not plain.fits:
        yield replace(plain, planned=True, needs=plan.planned, seconds=plan.seconds, parts=plan.parts)


def _step(workload: Workload, point: Point, asked: Asked) -> Any:
    """The step of a point as it would be called; as written its own checkpoints are honoured, too."""
    options = dict(asked.options) if point.planned else {"chunk": False, "undo": False}
    config = asked.config if point.planned else {}
    return jit(workload.fun, budget=point.room, target=asked.target, config=config, **options, **workload.jit_options)


def _checked(maker: Maker, asked: Asked, tell: Callable[[str, float | None], None], tuned: Tuned) -> None:
    """Compile the best for the target, until two of them fit."""
    done = 0
    while done < CHECKED:
        left = [p for p in tuned.points if p.fits and not p.checked]
        if not left:
            return
        point = max(left, key=lambda p: p.rate)
        one = maker.at(**point.given)
        tell(f"compiling {_told(one, point.batch)}{', planned' if point.planned else ''} ...", done / CHECKED)
        try:
            found = _compiled(point, one, asked)
        except WorkloadError:
            raise
        except JaxtensileError as error:
            found = replace(point, checked=True, why=str(error).partition("\n")[0])
            if isinstance(error, BudgetError) and error.needs is not None:
                found = replace(point, checked=True, needs=error.needs)
        tuned.replace(point, found)
        done += found.fits


def _compiled(point: Point, maker: Maker, asked: Asked) -> Point:
    workload = maker(point.batch)
    with telling(workload):
        report = _step(workload, point, asked).plan(*workload.args)
    if not (point.planned or report.unchanged):
        return replace(point, checked=True, needs=max(report.baseline.device, point.room + 1))
    kernels = report.kernels or (report.plain_kernels if report.unchanged else None)
    seconds = report.step if kernels is None else kernels.seconds
    return replace(point, checked=True, needs=report.compiled.device, seconds=seconds, parts=report.parts)


def _raced(maker: Maker, asked: Asked, tell: Callable[[str, float | None], None], tuned: Tuned) -> None:
    """Run the best two that were checked."""
    best = sorted((p for p in tuned.points if p.fits and p.checked), key=lambda p: -p.rate)[:CHECKED]
    for k, point in enumerate(best):
        one = maker.at(**point.given)
        tell(f"running {_told(one, point.batch)}{', planned' if point.planned else ''} ...", k / CHECKED)
        workload = one(point.batch)
        with telling(workload):
            seconds = raced(_step(workload, point, asked), workload.args)
        tuned.replace(point, replace(point, measured=seconds))


def _told(maker: Maker, batch: int) -> str:
    return ", ".join(f"{name} {value}" for name, value in {maker.batch: batch, **maker.given}.items())


__all__ = ["Asked", "Point", "Tuned", "tune"]
