"""`trial_compiles`: in which ways a plan is compiled, and which programs are not compiled again."""

from dataclasses import replace
from math import inf

import jax
import pytest

from jaxtensile import switches
from jaxtensile.clock import Clock, nothing
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.order.control import controlled
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.planner import trial_compiles as compiles
from jaxtensile.planner.trial_compiles import TrialCompiles
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.search.variants import written
from jaxtensile.units import GIB
from jaxtensile.xla.compile import RESERVED, Compiled, Options
from programs import chain_args, step
from requests_of import job

ARGS = chain_args(layers=8, width=2048, rows=1024)


class Scripted:
    """A compiler for a device that says what it is told to: bytes over the budget, inf for more than there are, or None
    to refuse."""

    def __init__(self, monkeypatch, budget):
        self.budget, self.answers, self.asked = budget, list[float | None](), 0
        self.options: list[Options] = []
        self.trials: list[bool] = []
        self.host = 1 << 20
        monkeypatch.setattr(compiles, "compile_program", self)

    def __call__(self, make, args, kwargs, options, meanwhile=None, counts=None, clock=None, trial=()):
        self.asked += 1
        self.options.append(options)
        self.trials.append(bool(trial))
        answer = self.answers.pop(0)
        if answer is None:
            raise jax.errors.JaxRuntimeError("INTERNAL: no")
        jitted = None if trial else self.asked
        if answer == inf:
            return Compiled(jitted=jitted, memory=None, options=options, seconds=0.0, refusal="no memory")
        use = MemoryUse(argument=0, output=0, temp=int(answer * self.budget), alias=0, host=self.host, exact=True)
        return Compiled(jitted=jitted, memory=use, options=options, seconds=0.0)


def half(device, host_budget, **more):
    """A plan that spares half of the temporaries, what it is a plan of, and trial compiles for its bytes."""
    traced = trace_jaxpr(jax.jit(step).trace(*ARGS).jaxpr)
    asked = job(0, args=ARGS, device=device, host_budget=host_budget)
    variant = written(asked, traced, op_costs(traced.graph, device), prepare)
    plan = variant.solve(variant.plain.device - variant.plain.temp // 2)
    again = job(plan.predicted.device, args=ARGS, device=device, host_budget=host_budget, **more)
    return variant, plan, TrialCompiles(again, Clock(nothing), variant.plain.device)


@pytest.fixture(params=[0, GIB], ids=["recomputed", "copied"])
def planned(request, monkeypatch):
    """A plan that control dependencies change, with bytes on the host or without; its trial compiles; its compiler."""
    variant, plan, made = half(profile("nvidia-v100-16gb"), request.param)
    assert (plan.offload_bytes > 0) == (request.param > 0) and controlled(plan.program) is not plan.program
    compiler = Scripted(monkeypatch, plan.predicted.device)

    def ask(*answers, **how):
        compiler.answers, compiler.asked = list(answers), 0
        found = made.planned(variant, plan, **how)
        return compiler.asked, None if found is None else found.compiled.device / plan.predicted.device

    return plan, ask


def test_a_plan_that_fits_is_compiled_once(planned):
    _, ask = planned
    assert ask(0.9) == (1, pytest.approx(0.9, abs=1e-6))


def test_a_narrow_miss_is_compiled_in_the_other_way_and_nothing_twice(planned):
    _, ask = planned
    assert ask(1.04, 1.01) == (2, pytest.approx(1.01, abs=1e-6))
    assert ask() == (0, pytest.approx(1.01, abs=1e-6))


def test_a_far_miss_with_copies_and_ties_is_not_compiled_without_unless_every_way_counts(planned):
    plan, ask = planned
    copies = plan.offload_bytes > 0
    assert ask(1.5, 1.2) == ((1, 1.5) if copies else (2, pytest.approx(1.2, abs=1e-6)))
    assert ask(1.2, learned=False) == (1 if copies else 0, pytest.approx(1.2, abs=1e-6))


def test_once_is_the_first_way_that_compiles(planned):
    _, ask = planned
    assert ask(1.5, once=True) == (1, pytest.approx(1.5, abs=1e-6))


def test_what_is_refused_in_one_way_is_tried_in_the_other(planned):
    _, ask = planned
    assert ask(None, 1.1, once=True) == (2, pytest.approx(1.1, abs=1e-6))


def test_copies_that_are_refused_in_every_way_are_no_plan_and_recomputation_that_is_is_an_error(planned):
    plan, ask = planned
    if plan.offload_bytes:
        assert ask(None, None) == (2, None)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError):
            ask(None, None)


@pytest.mark.parametrize("fast", [False, True], ids=["recomputed", "copied"])
def test_a_compiler_for_tpus_is_told_what_a_plan_needs(fast, monkeypatch):
    """Where bytes wait on the host at once, else where it takes too many."""
    device = replace(profile("tpu-v5e"), link_bandwidth=1e13)
    variant, plan, compiles = half(device, GIB if fast else 0)
    assert (plan.offload_bytes > 0) == fast
    compiler = Scripted(monkeypatch, plan.predicted.device)
    compiler.answers = [0.9] if fast else [1.2, 0.9]
    assert compiles.planned(variant, plan).compiled.device <= plan.predicted.device
    told = device.capacity - plan.predicted.device
    assert [options.get(RESERVED) for options in compiler.options] == ([told] if fast else [None, told])


@pytest.mark.parametrize("fast", [False, True], ids=["recomputed", "copied"])
def test_what_does_not_fit_a_tpu_at_all_is_compiled_once(fast, monkeypatch):
    """XLA:TPU has spared what it could, told or not, and takes minutes."""
    variant, plan, compiles = half(replace(profile("tpu-v5e"), link_bandwidth=1e13), GIB if fast else 0)
    compiler = Scripted(monkeypatch, plan.predicted.device)
    compiler.answers = [inf]
    assert compiles.planned(variant, plan).compiled.memory is None
    assert compiler.asked == 1


def test_more_on_the_host_than_is_allowed_is_no_plan(monkeypatch):
    variant, plan, compiles = half(profile("nvidia-v100-16gb"), GIB)
    compiler = Scripted(monkeypatch, plan.predicted.device)
    for host, misplaced in ((0, True), (1, False), (GIB, False), (GIB + 1, True)):
        compiler.answers, compiler.host = [0.9], host
        assert compiles.planned(variant, plan).misplaced == misplaced


def on_a_cpu(monkeypatch, **more):
    """A plan for a CPU whose compiler is told what to say."""
    variant, plan, compiles = half(profile("cpu"), 0, options={}, **more)
    return variant, plan, compiles, Scripted(monkeypatch, plan.predicted.device)


def test_what_will_run_is_compiled_in_full_and_only_that(monkeypatch):
    variant, plan, compiles, compiler = on_a_cpu(monkeypatch)
    compiler.answers = [1.1, 0.9, 0.95]
    made = compiles.planned(variant, plan)
    assert made.compiled.jitted is None and compiler.trials == [True, True]
    full = compiles.in_full(made)
    assert full.compiled.jitted is not None and compiler.trials == [True, True, False]
    assert full.compiled.options == made.compiled.options and full.compiled.device > made.compiled.device
    assert compiles.in_full(full) is full and compiler.answers == []


@pytest.mark.parametrize("chosen", ["options", "flags", "config", "request", "switch"])
def test_who_chose_how_much_is_optimized_gets_no_trials(chosen, monkeypatch):
    (option,) = profile("cpu").backend.sooner
    more = {"options": {option: 2}} if chosen == "options" else {"in_full": True} if chosen == "request" else {}
    if chosen == "flags":
        monkeypatch.setenv("XLA_FLAGS", f"--{option}=1")
    jax.config.update("jax_disable_most_optimizations", chosen == "config")
    try:
        with switches.off(*["trials"] if chosen == "switch" else []):
            variant, plan, compiles = half(profile("cpu"), 0, **{"options": {}, **more})
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    compiler = Scripted(monkeypatch, plan.predicted.device)
    compiler.answers = [0.9]
    assert compiles.planned(variant, plan).compiled.jitted is not None and compiler.trials == [False]


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_the_program_as_it_is_is_compiled_in_full_where_it_may_fit(share, monkeypatch):
    variant = half(profile("cpu"), 0)[0]
    budget = int(share * variant.plain.device)
    compiles = TrialCompiles(job(budget, args=ARGS, options={}), Clock(nothing), variant.plain.device)
    compiler = Scripted(monkeypatch, budget)
    compiler.answers = [0.9, 0.9]
    assert (compiles.own().jitted is None) == (share < 1)
    assert compiles.own_in_full().jitted is not None and compiles.own().jitted is not None
    assert compiler.trials == ([True, False] if share < 1 else [False])
