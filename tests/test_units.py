"""Sizes read back as they were written; texts that are no size are refused with a way out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.units import GIB, KIB, MIB, TIB, format_bytes, format_rate, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("12884901888", 12884901888),
        ("12GiB", 12 * GIB),
        ("12 gib", 12 * GIB),
        (" 12GB ", 12_000_000_000),
        ("1.5MiB", MIB + MIB // 2),
        (".5KiB", KIB // 2),
        ("1_000B", 1000),
        ("2e9", 2_000_000_000),
        ("1TiB", TIB),
        ("3tb", 3_000_000_000_000),
        (7, 7),
        (7.9, 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@given(st.integers(0, 1 << 50))
def test_rounded_up_it_is_enough(size):
    assert size <= parse_bytes(format_bytes(size, up=True)) <= size + size // 50 + 1


def test_percent_is_a_share_of_the_capacity():
    assert parse_bytes("80%", capacity=10 * GIB) == 8 * GIB
    assert parse_bytes("100 %", capacity=77) == 77
    with pytest.raises(ValueError, match="capacity is unknown"):
        parse_bytes("80%")
    with pytest.raises(ValueError, match="more than the whole device"):
        parse_bytes("101%", capacity=GIB)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "12 parsecs", "twelve", "1,5GiB", "12GiB!", "--3", "nanGiB", "12Gi", "0x10", "1 2", "\u0663.\u0663x"],
)
def test_no_size(text):
    with pytest.raises(ValueError, match=r"cannot read|unknown unit"):
        parse_bytes(text)


@pytest.mark.parametrize("size", ["-1", "-2GiB", -1, -0.5, math.inf, math.nan, "1e999", True, False])
def test_no_size_is_negative_endless_or_a_flag(size):
    with pytest.raises(ValueError, match="not"):
        parse_bytes(size)


@given(st.integers(0, 2**53))
def test_an_integer_is_itself_as_number_and_as_text(size):
    assert parse_bytes(size) == size
    assert parse_bytes(str(size)) == size
    assert parse_bytes(f"{size} B") == size


@given(st.integers(0, 2**20), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]))
def test_a_whole_number_of_a_unit_is_exact(count, unit):
    base, powers = (KIB, "KMGT") if "i" in unit else (1000, "KMGT")
    assert parse_bytes(f"{count}{unit}") == count * base ** (powers.index(unit[0]) + 1)


@given(st.integers(0, 2**60))
def test_what_is_printed_reads_back_within_its_last_digit(size):
    text = format_bytes(size)
    number = text.rstrip("KMGTiB")
    unit = parse_bytes(f"1{text.removeprefix(number)}")
    assert abs(parse_bytes(text) - size) <= 0.005 * unit + 1
    assert number.startswith(("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"))


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text):
    try:
        assert parse_bytes(text, capacity=GIB) >= 0
    except ValueError as error:
        assert len(str(error)) > 20


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (KIB, "1.00KiB"),
        (13_448_000_000, "12.52GiB"),
        (-3 * MIB, "-3.00MiB"),
        (TIB, "1.00TiB"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (12.0, "12s"),
        (0.0123, "12.3ms"),
        (4.5e-6, "4.5us"),
        (2e-9, "2ns"),
        (-0.5, "-500ms"),
        (0.00099999, "1ms"),
        (4321.0, "4321s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(1e-9, 1e5))
def test_printed_seconds_are_within_three_digits(seconds):
    text = format_seconds(seconds)
    unit = next(u for u in ("ms", "us", "ns", "s") if text.endswith(u))
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(text.removesuffix(unit)) * factor == pytest.approx(seconds, rel=5.1e-3)
    assert "e" not in text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (7.9e14, "790 TFLOP/s"),
        (4.8e12, "4.80 TFLOP/s"),
        (999.4e9, "999 GFLOP/s"),
        (999.6e9, "1.00 TFLOP/s"),
        (2.25e15, "2.25 PFLOP/s"),
        (12.34e6, "12.3 MFLOP/s"),
        (5.0, "5 FLOP/s"),
        (0.0, "0 FLOP/s"),
    ],
)
def test_rates(rate, text):
    assert format_rate(rate, "FLOP/s") == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (2.5, 2.5),
        (3, 3.0),
        ("10s", 10.0),
        ("10", 10.0),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("2 min", 120.0),
        ("1h", 3600.0),
    ],
)
def test_times_are_read(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "10 s s", "5%", "10S", -1, "-1s", float("nan"), float("inf"), True])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="time"):
        parse_seconds(text)
