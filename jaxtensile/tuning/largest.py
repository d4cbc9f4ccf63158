"""``jaxtensile.largest_batch``: the largest batch whose step fits a device, as it is or with a plan.

Bytes mostly grow with the batch, and then the answer is exact: it fits, and one more does not. They need not: a step
that works in divisors of its batch needs more for 127 rows than for 128. So behind the first size that does not fit the
next ones and the next rounder ones are asked too; where one of them fits, the search goes on among sizes as round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from jaxtensile.api.feedback import without_arrays
from jaxtensile.api.jit import jit
from jaxtensile.devices.hardware import host_memory
from jaxtensile.errors import BudgetError, OptionError
from jaxtensile.estimation.estimate import Estimate, estimate_on
from jaxtensile.program.workload import Workload
from jaxtensile.settings.options import ConfigLike, budget_bytes, config_of
from jaxtensile.tuning.making import Maker, WorkloadError, maker_of, telling
from jaxtensile.tuning.predicted import predicted
from jaxtensile.units import MIB, Bytes, format_bytes

Tell = Callable[[str], None]
LARGEST: Final = 1 << 30
"""Largest batch tried."""
FIRST: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""First batch sizes tried, until one is taken; batches in multiples of devices match one."""
_ROUNDER: Final = (8, 64, 512)
"""Multiples asked behind the largest batch that fits: tiles and divisors."""
FEW: Final = 64 * MIB
"""Bytes of arrays that a workload may make for any size; for more, shapes continue those of smaller sizes. A guess: a
fraction of a second."""
ARRAYS: Final = 0.25
"""Share of this machine's memory that a workload's own arrays may take. A guess: they are made from others."""
FURTHER: Final = 32
"""Times the largest batch known to fit up to which the next is tried. A guess: a few rows say little of a million."""
PREDICTED: Final = 64
"""Parts of a batch to which a predicted largest is known. A guess: no prediction is better."""
_NEXT: Final = 3
"""Sizes asked behind the largest that fits. A guess."""
_NEAR: Final = 1.25
"""Times the largest batch up to which rounder ones are asked. A guess."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Device bytes of one batch size, and the bytes there are for it. ``grows``: they are comparable with those of
    other sizes, and not what a plan makes of the room."""

    nbytes: Bytes
    room: Bytes
    grows: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.nbytes <= self.room


def largest_batch(
    make: Callable[..., object],
    /,
    *,
    target: str | None = None,
    budget: int | str | None = None,
    planned: bool = True,
    exact: bool = False,
    config: ConfigLike | None = None,
    **options: Any,
) -> int:
    """The largest batch that fits; 0 if none does. Nothing runs.

    ``make``: a function of ``batch`` (or ``batch_size``) that returns a ``jaxtensile.Workload``. Sizes for which it
    raises are passed over. ``target``: a name of ``jaxtensile.targets()``; None: the arguments' device. ``budget``:
    device bytes of a call; by default what the process leaves of the device, or the config's. ``planned``: with
    ``jaxtensile.jit``'s plan for them; False: as written. ``exact``: by the target's own compiler; False: as predicted.
    A predicted plan does not work in parts of the batch unless ``chunk=True``, and above 64 rows the largest batch is
    known to 2 %. ``options``: those of ``jaxtensile.jit``.

    Raises ``WorkloadError`` if ``make`` takes no batch size at all, and what ``jaxtensile.jit`` raises.
    """
    maker = make if isinstance(make, Maker) else maker_of(make)
    if not maker.batch:
        raise OptionError(f"{maker.function} has no batch to look for: give it a parameter named batch or batch_size")
    if not planned and options:
        raise OptionError(
            f"{next(iter(options))}= is for plans, and planned=False asks for none: leave one of them out"
        )
    sizes = Sizes(maker, () if target is None else (target,), config=config)
    plain = sizes.largest(target, budget=budget)
    if exact:
        compiled = Sizes(maker, sizes.targets, config=config, exact=True)
        plain = compiled.largest(target, budget=budget, near=plain)
        sizes = compiled
    return Plans(sizes, target, budget, options).largest(near=plain) if planned else plain


class Search:
    """The largest size that fits. ``at``: what a size needs; None if the workload refuses it. ``grain``: sizes above it
    times the smallest are known to one part in it; None: to the last one."""

    def __init__(self, at: Callable[[int], Needs | None], *, grain: int | None = None) -> None:
        self._ask, self._grain = at, grain
        self._known: dict[int, Needs | None] = {}

    def largest(self, near: int = 0) -> int | None:
        """The largest size that fits, a multiple of the smallest that is accepted, searched from ``near``; 0 if none
        fits, None if none is accepted."""
        first = next((b for b in FIRST if self._at(b) is not None), None)
        if first is None:
            return None
        if not near and not self._fits(first):
            return self._verified(first, 0)
        return self._verified(first, self._between(first, near or self._guess(first)))

    def _verified(self, unit: int, best: int) -> int:
        """``best``, or what fits behind it although the next one does not."""
        while True:
            more = next((b for b in self._behind(unit, best) if self._fits(b)), None)
            if more is None:
                return best
            step = max(unit * k for k in (1, *_ROUNDER) if more % (unit * k) == 0)
            best = max(self._between(step, more), more)

    def _behind(self, unit: int, best: int) -> Iterator[int]:
        if best >= LARGEST or self._step(unit, best) > unit:
            return
        yield from (best + k * unit for k in range(1, _NEXT + 1 if self._grain is None else 2))
        for k in _ROUNDER if self._grain is None else _ROUNDER[:1]:
            rounder = (best // (k * unit) + 1) * k * unit
            if rounder <= max(_NEAR * best, _ROUNDER[0] * unit):
                yield rounder

    def _between(self, unit: int, batch: int) -> int:
        """The largest multiple of ``unit`` that fits. A step tries where the line through two sizes meets the device,
        else one beside what is known, else halves."""
        low, high = 0, max(LARGEST, 2 * unit)
        batch = max(batch // unit * unit, unit)
        beside = False
        while True:
            if self._fits(batch):
                low = max(low, batch)
            else:
                high = min(high, batch)
            if high - low <= self._step(unit, low):
                return low
            aimed = self._aimed(unit)
            if high >= LARGEST and aimed is not None and aimed > low == batch:
                aimed = max(aimed, min(2 * low, high - unit))  # it grows by less than the line through two says
            if aimed is not None and low < aimed < high:
                batch = aimed
                continue
            beside = aimed is not None and not beside
            if beside:
                step = self._step(unit, low)
                batch = low + step if aimed is not None and aimed <= low else high - step
            else:
                halfway = low + max((high - low) // (2 * unit), 1) * unit
                batch = halfway if high < LARGEST else min(max(2 * low, unit), LARGEST)

    def _step(self, unit: int, size: int) -> int:
        """What sizes about this one are told apart by."""
        return unit if self._grain is None else max(size // self._grain // unit, 1) * unit

    def _aimed(self, unit: int) -> int | None:
        """Where the line through the two known sizes nearest to the room meets it; None if two are not known."""
        known = {b: needs for b, needs in self._known.items() if needs is not None and needs.grows}
        near = sorted(known, key=lambda b: abs(known[b].nbytes - known[b].room))[:2]
        if len(near) < 2:
            return None
        small, large = sorted(near)
        per_item = max((known[large].nbytes - known[small].nbytes) / (large - small), 1.0)
        aimed = large + (known[large].room - known[large].nbytes) / per_item
        fits = [b for b, needs in known.items() if needs.fits]
        return min(int(aimed), LARGEST, FURTHER * max(fits, default=small)) // unit * unit

    def _guess(self, first: int) -> int:
        """Where bytes that grow with the batch reach the device's; the smallest sizes may not grow like later ones."""
        if not (self._fits(2 * first) and self._fits(4 * first)):
            return first
        return max(self._aimed(first) or first, first)

    def _fits(self, batch: int) -> bool:
        found = self._at(batch)
        return found is not None and found.fits

    def _at(self, batch: int) -> Needs | None:
        if batch not in self._known:
            self._known[batch] = self._ask(batch)
        return self._known[batch]


class Sizes:
    """Estimates of a workload by batch size, each made once for all targets."""

    def __init__(
        self,
        maker: Maker,
        targets: Sequence[str],
        *,
        tell: Tell = lambda _: None,
        budget: int | str | None = None,
        config: ConfigLike | None = None,
        exact: bool = False,
    ) -> None:
        self.maker, self.targets, self.tell, self.exact, self.budget = maker, tuple(targets), tell, exact, budget
        self.config = config_of(config)
        self._known: dict[int, tuple[Workload, Mapping[str, Estimate]] | None] = {}
        self._refusal: WorkloadError | None = None
        self._with_arrays: dict[int, tuple[Bytes, Workload]] = {}
        """By batch size: bytes of arrays that the workload made, and the workload without them."""
        self.limit = ""
        """Why larger batches were not looked at; empty: no machine's memory was in the way."""

    def largest(self, target: str | None, *, budget: int | str | None = None, near: int = 0) -> int:
        """The largest batch that fits a target as written. Raises ``WorkloadError`` if none is accepted."""

        def needs(batch: int) -> Needs | None:
            found = self.at(batch)
            return None if found is None else needs_of(_on(found[1], target), budget)

        return self.accepted(Search(needs).largest(near or self.maker.own_batch or 0))

    def accepted(self, found: int | None) -> int:
        """``found``, or the workload's own error if it is None."""
        if found is None:
            assert self._refusal is not None
            raise self._refusal
        return found

    def at(self, batch: int) -> tuple[Workload, Mapping[str, Estimate]] | None:
        """The workload and its estimates by target; None if it refuses the size."""
        if batch not in self._known:
            self.tell(f"{self.maker.batch} {batch} ...")
            try:
                workload = self._made(batch)
                asked = {"exact": self.exact, "tell": self.tell, "config": self.config}
                found = estimates(workload, self.targets, budget=self.budget, **asked)
                self._known[batch] = workload, found
            except WorkloadError as error:
                self._known[batch], self._refusal = None, error
        return self._known[batch]

    def _made(self, batch: int) -> Workload:
        """The workload for a size, with shapes for arrays. Raises ``WorkloadError``, also for one whose arrays, made
        for real, would take most of this machine."""
        needed = self._arrays_of(batch)
        if needed > FEW and (like := self._like(batch)) is not None:
            return like
        if needed > (room := int(ARRAYS * host_memory())):
            self.limit = (
                f"{self.maker.function} makes arrays, about {format_bytes(needed)} of them for "
                f"{self.maker.batch}={batch}, and this machine has room for {format_bytes(room)}: larger batches were "
                "not looked at. Let it return jax.ShapeDtypeStruct(shape, dtype) in their place"
            )
            raise WorkloadError(self.limit)
        workload = self.maker(batch)
        arrays = [x for x in jax.tree.leaves(workload.args) if isinstance(x, jax.Array | np.ndarray)]
        workload = replace(workload, args=jax.tree.map(_abstract, tuple(workload.args)))
        if arrays:
            self._with_arrays[batch] = sum(x.nbytes for x in arrays), workload
        return workload

    def _arrays_of(self, batch: int) -> Bytes:
        """Bytes of the arrays that the workload would make, by those that it made; 0 if it makes none."""
        known = sorted(self._with_arrays)[-2:]
        if not known or batch <= known[-1]:
            return 0
        small, large = known[0], known[-1]
        nbytes = self._with_arrays[large][0]
        per_item = (nbytes - self._with_arrays[small][0]) / (large - small) if small < large else nbytes / large
        return int(nbytes + per_item * (batch - large))

    def _like(self, batch: int) -> Workload | None:
        """The workload with the shapes of the last two that made arrays, continued; None if those are not two of one
        function."""
        sizes = sorted(self._with_arrays)[-2:]
        if len(sizes) < 2:
            return None
        small, large = (self._with_arrays[k][1] for k in sizes)
        same = small.fun is large.fun and small.jit_options == large.jit_options
        if not same or jax.tree.structure(small.args) != jax.tree.structure(large.args):
            return None
        share = (batch - sizes[0]) / (sizes[1] - sizes[0])
        try:
            args = jax.tree.map(lambda a, b: _continued(a, b, share), small.args, large.args)
        except _Unlike:
            return None
        return replace(large, args=args)


class _Unlike(Exception):
    """Arguments that do not continue each other."""


def _continued(small: Any, large: Any, share: float) -> Any:
    """An argument whose sizes go on from those of two workloads. Raises ``_Unlike``."""
    if not isinstance(large, jax.ShapeDtypeStruct):
        if type(small) is type(large) and small == large:
            return large
        raise _Unlike
    if type(small) is not type(large) or small.dtype != large.dtype or len(small.shape) != len(large.shape):
        raise _Unlike
    sizes = tuple(a + share * (b - a) for a, b in zip(small.shape, large.shape, strict=True))
    if any(size != int(size) for size in sizes):
        raise _Unlike
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), large.dtype, sharding=large.sharding, weak_type=large.weak_type)


class Plans:
    """The same with plans, for one target. ``options``: of ``jaxtensile.jit``."""

    def __init__(self, sizes: Sizes, target: str | None, budget: int | str | None, options: Mapping[str, Any]) -> None:
        self._sizes, self._target, self._budget, self._options = sizes, target, budget, options

    def largest(self, near: int = 0) -> int:
        """The largest batch that fits with a plan, searched from ``near``, which fits without."""
        grain = None if self._sizes.exact else PREDICTED
        return self._sizes.accepted(Search(self._needs, grain=grain).largest(near))

    def _needs(self, batch: int) -> Needs | None:
        found = self._sizes.at(batch)
        if found is None:
            return None
        workload, plain = found[0], needs_of(_on(found[1], self._target), self._budget)
        if plain.fits or plain.room <= 0:
            return replace(plain, grows=False)
        self._sizes.tell(f"{self._sizes.maker.batch} {batch}, planned ...")
        options = {"budget": plain.room, "target": self._target, "config": self._sizes.config, **self._options}
        with telling(workload):
            step = jit(workload.fun, **options, **workload.jit_options)
            if not self._sizes.exact:
                parts = self._options.get("chunk") is True
                least = predicted(step.asks(*workload.args), parts=parts).planned
                return Needs(least, plain.room, grows=least > plain.room)
            try:
                return Needs(step.plan(*workload.args).compiled.device, plain.room, grows=False)
            except BudgetError as error:
                if error.needs is None:
                    raise
                return Needs(max(error.needs, plain.room + 1), plain.room)


def _abstract(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return jax.ShapeDtypeStruct(x.shape, jax.typeof(x).dtype)
    return without_arrays(x)


def needs_of(e: Estimate, budget: int | str | None = None) -> Needs:
    """Bytes of a call, and the room for them: ``budget``; without one what the process leaves of the device, or the
    estimate's budget if that is less."""
    if budget is not None:
        room = budget_bytes(budget, e.capacity)
    else:
        room = e.capacity - (e.process - e.device)
        room = room if e.budget is None else min(room, e.budget)
    return Needs(max(e.device, room + 1) if e.refusal else e.device, room)


def estimates(
    workload: Workload,
    targets: Sequence[str],
    *,
    exact: bool,
    tell: Tell,
    config: ConfigLike | None,
    budget: int | str | None = None,
) -> Mapping[str, Estimate]:
    """A workload's estimates by target; without targets that of its arguments' device."""
    fun, args, options = workload.fun, workload.args, workload.jit_options
    with telling(workload):
        asked = {"exact": exact, "name": workload.name, "budget": budget, "config": config, "tell": tell}
        found = estimate_on(fun, args, options, targets=targets, **asked)
    return dict(zip(targets or (e.target for e in found), found, strict=True))  # by what was asked: nvidia-h200:8


def _on(found: Mapping[str, Estimate], target: str | None) -> Estimate:
    return next(iter(found.values())) if target is None else found[target]


__all__ = ["Needs", "Plans", "Search", "Sizes", "estimates", "largest_batch", "needs_of"]
