"""`passes.verify.groups_check`: every way in which groups can be wrong is seen, and said."""

from dataclasses import replace

import pytest

from graphs import Builder
from jaxtensile.errors import VerifyError
from jaxtensile.ir.groups import Group
from jaxtensile.passes.verify.groups_check import check_groups


def program():
    """Two products between prints, a barrier, and an update of what the caller gave away. Values: w 0, x 1, y 2, held
    3, z 4, new 5. Ops: product 0, print 1, barrier 2, product 3, print 4, update 5."""
    b = Builder()
    w, x = b.input(8, 8), b.input(8, 8)
    y = b.dot(x, w)
    b.op("debug_callback", y, results=[], pinned=True)
    (held,) = b.op("optimization_barrier", y, results=[(8, 8)])
    z = b.dot(held, held)
    b.op("debug_callback", z, results=[], pinned=True)
    return b.graph(b.op("sub", w, z), donated=(w,))


FIRST = Group(ops=(0, 1), inputs=(1, 0), outputs=(2,))
SECOND = Group(ops=(3, 4, 5), inputs=(0, 2), outputs=(5,), donated=1, same=((3, 2),))


def test_what_is_right_passes():
    check_groups(program(), (FIRST, SECOND))
    check_groups(program(), (FIRST, SECOND), 2)
    check_groups(program(), (Group(ops=(0, 1, 2, 3, 4, 5), inputs=(0, 1), outputs=(5,), donated=1),))


WRONG = {
    "2 groups; 1 are allowed": ((FIRST, SECOND), 1),
    "no result": ((FIRST,), None),
    "takes": ((FIRST, replace(SECOND, inputs=(0, 4))), None),
    "takes it twice": ((replace(FIRST, inputs=(1, 0, 0)), SECOND), None),
    "runs op 0 after op 0": ((replace(FIRST, ops=(0, 0, 1)), SECOND), None),
    "runs op 6": ((replace(FIRST, ops=(0, 1, 6)), SECOND), None),
    "reads value 0": ((replace(FIRST, inputs=(1,)), SECOND), None),
    "hands on": ((replace(FIRST, outputs=(2, 4)), SECOND), None),
    "hands it on twice": ((replace(FIRST, outputs=(2, 2)), SECOND), None),
    "effects run as [4]": ((replace(FIRST, ops=(0,)), SECOND), None),
    "effects run as [1]": ((FIRST, replace(SECOND, ops=(3, 5))), None),
    "runs 2 times": ((FIRST, replace(SECOND, ops=(0, 3, 4, 5), inputs=(0, 2, 1))), None),
    "by another name": ((FIRST, replace(SECOND, same=((4, 2), (3, 2)))), None),
    "takes value 1 for 3": ((FIRST, replace(SECOND, inputs=(0, 1), same=((3, 1),))), None),
    "takes value 2 for 3": ((FIRST, replace(SECOND, inputs=(0, 1))), None),
    "writes over -1 inputs": ((FIRST, replace(SECOND, donated=-1)), None),
    "writes over 2 inputs": ((FIRST, replace(SECOND, donated=2)), None),
    "writes over input 1; its caller keeps it": ((replace(FIRST, donated=1), SECOND), None),
    "a later group reads it": ((replace(FIRST, inputs=(0, 1), donated=1), SECOND), None),
}
SAID = {
    "no result": "result 5 is not there",
    "takes": "group 1 takes (0, 4)",
    "takes it twice": "group 0 takes (1, 0, 0)",
    "hands on": "group 0 hands on (2, 4)",
    "hands it on twice": "group 0 hands on (2, 2)",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    groups, most = WRONG[name]
    with pytest.raises(VerifyError) as info:
        check_groups(program(), groups, most)
    assert SAID.get(name, name) in str(info.value)


def test_types_and_results_are_not_written_over():
    b = Builder()
    w, x = b.input(8, 8), b.input(8, 4)
    y = b.dot(w, x)
    small = b.graph(y, donated=(w,))
    check_groups(small, (Group(ops=(0,), inputs=(w, x), outputs=(y,)),))
    with pytest.raises(VerifyError, match="both have one type"):
        check_groups(small, (Group(ops=(0,), inputs=(w, x), outputs=(y,), donated=1),))
    b = Builder()
    w, x = b.input(8, 8), b.input(8, 8)
    y = b.dot(w, x)
    both = b.graph(y, w, donated=(w,))
    with pytest.raises(VerifyError, match="it is a result"):
        check_groups(both, (Group(ops=(0,), inputs=(w, x), outputs=(y,), donated=1),))
