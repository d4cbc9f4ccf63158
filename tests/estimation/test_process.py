"""`process`: what calls allocate, and the pool they need."""

import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.estimation.process import CONTEXT, Traffic, parts, pool_of, run, total, traffic
from jaxtensile.ir.ir import Graph, Value
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.pack.bfc import BFC, OutOfMemory
from jaxtensile.units import MIB

H200 = profile("nvidia-h200")


def graph(shapes, inputs, outputs, donated=()):
    values = tuple(Value(id=i, nbytes=4 * n, shape=(n,), dtype="float32") for i, n in enumerate(shapes))
    return Graph(values=values, ops=(), inputs=tuple(inputs), outputs=tuple(outputs), donated=frozenset(donated))


def test_results_reuse_donated_arguments_and_replace_others():
    # arguments: 10 donated, 10, 20; results: 10, 10, 20, 5
    found = traffic(graph([10, 10, 20, 10, 10, 20, 5], [0, 1, 2], [3, 4, 5, 6], [0]), 64)
    assert found == Traffic((40, 40, 80), 64, (40, 80, 20), (1, 2, -1))


def test_calls_need_both_states_where_nothing_is_donated():
    donated = Traffic((100 * MIB,), 50 * MIB, (), ())
    kept = Traffic((100 * MIB,), 50 * MIB, (100 * MIB,), (0,))
    # From a pool of 150 the state would get all: 50 are less than 128 to spare, and 150 less than twice as large.
    handed, pool = pool_of(donated)
    assert handed == 150 * MIB and 200 * MIB <= pool <= 201 * MIB
    handed, pool = pool_of(kept)
    assert handed == 250 * MIB <= pool


def test_a_pool_is_as_large_as_it_must_be():
    calls = Traffic((3 * MIB, 1000, 1), 700 * MIB + 1, (5 * MIB, 77 * MIB, 4), (0, -1, -1))
    handed, pool = pool_of(calls)
    run(BFC(pool, grows=False), calls)
    with pytest.raises(OutOfMemory):
        run(BFC(handed - 256, grows=False), calls)
    assert handed <= pool <= 1.3 * handed


def test_parts_add_up_and_say_how_they_were_found():
    g = graph([1000, 1000], [0], [1], [0])
    use = MemoryUse(argument=4000, output=4000, temp=10 * MIB, alias=4000)
    found = parts(use, g, H200)
    assert [p.name for p in found] == ["program", "rounding", "fragmentation", "context"]
    assert total(found) == 4096 + 10 * MIB + CONTEXT
    assert all(p.how for p in found) and found[0].nbytes == use.device
    assert parts(use, g, profile("cpu")) == parts(use, g, profile("tpu-v5e")) == found[:1]
