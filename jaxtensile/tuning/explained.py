"""``jaxtensile estimate --explain``: what a device without room held, and the one thing that helps most.

From the text of the error alone, or with the function at hand: then by its source lines, and with what budgets do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from jaxtensile.api.jit import jit
from jaxtensile.api.out_of_memory import Shortage, advice
from jaxtensile.devices.profiles import RESERVE
from jaxtensile.estimation.estimate import Estimate
from jaxtensile.estimation.text import described
from jaxtensile.settings.options import ConfigLike
from jaxtensile.tuning.largest import Plans, Sizes, Tell, estimates, needs_of
from jaxtensile.tuning.making import Maker, telling
from jaxtensile.tuning.predicted import Prediction, predicted
from jaxtensile.tuning.saved_error import Lived, Saved
from jaxtensile.units import Bytes, format_bytes

_MOST: Final = 8
"""Groups of values that are listed: one screen."""
_SHARE: Final = 0.8
"""Share of the device whose plan is told. A guess: a context and other arrays take the rest."""


def by_text(saved: Saved) -> list[str]:
    """The lines about a text alone."""
    return [_head(saved), *_listed(saved), f"what helps most: {_advice(saved)}"]


def by_function(
    saved: Saved | None, maker: Maker, target: str | None, *, tell: Tell, config: ConfigLike | None = None
) -> list[str]:
    """The lines about a function, and about the text of its error if there is one."""
    workload = maker()
    tell(f"estimating {maker.function} ...")
    (e,) = estimates(workload, () if target is None else (target,), exact=False, tell=tell, config=config).values()
    told = saved.capacity if saved is not None and target is None else None
    whole = needs_of(e).room if told is None else min(told, e.capacity)
    lines = [] if saved is None else [_head(saved), *_listed(saved)]
    lines += [
        f"{e.name} needs about {format_bytes(e.device)} as written, of {format_bytes(whole)} on {e.target}",
        f"  arguments {format_bytes(e.argument)}, results {format_bytes(e.output)}, temporaries "
        f"{format_bytes(e.temp)}, reused {format_bytes(e.alias)}",
        *(f"  {format_bytes(held.nbytes):>12} {described(held)}" for held in e.held[:_MOST]),
    ]
    tell("planning ...")
    with telling(workload):
        budget = max(int(_SHARE * whole), 1)
        asked = {"budget": budget, "target": target, "config": config}
        request = jit(workload.fun, **asked, **workload.jit_options).asks(*workload.args)
        there = predicted(request)
        least = there if not there.fits else predicted(replace(request, budget=1))
    lines.append(f"planned for {_SHARE:.0%} of it, {format_bytes(budget)}: {_plan(there)}")
    lines.append(f"the smallest plan: {_plan(replace(least, budget=least.planned))}")
    return [*lines, f"what helps most: {_of_function(e, there, least, whole, maker, target, tell, config)}"]


def _plan(found: Prediction) -> str:
    size = format_bytes(found.planned)
    if not found.fits:
        return f"nothing fits, the least is {size}"
    slower = found.seconds / found.plain_seconds - 1 if found.plain_seconds else 0.0
    parts = f", in {found.parts} parts" if found.parts > 1 else ""
    return f"{size}{parts}, predicted step time {slower:+.1%}"


def _of_function(
    e: Estimate,
    there: Prediction,
    least: Prediction,
    whole: Bytes,
    maker: Maker,
    target: str | None,
    tell: Tell,
    config: ConfigLike | None,
) -> str:
    if e.device <= there.budget:
        return "it fits as written: what else lives on the device took the room; delete or donate it"
    if there.fits:
        size = format_bytes(there.budget)
        return f'plan it: jaxtensile.jit(budget="{size}"), or jaxtensile exec --budget {size} -- python ...'
    if least.planned <= whole:
        size = format_bytes(whole)
        return f'plan it for nearly all of the device: jaxtensile.jit(budget="{size}"), and keep nothing else there'
    if not e.alias and 2 * e.output > e.argument:
        return "donate the arguments that the step replaces, donate_argnums=...: it returns as much as it is given"
    if 2 * e.argument > whole:
        return "the arguments alone take most of the device: shard them, or offload_state=True with donation"
    if maker.batch:
        sizes = Sizes(maker, () if target is None else (target,), tell=tell, config=config)
        batch = Plans(sizes, target, whole, {}).largest(near=sizes.largest(target, budget=whole))
        if batch:
            return f"{maker.batch} {batch} is the largest that fits with a plan"
    return "make the batch smaller, or shard the program"


# ---- of the text ----


def _head(saved: Saved) -> str:
    asked = "" if saved.asked is None else f" for {format_bytes(saved.asked)} more"
    of = "" if saved.capacity is None else f", which has {format_bytes(saved.capacity)},"
    needs = "" if saved.needs is None else f"; the program needs {format_bytes(saved.needs)}"
    used = "" if saved.in_use is None else f"; {format_bytes(saved.in_use)} were in use"
    free = "" if saved.free is None else f"; {format_bytes(saved.free)} were free"
    piece = "" if saved.largest is None else f", the largest piece {format_bytes(saved.largest)}"
    return f"out of memory: the {saved.device}{of} had no room{asked}{needs}{used}{free}{piece}"


def _listed(saved: Saved) -> Iterator[str]:
    if saved.parts:
        yield "  " + ", ".join(f"{name} {format_bytes(size)}" for name, size in saved.parts.items())
    yield from (f"  {format_bytes(kind.nbytes):>12} {_kind(kind)}" for kind in saved.lived[:_MOST])
    if rest := saved.lived[_MOST:]:
        yield f"  {format_bytes(sum(kind.nbytes for kind in rest)):>12} in {len(rest)} more kinds"


def _kind(kind: Lived) -> str:
    padding = f" ({format_bytes(kind.padding)} of it padding)" if kind.padding else ""
    if kind.what == "piece":
        return f"in {kind.count} pieces of {format_bytes(kind.nbytes // kind.count)}"
    return "  ".join(filter(None, (f"{kind.count} x {kind.what or 'value'} {kind.kind}{padding}", kind.source)))


def _advice(saved: Saved) -> str:
    values = [kind for kind in saved.lived if kind.what != "piece"]
    if 2 * sum(k.padding for k in values) > sum(k.nbytes for k in values):
        worst = max(values, key=lambda kind: kind.padding)
        return f"{worst.kind} is mostly padding: give its last two dimensions sizes that fill tiles, such as 8 and 128"
    known = saved.capacity
    temp, kept = saved.parts.get("temp", 0), _sum(saved, ("arguments", "output"))
    if known is not None and saved.needs is None and saved.asked is not None:
        arrays = 0  # what was in use may as well have been temporaries
        return advice(Shortage(saved.asked, arrays, known, max(known - RESERVE, 0), saved.free, saved.largest))
    if temp > kept or (saved.needs is not None and not kept):
        room = "" if known is None else f" --budget {format_bytes(int(_SHARE * known))}"
        return f"the temporaries are most of it, which a plan makes smaller: jaxtensile exec{room} -- python ..."
    if kept:
        return "arguments and results are most of it: donate what the step replaces, or shard it"
    return "give the function too: jaxtensile estimate --explain TEXT FILE:FUNCTION says what a plan would do"


def _sum(saved: Saved, names: Sequence[str]) -> Bytes:
    return sum(saved.parts.get(name, 0) for name in names)


__all__ = ["by_function", "by_text"]
