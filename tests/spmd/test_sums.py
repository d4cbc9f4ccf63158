"""Sums over devices that are made in one go: which, and where."""

import math

import pytest

from jaxtensile.ir.ir import Graph
from jaxtensile.ir.text import format_graph, parse_graph
from jaxtensile.spmd.sums import together

TWO_GRADIENTS = """
graph(%0:f32[8], %1:f32[8])
  %2:f32[8] = neg(%0)
  %3:f32[8] = all_reduce(%2)
  %4:f32[8] = sub(%0, %3)
  %5:f32[8] = exp(%1)
  %6:f32[8] = all_reduce(%5)
  %7:f32[8] = sub(%1, %6)
return %4, %7
"""
ONE_AFTER_THE_OTHER = """
graph(%0:f32[8])
  %1:f32[8] = all_reduce(%0)
  %2:f32[8] = exp(%1)
  %3:f32[8] = all_reduce(%2)
return %3
"""


def merged(text, sums, limit=math.inf):
    graph = parse_graph(text.strip())
    ops, before = together(graph.ops, graph.values, sums, limit)
    again = Graph(values=graph.values, ops=tuple(ops), inputs=graph.inputs, outputs=graph.outputs)
    return [line.strip() for line in format_graph(again).splitlines()], before


def test_gradients_wait_for_each_other_and_updates_for_all():
    lines, before = merged(TWO_GRADIENTS, {1: "x", 4: "x"})
    assert lines[1:-1] == [
        "%2:f32[8] = neg(%0)",
        "%5:f32[8] = exp(%1)",
        "%3:f32[8], %6:f32[8] = all_reduce(%2, %5)",
        "%4:f32[8] = sub(%0, %3)",
        "%7:f32[8] = sub(%1, %6)",
    ]
    assert before == [0, 3, 4, 2, 5]


@pytest.mark.parametrize(
    ("text", "sums", "limit"),
    [
        (TWO_GRADIENTS, {1: "x", 4: "y"}, math.inf),
        (TWO_GRADIENTS, {1: "x", 4: "x"}, 63),
        (TWO_GRADIENTS, {}, math.inf),
        (ONE_AFTER_THE_OTHER, {0: "x", 2: "x"}, math.inf),
        (TWO_GRADIENTS.replace("%5:f32", "%5:bf16"), {1: "x", 4: "x"}, math.inf),
    ],
    ids=["other axes", "too many bytes", "no sums", "one needs the other", "other types"],
)
def test_others_stay_where_they_are(text, sums, limit):
    lines, before = merged(text, sums, limit)
    assert lines == [line.strip() for line in format_graph(parse_graph(text.strip())).splitlines()]
    assert before == [*range(len(before))]
