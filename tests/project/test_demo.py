"""The demo's ratios of step times come from quiet rounds, and its table says what they are worth."""

from __future__ import annotations

import random
import sys

import pytest
from folders import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import demo_report  # noqa: E402
from demo_report import Result, Times, Timing  # noqa: E402


def result(seconds: list[float], delays: list[float], title: str = "a setting") -> Result:
    timings = tuple(Timing(one, delay) for one, delay in zip(seconds, delays, strict=True))
    return Result("key", title, None, None, 2**20, 1.0, timings, (1.0,), ((0.0, 0),))


def test_a_slow_stretch_that_all_settings_share_leaves_the_ratios_alone():
    speed = [1.0, 1.0, 3.0, 3.0, 1.0, 2.0]
    still = [0.0] * len(speed)
    times = Times([result(speed, still), result([1.2 * one for one in speed], still)])
    assert times.ratios(times.results[1]) == pytest.approx([1.2] * 3)
    assert times.error(times.results[1]) == pytest.approx(0)
    assert "busy" not in times.caption()


def test_rounds_in_which_threads_waited_do_not_count():
    draw = random.Random(0)
    delays = [0.0 if number % 2 else 5.0 for number in range(12)]
    plain = result([1 + delay * draw.random() for delay in delays], delays)
    other = result([1.3 + delay * draw.random() for delay in delays], delays)
    times = Times([plain, other])
    assert times.rounds == [1, 3, 5, 7, 9, 11]
    assert times.ratios(other) == pytest.approx([1.3] * 6)
    assert times.busy_share == 0


def test_a_busy_machine_is_named_with_the_error_of_the_ratios():
    plain = result([1.0, 2.0, 3.0, 2.0], [0.5, 1.0, 1.5, 1.0])
    other = result([2.0, 2.0, 6.0, 8.0], [0.5, 1.0, 1.5, 1.0])
    times = Times([plain, other])
    assert times.error(other) == pytest.approx(0.5)
    assert "The machine was busy: for " in times.caption()
    assert "may err by 0.50" in times.caption()
    table = demo_report.results_table([plain, other])
    assert table.caption == times.caption()
