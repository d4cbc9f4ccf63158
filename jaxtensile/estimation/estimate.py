"""``jaxtensile.estimate``: the device bytes of a job, before it runs and without its device.

Statically, from the jaxpr: `passes.fusion` finds the buffers, `passes.liveness` the bytes live at once. Exactly, from
the target's own compiler.

Invariant: nothing is executed and no device memory is allocated.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import jax

from jaxtensile import _compat, switches
from jaxtensile.devices.measured import best_known
from jaxtensile.devices.profiles import DeviceProfile, profile
from jaxtensile.errors import TargetError, require_known
from jaxtensile.estimation.figures import Figures, Held, Room, room_of
from jaxtensile.estimation.process import parts
from jaxtensile.estimation.text import as_dict, as_text
from jaxtensile.faults import as_ours
from jaxtensile.ir.ir import Graph, producers
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.ir.timeline import Sites, Timeline, Track
from jaxtensile.passes.lifetimes.liveness import Liveness
from jaxtensile.passes.lifetimes.output_reuse import reusing_outputs
from jaxtensile.passes.order.reorder import as_scheduled
from jaxtensile.passes.pack.heap import heap
from jaxtensile.program.cse import cse
from jaxtensile.program.hoist_invariants import hoist_invariants
from jaxtensile.program.trace import Traced, trace_jaxpr
from jaxtensile.program.workload import Transformed, name_of, told_of_modules
from jaxtensile.report.text import donated_for_nothing
from jaxtensile.settings.identity import identity_of, planned
from jaxtensile.settings.options import Asked, ConfigLike, Resolved, config_of, resolved
from jaxtensile.spmd.elsewhere import carried, in_force
from jaxtensile.spmd.local_graph import Local, local_graph, whole
from jaxtensile.spmd.local_shapes import Sharded, local_shapes, sharded
from jaxtensile.spmd.location import device_name, is_nowhere, location, profile_of
from jaxtensile.units import Bytes, Seconds, format_bytes
from jaxtensile.xla.compile import RECOMPUTES, compile_program, not_recomputing, sooner
from jaxtensile.xla.compilers import compiler_of
from jaxtensile.xla.target import compiler_options, tracing_for

POINTER = 8
"""Bytes of an entry in the table of results (docs/xla.md)."""
HOLES: Final = "holes between buffers"


@dataclass(frozen=True, kw_only=True)
class Estimate(Figures):
    __doc__ = Figures.__doc__

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every figure in bytes and seconds."""
        return as_dict(self)

    def __str__(self) -> str:
        return as_text(self)


def estimate(
    fun: Callable[..., Any],
    /,
    *args: Any,
    target: str | None = None,
    exact: bool = False,
    budget: int | str | None = None,
    config: ConfigLike | None = None,
    **jax_jit_options: Any,
) -> Estimate:
    """Peak device bytes of ``fun(*args)`` before anything runs.

    ``fun``: any function, or a ``jax.jit`` result (its own options then count). ``args``: arrays or
    ``jax.ShapeDtypeStruct``s. ``target``: a name of ``jaxtensile.targets()``; None: the arguments' device. ``exact``:
    ask the target's own compiler (``False``: from the jaxpr alone). ``budget``: device bytes that ``fits()`` heeds, as
    ``jaxtensile.jit`` takes them; by default the config's. ``config``: a ``jaxtensile.toml`` or its tables, by default
    the one that counts here. The rest are arguments of ``jax.jit``, above all ``donate_argnums``.

    Raises ``TargetError`` for an unknown target, or one that cannot be compiled for with ``exact=True``,
    ``BudgetError`` for an unreadable budget, and ``ConfigError``.
    """
    targets = () if target is None else (target,)
    return estimate_on(fun, args, jax_jit_options, targets=targets, exact=exact, budget=budget, config=config)[0]


def estimate_on(
    fun: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    targets: Sequence[str] = (),
    exact: bool = False,
    name: str = "",
    budget: int | str | None = None,
    config: ConfigLike | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Estimate, ...]:
    """One estimate per target, in their order, from one trace; without targets, for the arguments' device.

    ``tell`` is told before each compile.
    """
    devices = [profile(target) for target in targets]  # an unknown name is told before the work, not after
    wanted = _wanted(fun, budget, config)
    started = time.perf_counter()
    plain, args = _jitted(fun, tuple(args), options)
    with tracing_for(*targets, args=args), told_of_modules(fun, args):
        traced = plain.trace(*args)
    seconds = {"trace": time.perf_counter() - started}
    name = name or name_of(fun)
    where = location(traced, args, {}, options)
    if where is None:
        raise TargetError(f"the arguments of {name} are on devices that do not go together: place them")
    if not targets and is_nowhere(traced, args, {}):
        raise TargetError(
            f"{name} is for a mesh without devices, and nothing says of which kind they are: give a target=, one of "
            "jaxtensile.targets()"
        )
    here = () if targets else tuple(map(device_name, where.devices))
    with as_ours(f"estimating {name}", "jax.jit(...).lower(...).compile().memory_analysis() asks XLA"):
        if not targets:
            devices = [best_known(profile_of(where.device), where.device.device_kind)]
        many = None
        if where.count > 1:
            numbers = _compat.static_arguments(plain)
            many = sharded(traced, args, {}, numbers, where.count, platform=devices[0].backend.name)
        unused, alone = bool(options.get("keep_unused", False)), many is None
        known = {h: program_of(traced, unused, h) for h in {alone and d.backend.hoists_invariants for d in devices}}
        programs = [known[alone and d.backend.hoists_invariants] for d in devices]
        with tracing_for(*targets, args=args):
            static = [
                static_estimate(program, d, name=name, seconds=seconds, many=many)
                for program, d in zip(programs, devices, strict=True)
            ]
    out: list[Estimate] = []
    for program, device, target, found in zip(programs, devices, targets or (None,), static, strict=True):
        if exact:
            tell(f"compiling for {device.name} ...")
            graph = _of_one_device(program, many, device)[0].graph
            found = _exactly(found, plain, traced, args, graph, device, target)
        elif device.backend.recomputes and found.device > (most := int(RECOMPUTES * device.capacity)):
            note = f"above about {format_bytes(most)} XLA recomputes by itself under jax.jit; exact=True says what"
            found = replace(found, notes=(*found.notes, note))
        capacity, budget, setting = room_of(wanted, device, here)
        out.append(replace(found, capacity=capacity, budget=budget, settings=setting, resolved=wanted))
    return tuple(out)


def _wanted(fun: Callable[..., Any], budget: int | str | None, config: ConfigLike | None) -> Resolved:
    """The options of a function. Raises ``ConfigError``."""
    known, who = config_of(config), identity_of(fun)
    planned(known, who)
    return resolved(Asked(budget=budget), known, who)


def program_of(traced: Any, keep_unused: bool = False, hoists: bool = False) -> Traced:
    """The flat program of a ``jax.jit`` trace; ``hoists``: with the invariants of loops in front of them."""
    donated = _compat.donated_inputs(traced)
    program = trace_jaxpr(traced.jaxpr, donated, keep_unused=keep_unused)
    if hoists and switches.on("hoist_invariants"):
        moved = hoist_invariants(program, traced.jaxpr)
        if moved is not traced.jaxpr:
            program = trace_jaxpr(moved, donated, keep_unused=keep_unused)
    return cse(program)


def static_estimate(
    program: Traced,
    device: DeviceProfile,
    *,
    name: str,
    seconds: Mapping[str, Seconds],
    many: Sharded | None = None,
) -> Estimate:
    """The estimate of a traced program, without a compiler; of one device, if ``many`` says how it is divided."""
    before = time.perf_counter()
    compiler = compiler_of(device)
    if compiler.fuser.twice:
        program = cse(program, cheap=True)  # XLA stores what equal equations compute once
    local, notes = _of_one_device(program, many, device)
    graph = local.graph
    low = compiler.lowered(graph)
    orders = as_scheduled(low.graph, by=compiler.fuser)
    lying = [reusing_outputs(run.graph, run.live) for run in orders]
    needed = [max(heap(live), live.temp) for live in lying]
    worst = max(range(len(orders)), key=needed.__getitem__)
    run, live, holes = orders[worst], lying[worst], needed[worst] - lying[worst].temp
    of = tuple(low.origin[i] for i in run.origin)

    def source(op: int) -> str:
        return local.source(of[op])

    # A program with several results returns a table of pointers to them.
    table = POINTER * len(graph.outputs) if len(graph.outputs) > 1 else 0
    use = replace(live.use(), temp=live.temp + holes, output=live.output + table)
    room = Room(min(needed), _largest(run.graph, live))
    return Estimate(
        name=name,
        target=device.name,
        use=use,
        low=use.device - use.temp + max(room.least - compiler.low.of(use.temp, room.largest), 0),
        high=use.device + compiler.high.of(use.temp, room.largest),
        room=room,
        parts=parts(use, graph, device),
        held=held_at_the_peak(run.graph, source, live, holes),
        timeline=Timeline(_track(program, tuple(local.origin[i] for i in of), live, use), None),
        seconds={**seconds, "estimate": time.perf_counter() - before},
        shards=many.count if many is not None else 1,
        notes=(*switches.notes(), *notes, *donated_for_nothing(run.graph, live.copied, source, use.device)),
        capacity=device.capacity,
    )


def _of_one_device(program: Traced, many: Sharded | None, device: DeviceProfile) -> tuple[Local, tuple[str, ...]]:
    """The graph of one device, and what is to be said of it."""
    if many is None:
        return whole(program), ()
    shapes = local_shapes(program, many)
    said = f"arguments are sharded over {many.count} devices; bytes are per device"
    if shapes.guessed:
        said += f", by one ratio for all but the arguments, as JAX did not say how they are divided ({shapes.guessed})"
    return local_graph(program, shapes, device.backend), (said,)


def _largest(graph: Graph, live: Liveness) -> Bytes:
    return max(
        (r.nbytes for r in (*live.ranges, *(graph.values[v] for v in (*graph.inputs, *graph.outputs)))), default=0
    )


def held_at_the_peak(graph: Graph, source: Callable[[int], str], live: Liveness, holes: Bytes) -> tuple[Held, ...]:
    """Values live at the peak, like ones together, largest first. ``source``: of an op. ``holes``: unused bytes between
    buffers."""
    peak, ranges, inside = live.at_peak()
    made = producers(graph)
    found: dict[tuple[str, str, tuple[int, ...], str], tuple[int, Bytes]] = {}

    def hold(op: int, dtype: str, shape: tuple[int, ...], nbytes: Bytes) -> None:
        key = (graph.ops[op].primitive, dtype, shape, source(op))
        count, before = found.get(key, (0, 0))
        found[key] = count + 1, before + nbytes

    for r in ranges:
        hold(made[r.value], graph.values[r.value].dtype, graph.values[r.value].shape, r.nbytes)
    if inside:
        hold(peak, "", (), inside)
    held = [Held(*key, *sums) for key, sums in found.items()]
    if holes:
        held.append(Held(HOLES, "", (), "", 1, holes))
    return tuple(sorted(held, key=lambda h: -h.nbytes))


def _track(program: Traced, origin: tuple[int, ...], live: Liveness, use: MemoryUse) -> Track:
    primitives = tuple(op.primitive for op in program.graph.ops)
    sites = Sites(primitives=primitives, sources=program.sources(), seconds=(0.0,) * len(primitives))
    base = use.device - live.temp
    return Track(sites=sites, origin=origin, device=tuple(base + b for b in live.profile), base=base)


def _exactly(
    static: Estimate,
    plain: Any,
    traced: Any,
    args: Sequence[Any],
    graph: Graph,
    device: DeviceProfile,
    target: str | None,
) -> Estimate:
    options = compiler_options(target) if target is not None else {}
    plain, placed = (plain, tuple(args)) if target is None else _carried(target, plain, traced, args)
    make, recomputes = functools.partial(_Optioned, plain), device.backend.recomputes
    counts = device if device.backend.takes_all else None
    with tracing_for(args=placed), in_force(target):
        trial = sooner(device.backend, options)
        compiled = compile_program(
            make, placed, {}, not_recomputing(device.backend, options), counts=counts, trial=trial
        )
        use = compiled.memory
        again, spared, seconds = compiled.again, None, compiled.seconds
        if recomputes and use is not None and use.device > RECOMPUTES * device.capacity:
            second = compile_program(make, placed, {}, options, counts=device)
            again, seconds = second.again, seconds + second.seconds
            spared = second.device if again.count else None
    found = replace(
        static,
        seconds={**static.seconds, "XLA": seconds},
        notes=(*static.notes, *compiled.notes),
        refusal=compiled.refusal,
        xla=again,
        spared=spared,
    )
    if use is None:
        return found
    needed = parts(use, graph, device)
    return replace(found, use=use, low=use.device, high=use.device, parts=needed)


def _carried(target: str, plain: Any, traced: Any, args: Sequence[Any]) -> tuple[Any, Any]:
    """A ``jax.jit`` result and its arguments, for devices of the target."""
    own = _compat.jit_options(plain)
    found = carried(target, lambda: traced, plain, plain, own, args, {})
    same = found.fun is plain and found.options is own
    return plain if same else jax.jit(found.fun, **found.options), found.args


class _Optioned:
    """A ``jax.jit`` result that compiles with more options."""

    def __init__(self, plain: Any, options: Mapping[str, Any]) -> None:
        self._plain, self._options = plain, dict(options)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        lowered = self._plain.lower(*args, **kwargs)
        compile_with = lambda more: lowered.compile({**self._options, **(more or {})} or None)  # noqa: E731
        return SimpleNamespace(compile=compile_with, _lowering=lowered._lowering)


def _jitted(fun: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """A ``jax.jit`` result of the function as written, and its arguments."""
    plain = fun
    if isinstance(fun, Transformed):
        plain, args = fun.as_written(args)
    if not options and hasattr(plain, "trace") and hasattr(plain, "lower"):
        return plain, args
    _require_known(plain, options)
    return jax.jit(plain, **options), args


def _require_known(fun: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """``OptionError`` for a keyword argument that is none of ``jax.jit``: it may be one of ``fun``."""
    known, own = inspect.signature(jax.jit).parameters.keys() - {"fun"}, name_of(fun)
    for name in options:
        bound = f"keywords are options of jax.jit; for one of {own} pass functools.partial({own}, {name}=...)"
        require_known("estimate", (name,), known, bound)


__all__ = ["Estimate", "Held", "estimate", "estimate_on", "program_of", "static_estimate"]
