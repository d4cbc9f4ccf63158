"""The cheapest plan among rewritten programs, by cost over the program as written."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import cache

from jaxtensile.ir.plan import Plan
from jaxtensile.search.variant import Variant, charge_of
from jaxtensile.units import Bytes


def ordered(variants: list[Variant]) -> list[Variant]:
    """Variants by cost before planning, cheapest first."""
    return sorted(variants, key=lambda v: v.charge)


def without_host(variants: list[Variant]) -> list[Variant]:
    """The same variants, planned by recomputation alone, without those that stack in host memory."""
    return [
        replace(v, host=False, finer=cache(lambda room, v=v: without_host(v.finer(room))))
        for v in variants
        if not v.aside
    ]


def cheapest(variants: list[Variant], budget: Bytes, *, least: bool = True) -> tuple[Variant, Plan]:
    """The cheapest variant and plan that fit; if none does, the smallest, if ``least`` asks for it. ``variants``:
    cheapest first.

    Of variants that recompute more and more in the same loops, dearer ones are assumed to need less. Not so with stacks
    on the host: the dearest stacks most, and what has no room there stays on the device.
    """
    # What each needs at least matters only where none fits.
    found = _cheapest(variants, budget, False) if budget > 0 or not least else None
    if found is not None and (not least or found[1].predicted.device <= budget):
        return found
    return _cheapest(variants, budget, True)


def _cheapest(variants: list[Variant], budget: Bytes, least: bool) -> tuple[Variant, Plan]:
    best: tuple[Variant, Plan] | None = None

    @cache
    def solved(variant: Variant) -> Plan:
        return variant.solve(max(budget, 0), least=least)

    def fits(variant: Variant) -> bool:
        return solved(variant).predicted.device <= budget

    def consider(variant: Variant) -> None:
        nonlocal best
        if best is not None and best[1].predicted.device <= budget and charge_of(*best) <= variant.charge:
            return
        found = variant, solved(variant)
        if best is None or rank(found, budget) < rank(best, budget):
            best = found

    for similar in _chains(variants):
        first = 0
        if not similar[0].aside:
            first = bisect_left(similar, True, key=fits) if fits(similar[-1]) else len(similar) - 1
        for variant in similar[first:]:
            consider(variant)
    assert best is not None, "there is always the program as it is"
    if best[1].predicted.device <= budget:
        for variant in best[0].finer(budget - best[1].predicted.device):
            consider(variant)
    return best


def _chains(variants: list[Variant]) -> list[list[Variant]]:
    """Groups of variants that differ only in their loops, with and without stacks on the host."""
    chains: dict[tuple[int, bool, bool], list[Variant]] = {}
    for variant in variants:
        chains.setdefault((id(variant.base), variant.aside > 0, bool(variant.inside)), []).append(variant)
    return list(chains.values())


def rank(found: tuple[Variant, Plan], budget: Bytes) -> tuple[bool, float]:
    """Sort key, lower is better: plans that fit by cost, then the others by bytes."""
    device = found[1].predicted.device
    return (device > budget, device if device > budget else charge_of(*found))
