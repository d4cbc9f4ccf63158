"""`attempts`: in which ways a plan is compiled, and which programs are not compiled again."""

import jax
import pytest

from jaxtensile import attempts
from jaxtensile.attempts import Attempts, Clock, nothing
from jaxtensile.compile import Compiled
from jaxtensile.device import profile
from jaxtensile.passes.cost import op_costs
from jaxtensile.passes.greedy import prepare
from jaxtensile.passes.ties import tied
from jaxtensile.plan import MemoryUse
from jaxtensile.trace import trace_jaxpr
from jaxtensile.units import GIB
from jaxtensile.variants import written
from programs import chain_args, step
from test_pipeline import job

ARGS = chain_args(layers=8, width=2048, rows=1024)


class Scripted:
    """A compiler for a GPU that says what it is told to: bytes over the budget, or None to refuse."""

    def __init__(self, monkeypatch, budget):
        self.budget, self.answers, self.asked = budget, list[float | None](), 0
        monkeypatch.setattr(attempts, "compile_program", self)

    def __call__(self, make, args, kwargs, options, meanwhile=None):
        self.asked += 1
        answer = self.answers.pop(0)
        if answer is None:
            raise jax.errors.JaxRuntimeError("INTERNAL: no")
        use = MemoryUse(argument=0, output=0, temp=int(answer * self.budget), alias=0, host=1 << 20, exact=True)
        return Compiled(jitted=self.asked, memory=use, options=options, seconds=0.0)


@pytest.fixture(params=[0, GIB], ids=["recomputed", "copied"])
def planned(request, monkeypatch):
    """A plan, without and with bytes on the host, that ties change; its attempts and their compiler."""
    device = profile("nvidia-v100-16gb")
    traced = trace_jaxpr(jax.jit(step).trace(*ARGS).jaxpr)
    asked = job(0, args=ARGS, device=device, host_budget=request.param)
    costs = op_costs(traced.graph, device)
    variant = written(asked, traced, costs, prepare)
    plan = variant.solve(variant.plain.device - variant.plain.temp // 2)
    assert (plan.offload_bytes > 0) == (request.param > 0) and tied(plan.program) is not plan.program
    made = Attempts(job(plan.predicted.device, args=ARGS, device=device, host_budget=request.param), Clock(nothing))
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
