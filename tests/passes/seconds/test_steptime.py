"""How long a planned step takes at other rates: what it rests on by hand, and that time leads back to the rate."""

import pytest

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Link, Program
from jaxtensile.passes.offload.loops import copying
from jaxtensile.passes.seconds.steptime import LoopCopies, StepTime

LINK = Link(bandwidth=1e6, latency=0.0)


def there_and_back(after):
    """``a = exp(x)`` goes to the host while ``after`` products run, and is read by the last op: 1 MB each way."""
    values = [Value(id=ValueId(i), nbytes=1_000_000, shape=(250_000,), dtype="float32") for i in range(after + 6)]
    values[2] = Value(id=ValueId(2), nbytes=1_000_000, shape=(250_000,), dtype="float32", space="host")
    ops, origin = [], []

    def put(primitive, operands, results, came_from):
        ops.append(
            Op(
                id=OpId(len(ops)),
                primitive=primitive,
                operands=tuple(map(ValueId, operands)),
                results=tuple(map(ValueId, results)),
            )
        )
        origin.append(came_from)

    put("dot_general", [0], [1], 0)
    put(TO_HOST, [1], [2], -1)
    last = 0
    for k in range(after):
        put("dot_general", [last], [4 + k], 1 + k)
        last = 4 + k
    put(TO_DEVICE, [2], [3], -1)
    put("dot_general", [3, last], [after + 4], after + 1)
    graph = Graph(
        values=tuple(values), ops=tuple(ops), inputs=(ValueId(0),), outputs=(ValueId(after + 4),), donated=frozenset()
    )
    return Program(graph, tuple(origin), tuple(range(len(values))))


def step(after, seconds=1.0):
    each = (seconds,) * (after + 2)
    return StepTime(work=sum(each), link=LINK, program=there_and_back(after), seconds=each)


def test_work_alone_grows_with_the_factor():
    time = StepTime(work=3.0)
    assert not time.copies and (time.at(), time.at(2.5), time.at(2.5, LINK)) == (3.0, 7.5, 7.5)
    assert time.slower(1.5) == time.slower(1.5, LINK) == 0.5
    assert StepTime(work=0.0).slower(1.0) is None


def test_copies_hide_behind_work_that_is_long_enough():
    """Out and back take two seconds, behind three products, and the way back is asked for when they are done."""
    time = step(3)
    assert time.copies and time.at() == 5.0 + 1.0  # only the way back is waited for
    assert time.at(10.0) == 50.0 + 1.0
    assert time.at(0.1) == pytest.approx(0.1 + 2.0 + 0.1)  # both ways are, behind the first op and in front of the last
    assert time.at(1.0, Link(bandwidth=1e9, latency=0.0)) == pytest.approx(5.001)


def test_a_loop_waits_for_what_its_iterations_do_not_hide():
    loop = LoopCopies(trips=10, count=2, nbytes=1_000_000, forward=0.5)
    link = Link(bandwidth=1e6, latency=0.25)
    time = StepTime(work=7.0, link=link, loops=(loop,))
    assert time.at() == 7.0 + copying(10, 1.5, 0.5) == 7.0 + 10 * (1.0 + 1.5)
    assert time.at(4.0) == 28.0 + 10 * 1.5


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 3.0, 250.0])
@pytest.mark.parametrize("link", [None, Link(bandwidth=3e5, latency=0.1), Link(bandwidth=1e8, latency=0.0)])
def test_the_time_leads_back_to_the_factor(factor, link):
    loop = LoopCopies(trips=4, count=1, nbytes=300_000, forward=0.2)
    straight = step(5)
    time = StepTime(
        work=straight.work + 2.0, link=LINK, program=straight.program, seconds=straight.seconds, loops=(loop,)
    )
    found = time.slower(time.at(factor, link), link)
    assert found is not None and time.at(found, link) == pytest.approx(time.at(factor, link), rel=1e-3)


def test_copies_that_alone_take_longer_say_nothing_about_work():
    assert step(3).slower(1.5) is None
    assert step(3).slower(1.5, Link(bandwidth=1e7, latency=0.0)) is not None
