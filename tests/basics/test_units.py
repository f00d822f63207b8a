import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.basics.units import bytes_apart, format_bytes, format_seconds, parse_bytes

UNITS = ["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5GiB", 3 * 2**29),
        (".5 KiB", 512),
        ("3 kIb", 3072),
        ("1.9B", 1),
        ("  6  gib\n", 6 * 2**30),
        ("9007199254740993B", 2**53 + 1),
        ("0.1GB", 100_000_000),
        ("6 g", 6 * 2**30),
        ("6Gi", 6 * 2**30),
        ("1.5T", 3 * 2**39),
    ],
)
def test_parse_bytes_accepts(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "6", "GiB", "6 GiB free", "-6GiB", "1,5GB", "1_000B", "1e3MB", "6.GB", "nanGB", "\u0666GiB", "6GiB6GiB", 6, b"6GiB"],
)
def test_parse_bytes_refuses_nonsense_and_shows_it(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0B", "0 GiB", "0.0MB", "0.9B", "0.0001KB"])
def test_parse_bytes_refuses_less_than_one_byte(text):
    with pytest.raises(ValueError, match="less than one byte"):
        parse_bytes(text)


@given(st.integers(1, 10**30), st.sampled_from(UNITS), st.sampled_from(["", " "]), st.sampled_from([str.lower, str.upper]))
def test_parse_bytes_is_exact_in_every_unit(count, unit, space, change_case):
    base = 1024 if "i" in unit else 1000
    expected = count * base ** ("BKMGT".index(unit[0]))
    assert parse_bytes(f"{count}{space}{change_case(unit)}") == expected


@given(st.integers(1, 10**15))
def test_bytes_survive_a_round_trip_to_the_digits_shown(count):
    shown = parse_bytes(format_bytes(count))
    assert abs(shown - count) <= 0.005 * count


@given(st.integers(-(10**18), 10**18))
def test_format_bytes_never_shows_1024_of_a_unit(count):
    number, unit = format_bytes(count).split()
    assert unit == "TiB" or abs(float(number)) < 1024


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1000 * 1024, "1000.00 KiB"),  # units are powers of 1024, so a unit has four digits before the point at times
        (1048570, "1023.99 KiB"),
        (1048571, "1.00 MiB"),  # 1023.9951 KiB, which would round to 1024.00 KiB
        (5000 * 2**40, "5000.00 TiB"),
        (-(3 * 2**29), "-1.50 GiB"),
    ],
)
def test_format_bytes(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0.00 s"), (5e-8, "0.05 us"), (999.999e-6, "1.00 ms"), (125.0, "125.00 s"), (-0.0015, "-1.50 ms")],
)
def test_format_seconds(seconds, expected):
    assert format_seconds(seconds) == expected


def test_bytes_that_look_alike_are_told_in_full():
    assert bytes_apart(2**20, 2**20 + 24) == ("1.00 MiB (1048576 bytes)", "1.00 MiB (1048600 bytes)")
    assert bytes_apart(2**20, 2**20) == ("1.00 MiB", "1.00 MiB")
    assert bytes_apart(2**20, 2**21) == ("1.00 MiB", "2.00 MiB")
