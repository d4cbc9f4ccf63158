"""`kernel_time`: how long kernels take one after the other, what the cache has, and what waits for copies."""

from dataclasses import replace

import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.units import MIB
from jaxtensile.xla.kernel_time import LINK_SHARE, Shares, seconds_of, timed
from jaxtensile.xla.kernels import Copied, Copying, Kernel, Loop, Product
from scheduled_hlo import MODULE

H100 = profile("nvidia-h100-80gb")
EXACT = Shares(launch=0.0, turn=0.0, fill=0.0, traffic=1.0, product=1.0, tile=2.0, cached=0.25, start=0.0, waves=0.0)
BANDWIDTH = H100.reached("memory_bandwidth", 0.85)


def moves(name, kind="loop", written=0, **reads):
    return Kernel(name, kind, reads, written)


def seconds(*schedule, shares=EXACT):
    return seconds_of(schedule, H100, shares).seconds


def test_a_kernel_takes_as_long_as_its_traffic():
    large = 1 << 30
    assert seconds(moves("k", a=large, written=large)) == pytest.approx(2 * large / BANDWIDTH)
    assert seconds(moves("k", "tile", a=large)) == pytest.approx(2 * large / BANDWIDTH)
    fixed = replace(EXACT, launch=1e-6, fill=5e-6)
    assert seconds(moves("k", a=large), shares=fixed) == pytest.approx(6e-6 + large / BANDWIDTH)
    assert seconds(moves("k", a=8), shares=fixed) == pytest.approx(1e-6 + 16 / BANDWIDTH)


def test_what_was_used_last_is_in_the_cache():
    first = moves("first", written=10 * MIB)
    again = moves("again", first=10 * MIB)
    assert seconds(first, again) == pytest.approx(12.5 * MIB / BANDWIDTH)
    assert seconds(first, moves("other", x=25 * MIB), again) == pytest.approx(45 * MIB / BANDWIDTH)
    # What is larger than the cache leaves nothing there.
    assert seconds(moves("a", written=80 * MIB), moves("b", a=80 * MIB)) == pytest.approx(160 * MIB / BANDWIDTH)


def test_a_product_takes_longer_for_sizes_that_fit_badly():
    def product(rows, columns, depth, **shares):
        p = Product(1, rows, columns, depth, False)
        return (
            seconds(Kernel("k", "product", {}, 0, p.flops, (p,)), shares=replace(EXACT, unaligned=2.0, **shares))
            / p.flops
        )

    peak = 1 / H100.reached("matmul_flops_bf16", 0.75)
    assert product(132 * 128, 128, 512) == pytest.approx(peak)
    assert product(132 * 128, 128, 512, start=512.0) == pytest.approx(2 * peak)
    assert product(133 * 128, 128, 512, waves=1.0) == pytest.approx(2 * 132 / 133 * peak)
    assert product(132 * 128, 130 * 128 + 4, 512) == pytest.approx(2 * peak, rel=0.01)


def test_copies_run_beside_kernels_and_what_needs_them_waits():
    rate = H100.reached("link_bandwidth", LINK_SHARE)
    copy = H100.link_latency + (1 << 30) / rate
    work = moves("work", a=1 << 30)
    took = seconds(work)
    out, back = Copying("out", 1 << 30, True), Copying("in", 1 << 30, False)
    assert seconds(out, work) == pytest.approx(took)
    found = seconds_of((out, work, Copied("out")), H100, EXACT)
    assert (found.seconds, found.wait) == pytest.approx((copy, copy - took))
    # Each way has its own time, and on one way copies follow each other.
    assert seconds(out, back, Copied("out"), Copied("in")) == pytest.approx(copy)
    assert seconds(out, Copying("more", 1 << 30, True), Copied("more")) == pytest.approx(2 * copy)


@pytest.mark.parametrize("trips", [1, 3, 100])
def test_a_loop_takes_as_long_as_its_turns(trips):
    body = moves("k", a=1 << 30), moves("l", b=1 << 30)
    shares = replace(EXACT, turn=1e-3)
    assert seconds(Loop(trips, body), shares=shares) == pytest.approx(trips * (1e-3 + seconds(*body)))
    found = seconds_of((Loop(trips, body),), H100, EXACT)
    assert found.kernels == 2 * trips and found.longest[0].times == 2 * trips
    # What is copied in every turn is copied in the last one too.
    copying = Copying("c", 1 << 30, True), Copied("c")
    assert seconds(Loop(trips, copying)) == pytest.approx(trips * seconds(*copying))


def test_the_account_names_what_takes_longest_and_adds_up():
    found = timed(MODULE, H100)
    assert found is not None and found.kernels == 2 + 2 * 7 and 0 < found.seconds < 1e-3
    told = sum(k.seconds for k in found.longest)
    assert told < found.seconds and {k.kind for k in found.longest} == {"product", "loop", "copy"}
    assert timed(MODULE, profile("tpu-v5e")) is None
