"""`passes.bfc`: the allocator's rules on sequences small enough to follow, and its invariants on random ones."""

import random
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.passes.pack.bfc import BFC, FIRST_REGION, GRAIN, SPARE, OutOfMemory, rounded
from jaxtensile.units import GIB, MIB

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def test_sizes_are_multiples_of_256():
    assert [rounded(n) for n in (1, 256, 257)] == [256, 256, 512]
    pool = BFC(GIB)
    chunk = pool.allocate(1000)
    assert chunk.size == 1024 and pool.in_use == 1024
    assert pool.allocate(0) is None


def test_a_growing_pool_doubles():
    pool = BFC(GIB)
    taken = []
    for _ in range(4):
        pool.allocate(FIRST_REGION)
        taken.append(pool.pool // MIB)
    assert taken == [2, 6, 6, 14], "regions of 2, 4 and 8 MiB"
    pool.allocate(100 * MIB)
    assert pool.pool // MIB == 14 + 128, "doubled until it is enough, and then taken once"
    pool.allocate(100 * MIB)
    assert pool.pool // MIB == 14 + 128 + 128


def test_a_pool_that_does_not_grow_is_taken_at_once():
    pool = BFC(GIB, grows=False)
    pool.allocate(1)
    assert pool.pool == GIB
    with pytest.raises(OutOfMemory, match="bytes asked, 0 of"):
        pool.allocate(GIB)


def test_the_smallest_chunk_that_fits_is_taken_and_split_only_when_worth_it():
    pool = BFC(GIB, grows=False)
    a, _, b, _ = (pool.allocate(n * MIB) for n in (300, 1, 200, 1))
    pool.free(a)
    pool.free(b)
    c = pool.allocate(150 * MIB)
    assert c is b and c.size == 200 * MIB, "50 MiB to spare are not split off"
    d = pool.allocate(150 * MIB)
    assert d is a and d.size == 150 * MIB, "twice as large as asked: split"
    assert SPARE == 128 * MIB
    pool.free(c)
    small = pool.allocate(60 * MIB)
    assert small.size == 60 * MIB


def test_neighbours_that_are_free_become_one():
    pool = BFC(8 * MIB, grows=False)
    chunks = [pool.allocate(2 * MIB) for _ in range(4)]
    with pytest.raises(OutOfMemory):
        pool.allocate(GRAIN)
    for i in (0, 2, 1):
        pool.free(chunks[i])
    assert pool.allocate(6 * MIB) is chunks[0]


def test_regions_are_never_joined():
    pool = BFC(6 * MIB)
    chunks = [pool.allocate(2 * MIB) for _ in range(3)]
    for c in chunks:
        pool.free(c)
    assert pool.in_use == 0 and pool.pool == 6 * MIB
    with pytest.raises(OutOfMemory):
        pool.allocate(5 * MIB)


@QUICK
@given(st.integers(0, 2**32), st.booleans())
def test_handed_out_chunks_never_overlap_and_nothing_is_lost(seed, grows):
    rng = random.Random(seed)
    pool, held = BFC(64 * MIB, grows=grows), []
    for _ in range(120):
        if held and rng.random() < 0.45:
            pool.free(held.pop(rng.randrange(len(held))))
        else:
            with suppress(OutOfMemory):
                held.append(pool.allocate(int(2 ** rng.uniform(0, 24))))
        spans = sorted((c.start, c.start + c.size) for c in held)
        assert all(b <= c for (_, b), (c, _) in pairwise(spans))
        assert pool.in_use == sum(c.size for c in held) <= pool.peak <= pool.pool <= 64 * MIB
    for c in held:
        pool.free(c)
    assert pool.in_use == 0
    free = sorted(pool._free.values(), key=lambda c: c.start)
    assert sum(c.size for c in free) == pool.pool
    assert all(c.before is None and c.after is None for c in free), "each region is one free chunk again"
