"""The page: what is compiled when, what flows back, and how it ends when nothing fits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile import switches
from jaxtensile.devices.backends import CPU
from jaxtensile.devices.profiles import WEIGHTS, profile
from jaxtensile.ir.plan import CompiledTime, MemoryUse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.lowerbound import Bound
from jaxtensile.passes.solvers.greedy import prepare as greedy
from jaxtensile.planner import contest, recall, rounds, series, trial_compiles
from jaxtensile.planner.pipeline import fit
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.undo import undo
from jaxtensile.search import modelled
from jaxtensile.units import GIB
from programs import FAST, chain_args, close, step
from requests_of import ARGS, job

COMPILE = trial_compiles.compile_program
WAYS = len(CPU.schedulers)


@pytest.fixture(autouse=True)
def rules_of_an_h200():
    """One search of a program: which rules it is made by is for ``test_by_rules``."""
    with switches.off("own_rules"):
        yield


@pytest.fixture(autouse=True)
def nothing_remembered():
    recall.forget()


def predicted():
    return live_ranges(trace_jaxpr(jax.jit(step).trace(*ARGS).jaxpr).graph)


def tight(share=0.8):
    live = predicted()
    return live.device - int((1 - share) * live.temp)


class Compiler:
    """``compile_program`` with a counter, whose number for planned programs is the model's and some more.

    ``add``: how many bytes, or that for the first, second, ... of them; ``took``: what a step of each takes.
    """

    def __init__(self, monkeypatch, add=0, refuse=0, took=None):
        self.add, self.refuse, self.took = add, refuse, took
        self.options, self.given = [], []
        monkeypatch.setattr(trial_compiles, "compile_program", self)
        self.solved = []

    def prepare(self, problem):
        solve = greedy(problem)

        def solving(budget, **least):
            plan = solve(budget, **least)
            self.solved.append((budget, plan))
            return plan

        return solving

    def __call__(self, make, args, kwargs, options, *rest):
        made = COMPILE(make, args, kwargs, options, *rest)
        self.options.append(dict(options))
        if not self.solved:
            return made
        if self.refuse:
            self.refuse -= 1
            return replace(made, memory=None, refusal="RESOURCE_EXHAUSTED: too much")
        use = self.solved[-1][1].predicted
        add = self.add(len(self.given) + 1) if callable(self.add) else self.add
        self.given.append(use.device + add)
        time = self.took and CompiledTime(self.took[len(self.given) - 1], 0.0, 1)
        return replace(made, memory=replace(use, temp=use.temp + add, exact=True), time=time)


def test_where_a_trial_promises_too_little_the_program_is_planned_anew_without_any(monkeypatch):
    trials = []

    def compiling(make, args, kwargs, options, *rest):
        made, trial = COMPILE(make, args, kwargs, options, *rest), bool(rest[-1])
        trials.append(trial)
        return made if trial else replace(made, memory=replace(made.memory, temp=int(1.2 * made.memory.temp)))

    monkeypatch.setattr(trial_compiles, "compile_program", compiling)
    fitted = fit(job(tight(0.7), options={}))
    assert fitted.report.fits and not fitted.report.unchanged and fitted.jitted is not None
    full = trials.index(False)
    assert full > 0 and len(trials) > full + 1 and not any(trials[full:])


def test_what_fits_is_compiled_once_and_left_alone(monkeypatch):
    compiler, steps = Compiler(monkeypatch), []
    fitted = fit(job(GIB), compiler.prepare, steps.append)
    assert fitted.evaluate is None and fitted.report.unchanged and fitted.report.fits
    assert fitted.report.baseline == fitted.report.compiled and fitted.report.rounds == 0
    assert steps == ["graph", "compile plain"] and set(fitted.report.seconds) == set(steps)
    assert compiler.solved == [] and compiler.options == [FAST]


def test_what_surely_does_not_fit_is_not_compiled_as_it_is(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 1.0)
    compiler, steps = Compiler(monkeypatch), []
    report = fit(job(tight()), compiler.prepare, steps.append).report
    assert "compile plain" not in steps and not report.baseline.exact
    report = fit(job(tight()), compiler.prepare, steps.append, baseline=True).report
    assert "compile plain" in steps and report.baseline.exact


def test_the_first_plan_that_holds_is_taken(monkeypatch):
    """Where it leaves little of the budget, or a plan that uses more saves little."""
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(rounds, "UNSURE", 1.0)
    compiler, steps = Compiler(monkeypatch), []
    fitted = fit(job(tight()), compiler.prepare, steps.append)
    report = fitted.report
    assert report.rounds == 1 and report.fits and not report.unchanged
    assert report.compiled.device == compiler.given[0] <= report.budget
    told = [s for s in steps if s in ("solve", "check", "compile planned")]
    assert told[:3] == ["solve", "check", "compile planned"] and {*told[3:]} == {"solve"}, "more bytes are asked about"
    assert report.recompute_flops > 0 and report.overhead > 0 and report.stages > 0
    jax.tree.map(close, fitted.jitted(*ARGS), jax.jit(step, compiler_options=FAST)(*ARGS))


def test_what_a_plan_leaves_of_the_budget_is_used_once(monkeypatch):
    """XLA needs less than the model says: the next plan has less work, and is taken if it holds."""
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(rounds, "UNSURE", 1.0)
    careful = fit(job(tight()), Compiler(monkeypatch, -predicted().temp // 8).prepare).report
    monkeypatch.setattr(rounds, "UNSURE", 0.0)
    monkeypatch.setattr(rounds, "REPAID", 0.0)
    compiler = Compiler(monkeypatch, -predicted().temp // 8)
    report = fit(job(tight()), compiler.prepare).report
    assert (careful.rounds, report.rounds) == (1, 2) and careful.budget == report.budget
    assert careful.compiled.device < report.compiled.device <= report.budget
    assert report.overhead < careful.overhead
    keen = Compiler(monkeypatch, lambda n: -predicted().temp // 8 if n == 1 else predicted().temp // 8)
    again = fit(job(tight()), keen.prepare).report
    assert again.compiled == careful.compiled and again.rounds == 2, "what does not hold is not taken"


@pytest.mark.parametrize("objective", ["flops", "time"])
def test_less_work_that_takes_longer_is_no_better_where_steps_are_compared(objective, monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(rounds, "UNSURE", 0.0)
    monkeypatch.setattr(rounds, "REPAID", 0.0)
    device = replace(profile("cpu"), traffic_weight=WEIGHTS[objective])

    def compiled(*took):
        asked, less = job(tight(), device=device), -predicted().temp // 8
        return fit(asked, Compiler(monkeypatch, less, took=took).prepare).report

    quicker, slower = compiled(2.0, 1.0, 1.0, 1.0), compiled(1.0, 2.0, 2.0, 2.0)
    assert quicker.rounds > 1 and quicker.kernels.seconds == 1.0
    assert slower.rounds > 1 and slower.kernels.seconds == (1.0 if objective == "time" else 2.0)


def test_what_xla_adds_is_taken_off_the_next_aim(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    add = predicted().temp // 12
    compiler = Compiler(monkeypatch, add)
    report = fit(job(tight(0.9)), compiler.prepare).report
    aims = list(dict.fromkeys(budget for budget, _ in compiler.solved))
    assert 1 < report.rounds <= len(compiler.given) <= report.rounds * len(compiler.options) and report.fits
    assert aims == sorted(aims, reverse=True)
    assert aims[0] == report.budget and aims[-1] <= report.budget - add
    assert min(compiler.given) == report.compiled.device


class Uneven(Compiler):
    """Plans of more than ``limit`` predicted bytes need a quarter of the plain temporaries more than predicted."""

    def __init__(self, monkeypatch, limit):
        super().__init__(monkeypatch)
        self.limit = limit

    def __call__(self, *args):
        over = bool(self.solved) and self.solved[-1][1].predicted.device > self.limit
        self.add = predicted().temp // 4 if over else 0
        return super().__call__(*args)


def test_between_a_miss_and_a_fit_with_bytes_to_spare_less_is_recomputed(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(rounds, "REPAID", 0.0)
    found = {}
    for lifts in (0, 2):
        monkeypatch.setattr(rounds, "LIFTS", lifts)
        compiler = Uneven(monkeypatch, limit=tight(0.85))
        found[lifts] = fit(job(tight(0.95)), compiler.prepare).report
    assert all(report.fits for report in found.values())
    assert found[0].rounds < found[2].rounds <= found[0].rounds + 2
    assert found[0].compiled.device < found[2].compiled.device
    assert found[2].overhead < found[0].overhead


def test_between_parts_that_missed_and_parts_that_fit_the_fewest_are_found(monkeypatch):
    """The model is far too low for few parts alone: what it is wrong by there says nothing of others."""

    def examples(w, xs):
        return jnp.sum(jax.vmap(lambda x: jnp.tanh(jnp.outer(x, x) @ w) ** 2)(xs), 0)

    args = jnp.ones((16, 16)), jnp.ones((64, 16))
    least = 8

    def wrong(made, variant):
        few = 1 < variant.parts < least
        return replace(made.memory, temp=made.memory.temp + (1 << 20 if few else 0))

    tried = []

    class Wrong(trial_compiles.TrialCompiles):
        def _planned(self, variant, plan, *args):
            made = super()._planned(variant, plan, *args)
            tried.append(variant.parts)
            return replace(made, compiled=replace(made.compiled, memory=wrong(made.compiled, variant)))

    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(rounds, "REPAID", 0.0)
    monkeypatch.setattr("jaxtensile.planner.page.TrialCompiles", Wrong)
    plain = live_ranges(trace_jaxpr(jax.jit(examples).trace(*args).jaxpr).graph)
    report = fit(job(plain.device - plain.temp // 2, examples, args, chunk=True), greedy).report
    assert report.fits and tried[0] < least < max(tried), tried
    assert f"in {least} parts" in report.notes[0], (tried, report.notes)


def test_parts_are_compared_with_the_recomputation_that_fits(monkeypatch):
    """Not with what the model took to fit: here XLA needs a fifth of the temporaries more for plans without parts."""

    def layers(w, x):
        for _ in range(6):
            x = x @ w
            x = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1)
            x = jax.nn.leaky_relu(x)
        return jnp.mean(x**2)

    fun, args = jax.value_and_grad(layers), (jnp.ones((64, 64)), jnp.ones((512, 64)))
    live = live_ranges(trace_jaxpr(jax.jit(fun).trace(*args).jaxpr).graph)

    class Wrong(trial_compiles.TrialCompiles):
        def _planned(self, variant, plan, *args):
            made = super()._planned(variant, plan, *args)
            use = plan.predicted
            more = live.temp // 5 if variant.parts == 1 else 0
            return replace(made, compiled=replace(made.compiled, memory=replace(use, temp=use.temp + more, exact=True)))

    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr("jaxtensile.planner.page.TrialCompiles", Wrong)
    budget = live.device - int(0.35 * live.temp)
    alone, auto = (fit(job(budget, fun, args, chunk=chunk), greedy).report for chunk in (False, "auto"))
    assert alone.fits and auto.fits and auto.parts > 1 == alone.parts
    assert auto.recompute_flops == 0 < alone.recompute_flops


def test_rows_of_a_loop_are_worked_on_in_parts_by_default():
    """Updates in a scan: the rows of each are split inside of its body."""

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def updates(w, xs):
        return jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), None), w, xs)[0]

    args = jnp.ones((16, 16)) / 8, jnp.linspace(0, 1, 2 * 4096 * 16).reshape(2, 4096, 16)
    plain = jax.jit(updates).lower(*args).compile().memory_analysis().temp_size_in_bytes
    fixed = live_ranges(trace_jaxpr(jax.jit(updates).trace(*args).jaxpr).graph)
    budget = fixed.argument + fixed.output + plain // 3
    with pytest.raises(jaxtensile.BudgetError):
        fit(job(budget, updates, args, chunk=False))
    found = fit(job(budget, updates, args, chunk="auto"))
    assert found.report.fits and found.report.parts == 1
    assert any("inside of its loops and branches rows are worked on in" in note for note in found.report.notes)
    close(found.jitted(*args), updates(*args))
    assert not any("found no rows" in note for note in fit(job(budget, updates, args, chunk=True)).report.notes)


def test_an_error_gives_bytes_where_the_budget_and_what_is_needed_read_alike():
    def one(x):
        return jnp.sort(x) * 2

    x = jnp.ones(1 << 20)
    with pytest.raises(jaxtensile.BudgetError) as least:
        fit(job(1 << 20, one, (x,)))
    with pytest.raises(
        jaxtensile.BudgetError, match=r"budget [\d,]+ bytes is below the smallest .*[\d,]+ bytes, for"
    ) as info:
        fit(job(least.value.needs - 8, one, (x,)))
    assert info.value.needs == least.value.needs


def test_a_miss_that_nothing_makes_up_for_ends(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    compiler = Compiler(monkeypatch, add=100 * predicted().temp)
    with pytest.raises(jaxtensile.BudgetError) as info:
        fit(job(tight()), compiler.prepare)
    assert len({budget for budget, _ in compiler.solved}) <= series.ROUNDS
    assert info.value.needs > info.value.has == tight()
    assert "smallest found" in str(info.value) and "step" in str(info.value)
    assert info.value.culprits


def test_below_what_can_be_reached_no_plan_is_compiled_twice(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(modelled, "lower_bound", lambda *_, **__: Bound(nbytes=0, ops=()))
    compiler = Compiler(monkeypatch)
    with pytest.raises(jaxtensile.BudgetError) as info:
        fit(job(predicted().argument + 100), compiler.prepare)
    assert min(compiler.given) == info.value.needs
    asked = [(*options.items(), needs) for options, needs in zip(compiler.options, compiler.given, strict=True)]
    assert len(asked) == len(set(asked))


def test_far_below_what_can_be_reached_one_plan_is_compiled_and_nothing_for_the_report(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    budget = predicted().argument + 100
    monkeypatch.setattr(modelled, "lower_bound", lambda *_, **__: Bound(nbytes=budget, ops=()))
    compiler, steps = Compiler(monkeypatch), []
    with pytest.raises(jaxtensile.BudgetError, match=r"smallest (reachable|found)") as info:
        fit(job(budget), compiler.prepare, steps.append, baseline=True)
    assert compiler.given == WAYS * [info.value.needs] and "compile plain" not in steps
    report = fit(job(info.value.needs), compiler.prepare, steps.append, baseline=True).report
    assert report.fits and report.baseline.exact, "what the error names is met, and then there is a baseline"


def test_a_model_that_is_far_off_leaves_nothing_untried(monkeypatch):
    """By the model nothing comes near the budget; what is compiled does, and so what else there is is tried."""
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(modelled, "lower_bound", lambda *_, **__: Bound(nbytes=0, ops=()))
    with pytest.raises(jaxtensile.BudgetError) as info:
        fit(job(predicted().argument + 100), Compiler(monkeypatch).prepare)
    least = info.value.needs
    compiler = Compiler(monkeypatch, add=-int(0.6 * least))
    report = fit(job(int(0.41 * least)), compiler.prepare).report
    assert report.fits and report.predicted.device > rounds.HOPELESS * report.budget


def test_the_error_names_the_smallest_program_that_was_compiled(monkeypatch):
    """Also where XLA needs more for plans with less, so that it is none of the last."""
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    compiler = Compiler(monkeypatch, add=lambda k: k * predicted().temp)
    with pytest.raises(jaxtensile.BudgetError) as info:
        fit(job(tight()), compiler.prepare)
    assert len(compiler.given) > 1 and info.value.needs == min(compiler.given) < compiler.given[-1]
    compiler.add = lambda _: predicted().temp
    assert fit(job(info.value.needs), compiler.prepare).report.fits, "it is what is asked for"


def test_between_a_dear_plan_that_fits_and_one_that_missed_others_are_compiled(monkeypatch):
    """Although by the bytes of both nothing was to be had: XLA's are not on a line."""
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr(rounds, "REPAID", 0.0)
    monkeypatch.setattr(rounds, "SPARE", 1.0)
    monkeypatch.setattr(rounds, "MUCH", 0.0)
    over = predicted().temp
    costs = {}
    for off in ([], ["halfway"]):
        compiler = Compiler(monkeypatch, add=lambda k: over if k <= 2 else 0)  # in both ways
        with switches.off(*off):
            report = fit(job(tight(0.9)), compiler.prepare).report
        assert report.fits
        costs[not off] = report.overhead
    assert 0 < costs[True] < costs[False]


def test_a_compiler_that_refuses_is_asked_for_less(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    compiler = Compiler(monkeypatch, refuse=1)
    report = fit(job(tight(0.9)), compiler.prepare).report
    assert report.fits and report.rounds <= 2
    compiler = Compiler(monkeypatch, refuse=100)
    with pytest.raises(jaxtensile.BudgetError) as info:
        fit(job(tight()), compiler.prepare)
    assert info.value.needs > info.value.has


def test_below_the_arguments_and_below_the_bound_the_smallest_plan_alone_is_compiled(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    for budget, words in ((1000, "the arguments alone"), (predicted().argument + 40, "no plan can need less")):
        compiler = Compiler(monkeypatch)
        with pytest.raises(jaxtensile.BudgetError, match=words) as info:
            fit(job(budget), compiler.prepare)
        assert info.value.has == budget < info.value.needs
        assert compiler.given == WAYS * [info.value.needs]


def test_an_error_names_what_was_forbidden_and_might_help():
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)

    def loss(ws, x):
        for w in ws:
            x = x + block(x, w)
        return jnp.sum(x**2)

    args = [jnp.ones((8, 8))] * 4, jnp.ones((64, 8))
    for options, said in (({"chunk": False, "undo": False}, True), ({}, False)):
        with pytest.raises(jaxtensile.BudgetError) as info:
            jaxtensile.jit(jax.grad(loss), budget=1500, **options).plan(*args)
        assert all((way in str(info.value)) is said for way in ("in parts (chunk=", "be undone (undo=True)"))


def test_what_an_error_names_is_met_at_once_and_so_is_whatever_is_above_it(monkeypatch):
    """The program that was found is compiled again, once; a search that finds none is made up for by it."""
    compiler = Compiler(monkeypatch)
    with pytest.raises(jaxtensile.BudgetError) as info:
        fit(job(predicted().argument + 100), compiler.prepare)
    needs, before = info.value.needs, len(compiler.options)
    report = fit(job(needs), compiler.prepare).report
    assert report.compiled.device == needs and len(compiler.options) == before + 1
    for where, search in ((contest, "closest"), (rounds.Rounds, "planned")):
        monkeypatch.setattr(where, search, lambda *_, **__: (None, 0))
    report = fit(job(needs + 64), compiler.prepare).report
    assert report.fits and report.compiled.device == needs


def test_a_plan_that_is_wrong_is_not_compiled(monkeypatch):
    """The checker does not trust the solver: a schedule whose outputs are other values is refused."""
    compiler = Compiler(monkeypatch)

    def lying(problem):
        def solve(budget, **least):
            plan = greedy(problem)(budget, **least)
            graph = plan.program.graph
            assert len(set(graph.outputs)) > 1
            swapped = replace(graph, outputs=(graph.outputs[1], graph.outputs[0], *graph.outputs[2:]))
            return replace(plan, program=replace(plan.program, graph=swapped))

        return solve

    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    with pytest.raises(jaxtensile.VerifyError, match="its outputs are versions of"):
        fit(job(tight()), lying)
    assert compiler.options == []


def test_a_solver_that_does_nothing_is_no_plan(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)

    def idle(problem):
        plan = greedy(problem)(1 << 60)
        assert plan.changes_nothing
        return lambda budget, **_: plan

    with pytest.raises(jaxtensile.BudgetError):
        fit(job(tight()), idle)


def test_the_same_job_has_the_same_plan(monkeypatch):
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    plans = [fit(job(tight())).report for _ in range(2)]
    assert plans[0].actions == plans[1].actions and plans[0].compiled == plans[1].compiled


def test_stacks_of_a_scan_are_recomputed():
    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(jnp.sin(x @ w) * x), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()

    args = jnp.stack([jnp.eye(8) / 2] * 32), jnp.ones((256, 8))
    gradient = jax.grad(loss)
    plain = fit(job(GIB, gradient, args)).report.compiled
    fitted = fit(job(plain.device - plain.temp // 4, gradient, args))
    assert fitted.report.fits and not fitted.report.unchanged and fitted.report.recompute_flops >= 0
    expected = jax.jit(gradient, compiler_options=FAST)(*args)
    np.testing.assert_allclose(fitted.jitted(*args), expected, rtol=1e-6, atol=1e-6 * float(abs(expected).max()))


def test_the_report_says_what_was_measured():
    plain = fit(job(GIB)).report.compiled
    report = fit(job(plain.device - plain.temp // 5), baseline=True).report
    assert report.baseline == plain and report.baseline.exact and report.compiled.exact and not report.predicted.exact
    assert report.lower_bound <= report.compiled.device <= report.budget < report.baseline.device
    assert report.name == "step" and report.target == "cpu" and report.solver != "none"
    assert report.seconds["compile plain"] > 0 and report.seconds["compile planned"] > 0
    assert {d.kind for d in report.decisions} <= {"keep", "recompute", "offload"}
    assert all("programs.py" in d.source for d in report.decisions)


def test_memory_use_is_what_must_fit():
    assert MemoryUse(argument=1, output=2, temp=4, alias=1).device == 6


# ---- the user's own checkpoints -----------------------------------------------------------------


@jax.checkpoint
def two_layers(x, v, w):
    return jnp.tanh(jnp.tanh(x @ v) @ w)


def careful(weights, x):
    """``step`` that recomputes every second layer from the one before it."""

    def loss(weights):
        y = x
        for v, w in zip(weights[::2], weights[1::2], strict=True):
            y = two_layers(y, v, w)
        return (y * y).sum()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def predictions():
    """Of ``careful``, and of it without its checkpoints: device bytes and FLOPs."""
    traced = trace_jaxpr(jax.jit(careful).trace(*ARGS).jaxpr)
    undone = undo(traced)
    assert undone is not None
    return [(live_ranges(t.graph).device, t.graph.flops) for t in (traced, undone.traced)]


def test_checkpoints_are_undone_where_there_is_room(monkeypatch):
    compiler, steps = Compiler(monkeypatch), []
    fitted = fit(job(GIB, careful), compiler.prepare, steps.append)
    (_, flops), (_, least) = predictions()
    report = fitted.report
    assert steps == ["graph", "costs", "costs", "compile undone"] and compiler.options == [FAST]
    assert report.undone and not report.unchanged and report.fits and fitted.evaluate is not None
    assert report.flops == flops and report.recompute_flops == least - flops < 0 and report.overhead < 0
    assert not report.baseline.exact and report.rounds == 0
    assert fit(job(GIB, careful), compiler.prepare, baseline=True).report.baseline.exact
    jax.tree.map(np.testing.assert_array_equal, fitted.jitted(*ARGS), jax.jit(careful, compiler_options=FAST)(*ARGS))


def test_checkpoints_are_honoured_on_request(monkeypatch):
    compiler, steps = Compiler(monkeypatch), []
    report = fit(job(GIB, careful, undo=False), compiler.prepare, steps.append).report
    assert steps == ["graph", "compile plain"] and report.unchanged and not report.undone
    assert report.recompute_flops == 0


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_only_what_the_budget_needs_is_recomputed(monkeypatch, share):
    """Between the bytes of the program as written and those without checkpoints."""
    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    (low, flops), (high, least) = predictions()
    assert low < high and least < flops
    compiler = Compiler(monkeypatch)
    report = fit(job(low + int(share * (high - low)), careful), compiler.prepare).report
    assert report.undone and report.fits and report.rounds <= 2
    assert least < report.flops + report.recompute_flops < flops


def test_where_nothing_without_checkpoints_holds_it_is_as_before(monkeypatch):
    """XLA finds more than the model in all but the user's own function; compiles stay few."""
    real, made = trial_compiles.compile_program, []

    def compiling(make, args, kwargs, options, *rest):
        given = []
        found = real(make, args, kwargs, options, *rest)
        given.append(found)
        made.append(found)
        if found.jitted.__name__ == "run":
            return replace(found, memory=replace(found.memory, temp=100 * found.memory.temp))
        return found

    monkeypatch.setattr(trial_compiles, "compile_program", compiling)
    (low, _), (high, _) = predictions()
    exact = jax.jit(careful, compiler_options=FAST).lower(*ARGS).compile().memory_analysis()
    budget = exact.argument_size_in_bytes + exact.output_size_in_bytes + exact.temp_size_in_bytes
    fitted = fit(job(max(budget, low), careful))
    assert fitted.evaluate is None and fitted.report.unchanged and not fitted.report.undone
    assert len(made) <= 2 + 2 * series.ROUNDS
    with pytest.raises(jaxtensile.BudgetError):
        fit(job(low // 2, careful))
    assert high > low


def test_where_the_model_decides_alone_only_the_shorter_way_is_compiled(monkeypatch):
    """Work in parts that fits and is much shorter needs no plan without parts beside it."""
    tried = []

    class Telling(trial_compiles.TrialCompiles):
        def _planned(self, variant, *args):
            tried.append(variant.parts)
            return super()._planned(variant, *args)

    monkeypatch.setattr(modelled, "SURELY_OVER", 0.0)
    monkeypatch.setattr("jaxtensile.planner.page.TrialCompiles", Telling)
    args = chain_args(layers=6, width=256, rows=4096)
    plain = live_ranges(trace_jaxpr(jax.jit(step).trace(*args).jaxpr).graph)
    report = fit(job(plain.device - int(0.3 * plain.temp), step, args, chunk="auto"), greedy).report
    assert report.fits and min(tried) > 1, tried
    assert "parts" in report.notes[0]
