"""What a report says: text that fits a screen, a page that needs nothing, a trace that adds up."""

import html.parser
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtensile
from jaxtensile.ir.plan import MemoryUse, Remat
from jaxtensile.ir.timeline import BARRIER, Sites, Stage, Timeline, Track
from jaxtensile.report.facts import Decision
from jaxtensile.report.report import Report
from jaxtensile.report.text import dropped, groups, short_type
from jaxtensile.units import GIB, MIB

pytestmark = pytest.mark.xdist_group("report")  # one process: what all of them need is made once

SITES = Sites(
    primitives=("mul", "dot_general", "tanh", "sub", "add"),
    sources=("/home/me/model.py:3:1 (layer)",) * 4 + ("<add>",),
    seconds=(1e-3, 2e-3, 0.0, 1e-3, 3e-3),
)
PLAIN = Track(sites=SITES, origin=(0, 1, 2, 3, 4), device=(10, 30, 60, 40, 20), base=5)
PLANNED = Track(
    sites=SITES, origin=(0, 1, 2, BARRIER, 0, 1, 3, BARRIER, 4), device=(10, 25, 40, 30, 30, 35, 40, 15, 20), base=5
)


def use(device, *, exact=True):
    return MemoryUse(argument=MIB, output=MIB, temp=device, alias=2 * MIB, exact=exact)


def decision(kind="recompute", line=3, *, stored=True, primitive="tanh", nbytes=MIB):
    source = f"/home/me/model.py:{line}:7 (layer)"
    return Decision(
        kind=kind, primitive=primitive, dtype="float32", shape=(8, 4), nbytes=nbytes, source=source, stored=stored
    )


def report(**changes):
    given = {
        "name": "train_step",
        "target": "cpu",
        "budget": 3 * GIB,
        "baseline": use(8 * GIB),
        "predicted": use(2 * GIB, exact=False),
        "compiled": use(2 * GIB + 7 * MIB),
        "lower_bound": GIB,
        "actions": (Remat(2, MIB, 2),),
        "decisions": (decision("keep", 1), decision(), decision(line=9, stored=False)),
        "flops": 1e12,
        "recompute_flops": 5e10,
        "overhead": 0.01,
        "overhead_ratio": 0.04,
        "stages": 1,
        "rounds": 2,
        "unknown_primitives": (),
        "solver": "greedy",
        "notes": (),
        "seconds": {"graph": 0.1, "compile plain": 2.0, "solve": 0.4, "compile planned": 5.0},
        "timeline": Timeline(PLAIN, PLANNED),
    }
    return Report(**{**given, **changes})


UNCHANGED = {"actions": (), "decisions": (), "stages": 0, "rounds": 0, "timeline": Timeline(PLAIN, None)}


@pytest.fixture(scope="module")
def real():
    """A plan of a small residual network on this machine's CPU."""

    def loss(ws, x):
        for w in ws:
            x = x + jax.nn.gelu(x @ w)
        return (x * x).sum()

    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 16
    step = jaxtensile.jit(jax.grad(loss), budget="8MiB", target="cpu", chunk=False)
    made = step.plan(ws, jax.ShapeDtypeStruct((1024, 64), jnp.float32))
    assert not made.unchanged
    return made


# ---- text -------------------------------------------------------------------------------------


def test_the_first_line_is_the_outcome():
    assert str(report()).splitlines()[0] == "train_step on cpu fits its budget of 3.00GiB: 2.01GiB, down from 8.00GiB"
    assert "DOES NOT FIT its budget of 1.00GiB" in str(report(budget=GIB)).splitlines()[0]
    fits = report(**UNCHANGED, baseline=use(GIB), compiled=use(GIB))
    assert str(fits).splitlines()[0] == "train_step on cpu fits its budget of 3.00GiB as it is: 1.00GiB"


def test_text_fits_a_screen():
    many = tuple(decision(k, line, primitive=f"op{line}") for k in ("keep", "recompute") for line in range(60))
    text = str(report(decisions=many, notes=("one", "two"), unknown_primitives=("strange", "stranger")))
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 140
    assert lines.count("               55.00MiB   55 more, of 55 kinds") == 2


def test_columns_are_aligned(real):
    head, *rows = str(real).splitlines()[1:5]
    for mark in ("=", "+", "-"):
        assert {row.index(mark) for row in rows} == {head.index(mark)}


def test_like_values_share_a_line_and_sums_hold():
    found = groups([decision(), decision(), decision(line=4, nbytes=7)])
    assert [(g.count, g.nbytes) for g in found] == [(2, 2 * MIB), (1, 7)]
    assert found[0].what == "tanh f32[8,4]"


def test_what_was_never_stored_is_no_dropped_value():
    text = str(report())
    assert ":3 (layer)" in text
    assert ":9 (layer)" not in text


def test_what_is_computed_again_adds_up_to_no_more_than_there_was(real):
    """Values that are there one after the other would, and so would those on the way to others."""
    plain = real.timeline.plain
    again = [d for d in real.decisions if d.kind == "recompute"]
    peak = max(plain.device) - plain.base
    assert 0 < sum(d.nbytes for d in dropped(real)) <= peak < sum(d.nbytes for d in again)


def test_text_names_what_it_does_not_know():
    text = str(report(unknown_primitives=("strange",), notes=("mind this",)))
    assert "without a cost rule of their own: strange" in text
    assert "note: mind this" in text


UNDONE = {
    "undone": True,
    "actions": (),
    "decisions": (decision("keep"),),
    "baseline": use(GIB),
    "recompute_flops": -1.5e11,
    "overhead": -0.04,
    "overhead_ratio": -0.16,
    "stages": 0,
    "notes": ("jax.checkpoint undone: 1 values kept",),
    "timeline": Timeline(PLAIN, replace(PLAIN, device=(10, 30, 70, 40, 20))),
}


def test_a_checkpoint_that_was_undone_is_told_in_every_form():
    """Fewer FLOPs, less time, more bytes than the program as written."""
    made = report(**UNDONE)
    assert not made.unchanged
    text = str(made)
    assert text.splitlines()[0].endswith("2.01GiB, up from 1.00GiB")
    assert "matrix FLOPs x 0.850, predicted step time -16.0 % (-40ms), in 0 stages" in text
    assert "kept" in text and "recomputed" not in text and "note: jax.checkpoint undone" in text
    for page in (made.to_html(), made._repr_html_()):
        assert "-16.0 %" in page and "0.850" in page and "jax.checkpoint undone" in page and "+-" not in page
    data = json.loads(made.to_json())
    assert data["undone"] and data["recompute_flops"] == -1.5e11 and data["overhead"] == -0.04
    assert not json.loads(report().to_json())["undone"]
    assert json.loads(made.to_perfetto())


@pytest.mark.parametrize(
    ("dtype", "short"), [("bfloat16", "bf16"), ("float8_e4m3fn", "f8_e4m3fn"), ("uint32", "u32"), ("bool", "bool")]
)
def test_short_types(dtype, short):
    assert short_type(dtype, (2, 3)) == f"{short}[2,3]"
    assert short_type(dtype, ()) == f"{short}[]"


# ---- timeline ---------------------------------------------------------------------------------


def test_what_waits_on_the_host_is_listed():
    away = report(decisions=(decision("keep", 1), decision("offload", 2, nbytes=3 * MIB)), offload_bytes=3 * MIB)
    away = replace(away, compiled=replace(away.compiled, host=3 * MIB))
    text, page = str(away), away.to_html()
    assert "offloaded     3.00MiB   in 1 value" in text
    assert "3.00MiB to the host and back in a step; XLA holds 3.00MiB there" in text
    assert "In host memory until the backward pass" in page
    assert "offloaded" not in str(report()) and "In host memory" not in report().to_html()


def test_stages_are_the_steps_that_run_again():
    assert PLAIN.stages() == []
    assert PLANNED.stages() == [Stage(3, 6, 2)]  # the second barrier repeats nothing
    assert PLANNED.repeats() == [False, False, False, False, True, True, False, False, False]


def test_seconds_add_up():
    assert PLAIN.starts() == pytest.approx([0, 1e-3, 3e-3, 3e-3, 4e-3, 7e-3])
    assert PLANNED.starts()[-1] == pytest.approx(10e-3)


def test_the_plain_program_stands_still_while_the_planned_one_repeats():
    assert Timeline(PLAIN, PLANNED).aligned() == [10, 30, 60, 60, 60, 60, 40, 40, 20]
    assert Timeline(PLAIN, None).aligned() == list(PLAIN.device)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 40))
def test_no_step_of_other_ops_is_lost_in_the_stretch(device, steps):
    plain = Track(sites=SITES, origin=(0,) * len(device), device=tuple(device), base=0)
    other = Track(sites=replace(SITES), origin=(0,) * steps, device=(0,) * steps, base=0)
    aligned = Timeline(plain, other).aligned()
    assert len(aligned) == steps
    assert max(aligned) == max(device)


def test_a_real_timeline_peaks_at_the_predicted_bytes(real):
    plain, planned = real.timeline.plain, real.timeline.planned
    assert max(planned.device) == planned.device[planned.peak] == real.predicted.device
    assert max(plain.device) > max(planned.device)
    assert planned.starts()[-1] - plain.starts()[-1] == pytest.approx(real.overhead)
    assert len(planned.stages()) <= real.stages
    assert any("test_report.py" in planned.label(i) for i in range(len(planned.device)))


# ---- page -------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Tags and attributes of a page; fails where an element is left open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


CASES = [{}, UNCHANGED, {"budget": GIB}, {"timeline": None}, {"decisions": (), "seconds": {}}, {"flops": 0.0}]


@pytest.mark.parametrize("changes", CASES)
def test_a_page_is_whole_and_needs_nothing(changes, tmp_path):
    made = report(**changes)
    text = made.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == text + "\n"
    for form in (text, made._repr_html_()):
        page = Page(form)
        assert not {"script", "link", "img", "iframe", "object"} & set(page.seen)
        assert not [value for name, value in page.attributes if name in ("src", "href", "onload", "onclick")]
        assert "url(" not in form
        assert "@import" not in form


def test_a_page_escapes_what_came_from_the_program():
    bad = "<script>alert(1)</script>"
    sites = replace(SITES, primitives=(bad,) * 5, sources=(bad,) * 5)
    track = replace(PLAIN, sites=sites)
    text = report(
        name=bad,
        decisions=(replace(decision(), primitive=bad, source=bad),),
        notes=(bad,),
        unknown_primitives=(bad,),
        timeline=Timeline(track, None),
        seconds={bad: 1.0},
    ).to_html()
    assert bad not in text
    assert "&lt;script&gt;" in text


def test_the_chart_draws_both_programs_the_budget_and_what_xla_said(real):
    text = real.to_html()
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    classes = [e.get("class") for e in svg.iter()]
    for name in ("jt-plain", "jt-planned", "jt-line jt-budget-line", "jt-line jt-planned-line", "jt-again"):
        assert name in classes, name
    labels = [e.text for e in svg.iter("text")]
    assert "budget 8.00MiB" in labels
    titles = [e.text for e in svg.iter("title")]
    assert any(t.startswith("stage 1: ") for t in titles)
    assert any("dot_general at " in t and "test_report.py" in t for t in titles)
    for e in svg.iter("path"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", e.get("d"))]
        assert all(0 <= n <= 960 for n in numbers)


def test_labels_do_not_touch():
    same = report(baseline=use(3 * GIB + MIB), compiled=use(3 * GIB - MIB))
    text = same.to_html()
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    places = [float(e.get("y")) for e in svg.iter("text") if "-text" in (e.get("class") or "")]
    assert len(places) == 3
    assert min(b - a for a, b in pairwise(sorted(places))) >= 14


# ---- trace ------------------------------------------------------------------------------------


def test_a_trace_adds_up(tmp_path):
    text = report().to_perfetto(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == text + "\n"
    trace = json.loads(text)
    assert trace["otherData"]["budget"] == 3 * GIB
    for pid, track in ((1, PLAIN), (2, PLANNED)):
        events = [e for e in trace["traceEvents"] if e["pid"] == pid]
        counters = [e for e in events if e["ph"] == "C"]
        assert [e["ts"] for e in counters] == sorted({e["ts"] for e in counters})
        assert max(e["args"]["live"] for e in counters) == max(track.device)
        assert counters[-1]["args"] == {"live": track.base, "budget": 3 * GIB}
        ops = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
        assert sum(e["dur"] for e in ops) == pytest.approx(1e6 * track.starts()[-1])
        for a, b in pairwise(ops):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    stages = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 2]
    assert [(e["name"], e["args"]["ops"]) for e in stages] == [("stage 1", 2)]
    assert [e["name"] for e in trace["traceEvents"] if e.get("cat") == "again"] == ["mul", "dot_general"]


def test_an_unchanged_program_has_one_process():
    trace = json.loads(report(**UNCHANGED).to_perfetto())
    assert {e["pid"] for e in trace["traceEvents"]} == {1}
    assert json.loads(report(timeline=None).to_perfetto())["traceEvents"] == []


# ---- data -------------------------------------------------------------------------------------


def test_json_reads_back(real, tmp_path):
    data = json.loads(real.to_json(tmp_path / "plan.json"))
    assert data == json.loads((tmp_path / "plan.json").read_text()) == real.to_dict()
    assert data["compiled"]["device"] == real.compiled.device <= data["budget"]
    assert data["fits"] is True
    assert {a["kind"] for a in data["actions"]} == {"keep", "recompute"}


# ---- a place, and two reports ------------------------------------------------------------------


def test_why_tells_what_was_decided_at_a_place_and_what_the_other_choice_would_cost(real):
    told = real.why("test_report.py")
    groups_told = [
        line for line in told.splitlines()[1:] if line.startswith(("  kept", "  recomputed", "  on the host"))
    ]
    assert groups_told and " by the model:" in told.splitlines()[0]
    again = sum(d.again for d in real.decisions if d.kind == "recompute" and d.again is not None)
    assert 0 < again <= real.step
    line = next(re.findall(r"test_report.py:(\d+)", d.source)[0] for d in real.decisions if d.source)
    assert f"test_report.py:{line} " in real.why(f"test_report.py:{line}")
    assert "no decision at" in real.why(f"test_report.py:{line[:-1]}")  # not line 41 for 4


def test_why_names_the_places_that_there_are():
    told = report().why("modle.py")
    assert "no decision at modle.py" in told and "model.py:3 (layer)" in told
    assert "recomputed" in report().why("layer") and "kept" in report().why("me/model.py:1")
    assert "as it is written" in report(**UNCHANGED).why("layer")


def test_the_difference_of_two_reports_is_what_grew_and_what_is_treated_otherwise():
    small = report(
        budget=GIB, compiled=use(GIB), decisions=(decision("recompute", 1), decision()), notes=("in 2 parts",)
    )
    told = report().diff(small)
    assert f"{'-1.01GiB':>12}" in told and "only after: in 2 parts" in told
    assert "tanh f32[8,4]  me/model.py:1 (layer): 1.00MiB kept -> 1.00MiB recomputed" in told
    assert "model.py:9 (layer): 1.00MiB recomputed -> as written" in told
    assert "every value is treated alike" in report().diff(report(budget=GIB))


@given(st.lists(st.tuples(st.sampled_from(["keep", "recompute", "offload"]), st.integers(1, 4), st.integers(1, 9))))
def test_a_difference_moves_as_many_bytes_there_as_back(made):
    other = report(decisions=tuple(decision(kind, line, nbytes=size) for kind, line, size in made))
    there, back = (
        sorted(re.findall(r"(?m)^ +([\d.]+\w+B)  ", a.diff(b))) for a, b in ((report(), other), (other, report()))
    )
    assert there == back
