"""A report as text: one screen, the main figures first.

Also the wording shared with other forms: groups of like decisions, short types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from jaxtensile.ir.ir import Graph, producers
from jaxtensile.ir.plan import KernelTime, MemoryUse
from jaxtensile.places import short_place
from jaxtensile.report.facts import Decision, Facts, Setting
from jaxtensile.units import Bytes, format_bytes, format_seconds

LITTLE = 0.01
"""Least share of bytes worth a note. A guess."""
ROWS = 5
"""Groups shown of the kept and of the dropped values; the rest shares one line. So the text is one screen."""
_DTYPE = re.compile(r"(b?float|complex|u?int)(\d+)(\w*)")
_LETTERS = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}


@dataclass(frozen=True, slots=True)
class Group:
    """Values of one op, type and line with the same decision."""

    what: str
    where: str
    count: int
    nbytes: Bytes


def donated_for_nothing(graph: Graph, copied: Collection[int], source: Callable[[int], str], of: Bytes) -> list[str]:
    """A note on the results ``copied`` over the argument whose memory they get, if they are no little share ``of`` a
    program's bytes. ``source``: of an op."""
    total = sum(graph.values[v].nbytes for v in copied)
    if total < LITTLE * of:
        return []
    made = producers(graph)
    results = sorted(((graph.values[v].nbytes, source(made[v])) for v in copied), reverse=True)
    places = dict.fromkeys(short_place(place) for _, place in results if place)
    at = f", at {', '.join([*places][:2])}" if places else ""
    return [
        f"donating saves nothing for {format_bytes(total)} of results: what they would be written over is still read "
        f"while they are made{at}"
    ]


def what_and_where(decision: Decision) -> tuple[str, str]:
    """Op and type, and the line that made it: what values of a group have in common."""
    return f"{decision.primitive} {short_type(decision.dtype, decision.shape)}", short_place(decision.source)


def groups(decisions: Iterable[Decision]) -> list[Group]:
    """Like values together, most bytes first."""
    found: dict[tuple[str, str], tuple[int, Bytes]] = {}
    for d in decisions:
        key = what_and_where(d)
        count, nbytes = found.get(key, (0, 0))
        found[key] = count + 1, nbytes + d.nbytes
    return sorted((Group(*key, *sums) for key, sums in found.items()), key=lambda g: -g.nbytes)


def kept(report: Facts) -> list[Decision]:
    """Residuals kept in device memory."""
    return [d for d in report.decisions if d.kind == "keep"]


def offloaded(report: Facts) -> list[Decision]:
    """Residuals in host memory."""
    return [d for d in report.decisions if d.kind == "offload"]


def dropped(report: Facts) -> list[Decision]:
    """Recomputed values that are live at the plain program's peak."""
    return [d for d in report.decisions if d.kind == "recompute" and d.stored]


def passing(report: Facts) -> list[Decision]:
    """Recomputed values that are intermediate steps or short-lived."""
    return [d for d in report.decisions if d.kind == "recompute" and not d.stored]


def short_type(dtype: str, shape: tuple[int, ...]) -> str:
    """``bf16[16,1024,768]``, as jaxprs print it."""
    match = _DTYPE.fullmatch(dtype)
    name = f"{_LETTERS[match[1]]}{match[2]}{match[3]}" if match else dtype
    return f"{name}[{','.join(map(str, shape))}]"


def verdict(report: Facts) -> str:
    """The outcome in one line."""
    r = report
    head = f"{r.name} on {r.target}"
    if not r.compiled.exact:
        return f"{head} is not planned: {r.notes[0] if r.notes else 'XLA does not say how many bytes it needs'}"
    if not r.fits:
        return f"{head} DOES NOT FIT its budget of {format_bytes(r.budget)}: {format_bytes(r.compiled.device)}"
    before, after = format_bytes(r.baseline.device), format_bytes(r.compiled.device)
    if r.unchanged and r.xla.count:
        fewer = f", down from {before}" if r.baseline != r.compiled else ""
        return (
            f"{head} fits its budget of {format_bytes(r.budget)} as it is, with {operations(r.xla.count)} that XLA "
            f"recomputes: {after}{fewer}"
        )
    if r.unchanged:
        return f"{head} fits its budget of {format_bytes(r.budget)} as it is: {after}"
    way = "up" if r.compiled.device > r.baseline.device else "down"  # what a checkpoint recomputed may be kept
    parts = f", in {r.parts} parts" if r.parts > 1 else ""
    return f"{head} fits its budget of {format_bytes(r.budget)}{parts}: {after}, {way} from {before}"


def accounts(report: Facts) -> list[tuple[str, MemoryUse, str]]:
    """Memory of the plain and the planned program, by the model and by XLA."""
    rows = [("plain", report.baseline), ("planned", report.predicted), ("planned", report.compiled)]
    if report.unchanged:
        before = [("plain", report.baseline)] if report.baseline not in (report.predicted, report.compiled) else []
        rows = [("plain", report.predicted), *before, ("plain", report.compiled)]
    return [(name, use, "XLA" if use.exact else "predicted") for name, use in rows]


def price(report: Facts) -> str:
    """What the plan costs in time."""
    r = report
    ratio = f"matrix FLOPs x {1 + r.recompute_flops / r.flops:.3f}" if r.flops else "no matrix FLOPs"
    stages = f"{r.stages} {'stage' if r.stages == 1 else 'stages'}"
    sign = "+" if r.overhead >= 0 else ""
    return f"{ratio}, predicted step time {slower(r)} ({sign}{format_seconds(r.overhead)}), in {stages}, {made_by(r)}"


def by_xla(report: Facts) -> str:
    """XLA's own recomputation and its price."""
    r = report
    share = f", {100 * r.xla.seconds / (r.step - r.overhead):+.1f} %" if r.step > r.overhead else ""
    products = f", matrix FLOPs x {1 + r.xla.flops / r.flops:.3f}" if r.flops else ""
    took = f"{products}, predicted step time +{format_seconds(r.xla.seconds)}{share}"
    return f"XLA recomputes {operations(r.xla.count)} by itself{took}"


def operations(count: int) -> str:
    """``1 operation``."""
    return f"{count} operation" if count == 1 else f"{count} operations"


def made_by(report: Facts) -> str:
    """The solver, and what it has proven."""
    r = report
    if r.gap is None:
        return f"by {r.solver}"
    if not r.gap:
        return f"by {r.solver}: no plan around the same boundary is cheaper"
    return f"by {r.solver}: at most {100 * r.gap:.2g} % of what it recomputes could be spared"


def slower(report: Facts) -> str:
    """The predicted change of the step time, ``+2.5 %``; negative if a checkpoint was undone."""
    return f"{100 * report.overhead_ratio:+.1f} %"


def by_kernels(report: Facts) -> str:
    """The step by its compiled kernels, beside the plain program's if compiled."""
    now, plain = report.kernels, report.plain_kernels
    assert now is not None
    beside = ""
    if plain is not None and plain != now and plain.seconds:
        change = 100 * (now.seconds / plain.seconds - 1)
        beside = f", {change:+.1f} % of the plain program's {format_seconds(plain.seconds)}"
    waits = f", {format_seconds(now.wait)} of it waiting for copies" if now.wait else ""
    longest = f"; longest: {longest_kernel(now.longest[0])}" if now.longest else ""
    return f"by its {now.kernels:,} compiled kernels a step takes {format_seconds(now.seconds)}{beside}{waits}{longest}"


def longest_kernel(kernel: KernelTime) -> str:
    """``36 x product of .../dot_general, 12.3 ms``."""
    named = f" of {'/'.join(kernel.source.split('/')[-2:])}" if kernel.source else ""
    return f"{kernel.times:,} x {kernel.kind}{named}, {format_seconds(kernel.seconds)}"


def timed(report: Facts) -> str:
    """The measured step beside the predicted one."""
    r = report
    took = f"{format_seconds(r.measured)} measured" if r.measured is not None else "not yet measured"
    renewals = "1 renewal" if r.renewed == 1 else f"{r.renewed} renewals"
    after = f", after {renewals} of the plan" if r.renewed else ""
    return f"a step takes {took}, {format_seconds(r.step)} predicted{after}"


def spent(report: Facts) -> str:
    """How long planning and XLA took."""
    compiling = {n: s for n, s in report.seconds.items() if n.startswith("compile")}
    planning = {n: s for n, s in report.seconds.items() if n not in compiling}

    def told(steps: dict[str, float]) -> str:
        return ", ".join(f"{name.removeprefix('compile ')} {format_seconds(s)}" for name, s in steps.items())

    text = f"planning {format_seconds(sum(planning.values()))} ({told(planning)})"
    if compiling:
        rounds = f" in {report.rounds} rounds" if report.rounds > 1 else ""
        text += f"; XLA {format_seconds(sum(compiling.values()))} ({told(compiling)}{rounds})"
    return text


def told_settings(settings: Iterable[Setting]) -> list[str]:
    """Sources of options: a line for each from a config, one for the rest; empty without a config's."""
    all_ = list(settings)
    lines = [f"{s.name} {s.value} from {short_place(s.source)} [{s.table}]" for s in all_ if s.table]
    if not lines:
        return []
    who = {"code": "given in the code", "job": "by the job's lease", "default": "by default"}
    others = {told: [f"{s.name} {s.value}" for s in all_ if s.source == source] for source, told in who.items()}
    rest = "; ".join(f"{', '.join(which)} {told}" for told, which in others.items() if which)
    return [*lines, rest] if rest else lines


def as_text(report: Facts) -> str:
    """The output of ``print(report)``: at most about 25 lines."""
    r = report
    lines = [verdict(r), _row("", "device", "=", "argument", "+", "output", "+", "temp", "-", "alias")]
    for name, use, by in accounts(r):
        sizes = (format_bytes(n) for n in (use.device, use.argument, use.output, use.temp, use.alias))
        cells = [cell for pair in zip(sizes, "=++- ", strict=True) for cell in pair]
        lines.append(f"{_row(name, *cells[:-1])}  {by}")
    if not r.unchanged:
        lines += _listed("kept", kept(r))
        lines += _listed("offloaded", offloaded(r))
        lines += _listed("recomputed", dropped(r))
        lines += _waiting(r)
        lines.append(f"  {price(r)}")
    if r.xla.count:
        lines.append(f"  {by_xla(r)}")
    if r.offload_bytes or r.compiled.host:
        there = format_bytes(r.compiled.host)
        waits = f", {format_seconds(r.wait)} waiting for it" if r.wait else ""
        lines.append(
            f"  {format_bytes(r.offload_bytes)} to the host and back in a step{waits}; XLA holds {there} there"
        )
    if r.kernels is not None:
        lines.append(f"  {by_kernels(r)}")
    if r.measured is not None or r.renewed:
        lines.append(f"  {timed(r)}")
    lines.append(f"  no plan by recomputation can need less than {format_bytes(r.lower_bound)}")
    if r.unknown_primitives:
        lines.append(f"  without a cost rule of their own: {', '.join(r.unknown_primitives)}")
    lines.extend(f"  {line}" for line in told_settings(r.settings))
    lines.extend(f"  note: {note}" for note in r.notes)
    lines.append(f"  {spent(r)}")
    return "\n".join(lines)


def _waiting(report: Facts) -> list[str]:
    state = sorted(report.state, key=lambda leaf: -leaf.nbytes)
    if not state:
        return []
    total, count = format_bytes(sum(leaf.nbytes for leaf in state)), len(state)
    arguments = "argument" if count == 1 else "arguments"
    lines = [f"  {'on the host':<10}{total:>10}   in {count} {arguments} between steps"]
    shown = state if count <= ROWS + 1 else state[:ROWS]
    lines += [f"  {'':<10}{format_bytes(leaf.nbytes):>11}      {leaf.name}" for leaf in shown]
    if rest := state[len(shown) :]:
        lines.append(f"  {'':<10}{format_bytes(sum(leaf.nbytes for leaf in rest)):>11} {len(rest):>4} more")
    return lines


def _values(count: int) -> str:
    return f"{count} value" if count == 1 else f"{count} values"


def _row(name: str, *cells: str) -> str:
    return f"  {name:<10}" + "".join(f"{cell:>11}" if len(cell) > 1 else f" {cell}" for cell in cells)


def _listed(word: str, decisions: list[Decision]) -> list[str]:
    found = groups(decisions)
    if not found:
        return []
    total = format_bytes(sum(g.nbytes for g in found))
    lines = [f"  {word:<10}{total:>11}   in {_values(len(decisions))}"]
    shown = found if len(found) <= ROWS + 1 else found[:ROWS]
    wide = max((len(g.what) for g in shown), default=0)
    lines += [f"  {'':<10}{format_bytes(g.nbytes):>11} {g.count:>4} x {g.what:<{wide}}  {g.where}" for g in shown]
    if rest := found[len(shown) :]:
        size = format_bytes(sum(g.nbytes for g in rest))
        lines.append(f"  {'':<10}{size:>11} {sum(g.count for g in rest):>4} more, of {len(rest)} kinds")
    return lines
