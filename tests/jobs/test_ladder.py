"""The plans of one step: predicted without a compile, then compiled, and what is made of both."""

import threading
import time

import pytest

import job_programs as programs
from jaxtensile.api import jit as api
from jaxtensile.api.feedback import without_arrays
from jaxtensile.errors import BudgetError, StoppedError
from jaxtensile.jobs.ladder import RUNGS, Ladder, persistent, together
from jaxtensile.passes.solvers import greedy
from jaxtensile.planner import pipeline
from jaxtensile.planner.plan_cache import PlanCache
from jaxtensile.spmd.location import location
from programs import chain_args
from programs import step as chain_step
from requests_of import opened

pytestmark = pytest.mark.xdist_group("ladder")  # one process: what all of them need is made once


def request_of(rows=programs.ROWS, budget=None):
    args = (programs.start(), programs.X[:rows], programs.Y[:rows])
    planned = api.jit(programs.step, budget=budget, chunk=False, donate_argnums=0)
    traced = planned._plain.trace(*args)
    abstract = planned._placement.dynamic(lambda _, x, __: without_arrays(x), args, {})
    return planned._request(traced, location(traced, args, {}, {}), *abstract)


def sketched(*args, count=RUNGS, **options):
    ladder = Ladder(*args, **options)
    ladder.sketch(count)
    return ladder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A ladder whose plans are all compiled, what it predicted, and where its plans are kept."""
    cache = PlanCache(tmp_path_factory.mktemp("plans"))
    ladder = sketched(request_of(), cache)
    predicted = [(p.persistent, p.temp, p.seconds, p.fitted) for p in ladder.places()]
    ladder.build()
    return ladder, predicted, cache


def test_it_is_predicted_before_anything_is_compiled(built):
    ladder, predicted, _ = built
    assert len(predicted) >= 2
    assert [fitted for *_, fitted in predicted] == [None] * len(predicted)
    levels, seconds = [p + t for p, t, _, _ in predicted], [s for _, _, s, _ in predicted]
    assert levels == sorted(set(levels))
    assert seconds == sorted(set(seconds), reverse=True)
    # What stays is known without a compiler, up to its rounding.
    stays = ladder.places()[0].persistent
    assert all(stays <= p <= stays + 4096 for p, *_ in predicted)


def test_compiled_plans_take_the_predicted_ones_places(built):
    ladder = built[0]
    places = ladder.places()
    assert ladder.compiled == len(places) >= 2
    for place in places:
        use = place.fitted.report.compiled
        assert use.exact
        assert (place.persistent, place.temp) == (persistent(use), use.temp)
        assert place.level == use.device
    assert places[-1].fitted.evaluate is None, "the top is the user's own function"
    assert places[0].fitted.evaluate is not None
    assert places[0].temp < 0.6 * places[-1].temp
    assert ladder.smallest == places[0].level


def test_what_was_compiled_is_used_again(built):
    ladder = built[0]
    for place in ladder.places():
        assert ladder.fitted(place.level) is place.fitted
        assert ladder.fitted(place.level + 1) is place.fitted
        assert ladder.runs(place.level).fitted is place.fitted
    assert ladder.runs(ladder.smallest - 1) is None


def test_below_the_smallest_there_is_no_plan(built):
    ladder = built[0]
    with pytest.raises(BudgetError) as refused:
        ladder.fitted(ladder.smallest // 2)
    assert refused.value.needs > ladder.smallest // 2


def test_a_later_ladder_finds_the_plans_on_disk(built):
    ladder, _, cache = built
    again = Ladder(request_of(), cache)
    again.build()
    assert [p.level for p in again.places()] == [p.level for p in ladder.places()]
    planned = [p for p in again.places() if p.fitted.evaluate is not None]
    assert planned
    assert all(any("earlier process" in note for note in p.fitted.report.notes) for p in planned)


def test_measured_steps_correct_the_predicted_ones(built):
    ladder = built[0]
    low, top = ladder.places()[0], ladder.places()[-1]
    before = {p.level: p.seconds for p in ladder.places()}
    for _ in range(9):
        ladder.took(low.fitted, 10 * before[low.level])
    seconds = {p.level: took for p, took in ladder.timed()}
    assert seconds[low.level] == pytest.approx(10 * before[low.level])
    assert seconds[top.level] == pytest.approx(10 * before[top.level]), "one factor for what was not measured"
    for _ in range(9):
        ladder.took(top.fitted, 2 * before[top.level])
    assert ladder.timed()[-1] == (top, pytest.approx(2 * before[top.level]))
    assert [r.seconds for r in together([ladder])][-1] == pytest.approx(2 * before[top.level])


def test_several_steps_have_one_ladder_together(built):
    ladder, _, cache = built
    half = sketched(request_of(rows=programs.ROWS // 2), cache)
    rungs = together([ladder, half])
    assert [r.level for r in rungs] == sorted({r.level for r in rungs})
    stays = max(ladder.persistent, half.persistent)
    for rung in rungs:
        assert rung.persistent == stays
        for one in (ladder, half):
            assert any(p.temp <= rung.temp for p in one.places()), "every step has a plan on every rung"
    assert together([half])[0].temp < rungs[0].temp


def test_what_somebody_waits_for_is_the_predicted_plan_and_not_the_best(monkeypatch):
    ladder, asked, real = sketched(request_of(rows=programs.ROWS // 2)), [], pipeline.fit
    monkeypatch.setattr(pipeline, "fit", lambda r, *a, **m: (asked.append((r.budget, m["aim"])), real(r, *a, **m))[1])
    low = ladder.places()[0]
    found = ladder.fitted(low.level + 1)
    assert asked == [(low.level, low.aim)]
    assert found.report.compiled.device <= low.level
    assert found.report.rounds == 1, "XLA is asked once"
    assert not ladder.complete


def test_what_a_job_is_admitted_with_is_its_smallest_plan_and_the_largest(built):
    predicted = [(p + t, s) for p, t, s, _ in built[1]]
    found = sketched(request_of(), count=2).places()
    assert [(p.level, p.seconds) for p in found] == [predicted[0], predicted[-1]]


def test_what_was_predicted_is_not_searched_for_again(monkeypatch):
    ladder, real, searched = sketched(request_of(rows=programs.ROWS // 2)), greedy.Searches._search, []
    monkeypatch.setattr(greedy.Searches, "_search", lambda *args: (searched.append(args), real(*args))[1])
    ladder.fitted(ladder.places()[1].level)
    assert not searched


def test_who_is_to_run_in_less_than_is_compiled_gets_the_smallest(monkeypatch):
    """It may be told to shrink further while that is compiled."""
    ladder, asked, real = sketched(request_of(rows=programs.ROWS // 2)), [], pipeline.fit
    ladder.compile(ladder.places()[-1].budget)
    low, between, *_, top = ladder.places()
    assert top.fitted is not None and between.fitted is None
    monkeypatch.setattr(pipeline, "fit", lambda r, *a, **m: (asked.append(r.budget), real(r, *a, **m))[1])
    ladder.fitted(between.level)
    assert asked == [low.level]


def test_a_step_waits_for_no_plan_that_is_compiled_for_later(monkeypatch):
    """That gives way, and begins again."""
    ladder, real = sketched(request_of(rows=programs.ROWS // 2)), pipeline.fit
    begun, gave_way = threading.Event(), []

    def fit(request, solver, watch, **more):
        if threading.current_thread() is builder and not begun.is_set():
            begun.set()
            for _ in range(1000):
                time.sleep(0.01)
                try:
                    watch("compile")
                except StoppedError:
                    gave_way.append(request.budget)
                    raise
        return real(request, solver, watch, **more)

    monkeypatch.setattr(pipeline, "fit", fit)
    builder = threading.Thread(target=ladder.build)
    builder.start()
    assert begun.wait(60)
    ladder.fitted(ladder.places()[0].level)
    builder.join()
    assert gave_way
    assert ladder.complete, "it began again"


def test_a_budget_caps_the_ladder():
    whole = sketched(request_of())
    cap = (whole.places()[0].level + whole.places()[-1].level) // 2
    assert max(p.level for p in sketched(request_of(budget=cap)).places()) <= cap


def test_slow_plans_are_left_out_where_that_is_wanted():
    whole = sketched(request_of()).places()
    fast = sketched(request_of(), most=1.05).places()
    assert 1 <= len(fast) < len(whole)
    assert max(p.seconds for p in fast) <= 1.05 * min(p.seconds for p in whole)


def test_a_rung_says_what_its_copies_take_of_the_link():
    args = chain_args(layers=8, width=512, rows=1 << 14)
    request, _ = opened(chain_step, *args, device="nvidia-v100-16gb", host_budget=1 << 40)
    ladder = sketched(request)
    rungs = together([ladder])
    copied = [p.copied for p in ladder.places()]
    assert any(copied) and not copied[-1]
    assert (
        [r.into for r in rungs] == [r.out for r in rungs] == pytest.approx([n / request.way.bandwidth for n in copied])
    )
    assert all(r.wait <= r.seconds and (r.host > 0) == (r.into > 0) for r in rungs)
