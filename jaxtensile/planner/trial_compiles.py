"""Compiled programs of a request and XLA's figures: each compiled once, and timed.

Where a compiler is sooner done without its optimizations, which change no bytes, only what will run is compiled in
full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax

from jaxtensile import faults
from jaxtensile.clock import Clock
from jaxtensile.ir.plan import CompiledTime, Plan, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.control import controlled
from jaxtensile.passes.order.own_copies import with_own_copies
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.verify.check import check
from jaxtensile.program.emit import emit
from jaxtensile.search.made import BY_XLA, Made
from jaxtensile.search.request import Evaluate, Request
from jaxtensile.search.variant import Variant, program_key
from jaxtensile.switches import on
from jaxtensile.units import Bytes
from jaxtensile.xla.compile import (
    RECOMPUTES,
    REMATERIALIZATION,
    Compiled,
    Options,
    compile_program,
    disabled,
    not_recomputing,
    planned_options,
    recomputing,
    sooner,
    within,
)
from jaxtensile.xla.kernel_time import timed

KERNELS = "the account of compiled kernels"
SMALL = 0.5 * RECOMPUTES
"""Share of the device: programs predicted below it are far from XLA:GPU's own recomputation. A guess: half of its
threshold."""
APART, LEAST_APART, RESCHEDULED = 2.0, 0.01, 0.15
"""Another way may be better by so many times what one has saved so far, and by these shares of the bytes at least,
without and with another scheduler. Guesses."""
NARROWLY = 1.05
"""Plans with bytes on the host that miss by no more than this factor are also compiled without control dependencies. A
guess."""


class _Way(NamedTuple):
    """Compiler options, whether to add control dependencies, and whether the compiler is ``told`` the plan's bytes."""

    options: Options
    controlled: bool
    told: bool

    @property
    def strict(self) -> bool:
        """Whether the compiler has less choice: usually fewer bytes, at a price."""
        return self.controlled or self.told


class TrialCompiles:
    """Compiled programs of one request; ``predicted``: bytes of the program as it is.

    XLA:GPU recomputes nothing by itself except in ``by_xla``, so plans are compared by known work.
    """

    def __init__(self, request: Request, clock: Clock, predicted: Bytes) -> None:
        self.request, self.clock = request, clock
        self._options = not_recomputing(request.device.backend, request.options)
        self._small = predicted <= SMALL * request.device.capacity
        self._trial = {} if request.in_full or not on("trials") else sooner(request.device.backend, request.options)
        self._may_run = predicted <= request.shards * request.budget
        """Whether the program as it is may be what will run."""
        self.plain: Compiled | None = None
        """The user's own function."""
        self._as_it_is: dict[bool, Compiled] = {}
        """Programs otherwise unchanged: with state on the host (False), or without checkpoints (True)."""
        backend = request.device.backend
        ties = (False, True) if backend.heeds_barriers else (False,)
        told = (False, True) if backend.takes_all and request.shards == 1 else (False,)
        options = planned_options(backend, self._options)
        self._ways = [_Way(o, tie, tell) for o in options for tie in ties for tell in told]
        self._missed: dict[tuple[int, int], Made] = {}
        """Planned programs that do not fit, by key and way, without their executables."""
        self._saved: float | None = None
        """Largest share of bytes that a plan needed less in another way than in the first; None: not compared yet."""
        self._learned: dict[bool, list[_Way]] = {}
        """Ways for plans with and without bytes on the host, best first. Of two that differ in control dependencies:
        without host bytes only the better; with them, the one with dependencies first."""

    def own(self, meanwhile: Callable[[], object] | None = None) -> Compiled:
        """The user's own function, compiled once."""
        if self.plain is None:
            request = self.request
            # With other options than the user's the function is traced again.
            options = request.options if self._small else self._options
            with self.clock("compile plain"), faults.of_the_user(meanwhile) as ahead:
                self.plain = self._compiled(None, request.args, request.kwargs, options, ahead, self._may_run)
        return self.plain

    def own_in_full(self) -> Compiled:
        """The user's own function, to be run."""
        if self.own().jitted is None:
            self.plain, self._may_run = None, True
        return self.own()

    def in_full(self, made: Made) -> Made:
        """A planned program, to be run. Its bytes are those of this compile: a trial is no proof."""
        if made.compiled.jitted is not None:
            return made
        args, kwargs = self.request.arguments()
        with self.clock("compile planned"):
            compiled = self._compiled(made.evaluate, args, kwargs, made.compiled.options, to_run=True)
        return replace(made, compiled=compiled)

    def _compiled(
        self,
        evaluate: Evaluate | None,
        args: Any,
        kwargs: Any,
        options: Options,
        meanwhile: Callable[[], object] | None = None,
        to_run: bool = False,
    ) -> Compiled:
        request = self.request
        counts = request.device if request.device.backend.takes_all else None
        return compile_program(
            lambda o: request.make(evaluate, o),
            args,
            kwargs,
            options,
            meanwhile,
            counts,
            self._clock_of_kernels,
            {} if to_run else self._trial,
        )

    @property
    def kernels_known(self) -> bool:
        """Whether compiled programs say how long a step takes: on known devices, not across shards."""
        return self.request.device.backend.kernels_known and self.request.shards == 1

    @cached_property
    def _clock_of_kernels(self) -> Callable[[str], CompiledTime | None] | None:
        """From compiled text to a step's time; None if the device's kernels are unknown, or across shards."""
        request = self.request
        if not self.kernels_known:
            return None
        return lambda text: request.faults.spared(KERNELS, lambda: timed(text, request.device), lambda: None)

    def by_xla(self, variant: Variant) -> Made | None:
        """The user's own function with XLA:GPU's own recomputation; None if not allowed or if it does not fit."""
        request = self.request
        if (
            not request.device.backend.recomputes
            or request.shards > 1
            or request.state
            or REMATERIALIZATION in disabled(request.options)
        ):
            return None
        options = recomputing(request.options, request.device.capacity, request.budget)
        with self.clock("compile plain with XLA's recomputation"):
            made = compile_program(
                lambda o: request.make(None, o), request.args, request.kwargs, options, None, request.device
            )
        if made.device > request.budget:
            return None
        return Made(compiled=made, variant=variant, plan=_unchanged(variant, "XLA"), evaluate=None, choice=BY_XLA)

    def plainly(self, variant: Variant) -> Made:
        """The user's own function, as a plan that changes nothing."""
        return Made(compiled=self.own(), variant=variant, plan=_unchanged(variant), evaluate=None)

    def unplanned(self, variant: Variant, meanwhile: Callable[[], object] | None = None) -> Made:
        """The program with its state on the host or without checkpoints, otherwise unchanged."""
        with self.request.faults.of(variant.blamed):
            return self._unplanned(variant, meanwhile)

    def _unplanned(self, variant: Variant, meanwhile: Callable[[], object] | None) -> Made:
        request = self.request
        plan, options = _unchanged(variant), self._options
        evaluate = emit(variant.traced, plan.program)
        args, kwargs = request.arguments()
        if request.state and request.device.backend.takes_all:
            # What waits on the host comes in as early as there is room for it.
            options = within(options, request.device.capacity - max(request.budget, plan.predicted.device))
        with self.clock("compile undone" if variant.undone is not None else "compile streamed"):
            to_run = plan.predicted.device <= request.budget
            compiled = self._compiled(evaluate, args, kwargs, options, meanwhile, to_run)
        self._as_it_is[variant.undone is not None] = compiled
        return Made(compiled=compiled, variant=variant, plan=plan, evaluate=evaluate)

    def as_it_is(self, variant: Variant, plan: Plan) -> Made:
        """The variant's program with nothing recomputed."""
        if self.request.state:
            return self.unplanned(variant)
        return Made(compiled=self.own(), variant=variant, plan=plan, evaluate=None)

    def known(self, variant: Variant) -> Compiled | None:
        """XLA's figures for the variant's program with nothing recomputed, if it was compiled."""
        undone = variant.undone is not None
        return self._as_it_is.get(undone) if undone or self.request.state else self.plain

    def merged(self, meanwhile: Callable[[], object] | None = None) -> Compiled:
        """The user's own function as the program without checkpoints, which XLA makes of it by itself."""
        self._as_it_is[True] = self.own(meanwhile)
        return self._as_it_is[True]

    def planned(
        self, variant: Variant, plan: Plan, *, once: bool = False, learned: bool = True, best: bool = False
    ) -> Made | None:
        """The plan, checked and compiled in the first way that fits, else in the best.

        Ways are schedulers (CPU), control dependencies (GPU) and telling the compiler the plan's bytes (TPU). None is
        always better, so all are tried, with exceptions:

        * A plan with host bytes that is far over the budget with control dependencies is not compiled without them.
        * A plan that does not fit a TPU at all is not tried again.
        * Where other ways have saved much less than what a plan misses by in the first, they are not tried for it.

        ``once``: the first way that compiles; ``best``: the one that was best so far. ``learned``: use the first and
        the last exception and what earlier plans showed; else try every way. None if XLA refuses a plan with host
        copies.
        """
        with self.request.faults.of(variant.blamed):
            return self._planned(variant, plan, once, learned, best)

    def _planned(self, variant: Variant, plan: Plan, once: bool, learned: bool, best: bool) -> Made | None:
        with self.clock("check"):
            check(variant.problem.graph, plan.program)
        try:
            with self.clock("compile planned"):
                return self._best_way(variant, plan, once, learned, best)
        except jax.errors.JaxRuntimeError:
            if plan.offload_bytes <= self.request.state_bytes:
                raise
            return None

    def again(self, variant: Variant, plan: Plan, choice: int, *, only: bool = False) -> Made | None:
        """A plan of another process, compiled first in the way ``choice`` of its ``Made``, or in ``only`` that; None if
        refused."""
        if choice == BY_XLA:
            return self.by_xla(variant)
        best = self._ways[choice]
        others = () if only else (way for way in self._ways if way is not best)
        self._learned[plan.offload_bytes > 0] = [best, *others]
        trial, self._trial = self._trial, {}  # it fitted before
        try:
            if plan.changes_nothing and variant.as_it_is:
                return self.unplanned(variant) if variant.undone is not None else self.as_it_is(variant, plan)
            return self.planned(variant, plan)
        except jax.errors.JaxRuntimeError:
            return None
        finally:
            self._trial = trial

    def _best_way(self, variant: Variant, plan: Plan, once: bool, learned: bool, best: bool) -> Made:
        # With bytes on the host control dependencies help up to much more than the little that they cost; without,
        # where a plan misses. So it is with telling a compiler that takes what room there is.
        copies = plan.offload_bytes > 0
        ways = sorted(self._ways, key=lambda way: way.strict is not copies)
        order = self._learned.get(copies, ways) if learned and not once else ways
        request, heeds = self.request, self.request.device.backend.heeds_barriers
        args, kwargs = request.arguments()

        @cache
        def program_of(tie: bool) -> Program:
            program = with_own_copies(plan.program) if heeds else plan.program
            return controlled(program) if tie else program

        @cache
        def evaluate_of(program: Program) -> Evaluate:
            if program is not plan.program:
                check(variant.problem.graph, program)
            stacked = request.device.backend.places_copies
            return emit(variant.traced, program, apart=heeds and request.shards == 1, stacked=stacked)

        key = program_key(variant, plan)
        tried: list[tuple[_Way, Made]] = []
        refused: Exception | None = None
        for way in order:
            if tried and (once or best or (learned and self._beyond(tried[0][1]))):
                break
            if learned and copies and not way.strict and any(w.strict and self._is_far(m) for w, m in tried):
                break
            if any(w.told is not way.told and m.compiled.memory is None for w, m in tried):
                continue  # a compiler that runs out of memory has spared what it could, and another try takes minutes
            choice, program = self._ways.index(way), program_of(way.controlled)
            if (key, choice) in self._missed:
                tried.append((way, self._missed[key, choice]))
                continue
            if any(
                (w.options, w.told) == (way.options, way.told) and program_of(w.controlled) is program for w, _ in tried
            ):
                continue
            evaluate = evaluate_of(program)
            options = way.options
            if way.told:
                options = within(options, request.device.capacity - plan.predicted.device)
            try:
                compiled = self._compiled(evaluate, args, kwargs, options)
            except jax.errors.JaxRuntimeError as error:
                refused = error
                continue
            made = Made(compiled=compiled, variant=variant, plan=plan, evaluate=evaluate, choice=choice)
            tried.append((way, made))
            if compiled.device <= request.budget:
                break
            self._missed[key, choice] = replace(made, compiled=replace(compiled, jitted=None))
        if refused is not None and not tried:
            raise refused
        self._compared([made for _, made in tried])
        tried.sort(key=lambda t: t[1].compiled.device)
        done = [way for way, _ in tried]
        differ = len({way.controlled for way in done}) > 1
        if not once and not (copies and heeds):
            self._learned[copies] = done[:1] if differ else [*done, *(way for way in order if way not in done)]
        return tried[0][1]

    def nearest(self) -> Made | None:
        """The smallest planned program of those that do not fit, without its executable."""
        known = (m for m in self._missed.values() if m.compiled.memory is not None and not m.misplaced)
        return min(known, key=lambda made: made.compiled.device, default=None)

    def _compared(self, made: list[Made]) -> None:
        """Learn what other ways of a plan save over the first."""
        first, *others = (m.compiled.device for m in made)
        if others and all(m.compiled.memory is not None for m in made):
            self._saved = max(self._saved or 0.0, first / max(min(others), 1) - 1)

    def _beyond(self, made: Made) -> bool:
        """Whether a program exceeds the budget by more than another way may save."""
        if self._saved is None or made.compiled.memory is None:
            return False
        least = RESCHEDULED if len(self.request.device.backend.schedulers) > 1 else LEAST_APART
        return made.compiled.device > (1 + max(APART * self._saved, least)) * self.request.budget

    def _is_far(self, made: Made) -> bool:
        """Whether a program exceeds the budget by more than control dependencies could cost."""
        return made.compiled.memory is not None and made.compiled.device > NARROWLY * self.request.budget


def _unchanged(variant: Variant, solver: str = "none") -> Plan:
    """A plan that changes nothing."""
    program = Program.unchanged(variant.traced.graph)
    return answer(variant.problem, program, live_ranges(program.graph), solver)
