"""Rates: from work to seconds, by arithmetic alone; JSON there and back."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.planner.cost import CostSource, Curve, Pricing, Rate, Rates, Task, Work, curve_name
from autoremat.planner.cost.rates import FLOP_RATES

positive = st.floats(1e-9, 1e12)
curves = st.lists(st.tuples(st.floats(1.0, 1e12), st.floats(1e-9, 10.0)), min_size=1, max_size=5).map(Curve.through)


@st.composite
def rates(draw: st.DrawFn) -> Rates:
    found = {curve_name(rate): draw(curves) for rate in Rate}
    extra = draw(st.sampled_from([(), ("bfloat16",), ("bfloat16", "float16")]))
    found |= {curve_name(rate, dtype): draw(curves) for rate in sorted(FLOP_RATES) for dtype in extra}
    return Rates("cpu", draw(st.floats(0.0, 1e-4)), found)


tasks = st.builds(
    Task, st.sampled_from(list(Rate)), positive, st.sampled_from(["float32", "bfloat16", "float16", "float64", "int8"]),
    st.floats(0.01, 100.0),
)  # fmt: skip
works = st.builds(Work, st.lists(tasks, min_size=1, max_size=3).map(tuple), st.booleans())


def flat(rate: float = 1e9) -> Rates:
    """Every task at ``rate`` a second, a launch of a microsecond."""
    return Rates("cpu", 1e-6, {curve_name(r): Curve(((1.0, 1 / rate),)) for r in Rate})


def test_an_op_takes_as_long_as_its_slowest_task_and_a_launch():
    work = Work((Task(Rate.MATMUL, 2e9), Task(Rate.STREAM, 1e9)))
    assert flat().seconds(work) == pytest.approx(2.0)
    assert flat().seconds(dataclasses.replace(work, launches=True)) == pytest.approx(2.0 + 1e-6)
    assert flat().saving_seconds_per_byte == pytest.approx(2e-9)


def test_a_curve_goes_through_its_points_and_is_proportional_beyond_them():
    curve = Curve(((10.0, 1.0), (1000.0, 4.0)))
    assert [curve.seconds(x) for x in (1.0, 10.0, 100.0, 1000.0, 2000.0)] == pytest.approx([0.1, 1.0, 2.0, 4.0, 8.0])
    assert curve.seconds(0.0) == 0.0


def test_where_more_work_took_less_time_the_longer_time_counts():
    assert Curve.through([(3.0, 1.0), (1.0, 2.0), (1.0, 1.5), (9.0, 5.0)]).points == ((1.0, 2.0), (3.0, 2.0), (9.0, 5.0))


@pytest.mark.parametrize(
    "points", [(), ((1.0, 0.0),), ((0.0, 1.0),), ((1.0, math.nan),), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)),
               ((1.0, 1e300),), ((10**400, 1.0),)],
)  # fmt: skip
def test_curves_that_are_none_are_refused(points):
    with pytest.raises(ValueError, match="curve"):
        Curve(points)


@given(curves, positive, positive)
def test_more_work_never_takes_less_time_and_some_work_always_takes_some(curve, one, other):
    less, more = sorted((one, other))
    assert 0.0 < curve.seconds(less) <= curve.seconds(more) * (1 + 1e-12)


@given(rates(), works, st.floats(1.0, 1e3))
def test_an_op_that_does_more_of_anything_takes_no_less(rates, work, factor):
    more = dataclasses.replace(work, tasks=tuple(dataclasses.replace(t, amount=t.amount * factor) for t in work.tasks))
    assert 0.0 < rates.seconds(work) <= rates.seconds(more) * (1 + 1e-12)
    assert rates.seconds(work) <= rates.seconds(dataclasses.replace(work, launches=True))


@given(rates())
def test_rates_come_back_from_json_as_they_were(rates):
    assert Rates.from_json(rates.to_json()) == rates
    assert Rates.from_json(rates.to_json()).digest == rates.digest


def test_a_type_that_was_not_measured_is_priced_by_a_similar_one():
    curves = dict(flat().curves) | {curve_name(Rate.MATMUL, "bfloat16"): Curve(((1.0, 1e-10),))}
    rates = Rates("cpu", 0.0, curves)

    def seconds(dtype: str, rate: Rate = Rate.MATMUL) -> float:
        return rates.seconds(Work((Task(rate, 1e9, dtype),)))

    assert seconds("float16") == seconds("bfloat16") == pytest.approx(0.1)
    assert seconds("int8") == seconds("float32") == pytest.approx(1.0)
    assert seconds("float64") == pytest.approx(2.0)
    assert seconds("bfloat16", Rate.ATTENTION) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"device": None, "curves": []},
        {"launch_seconds": -1},
        {"curves": {"matmul.float32": [[1, 2, 3]]}},
        {"curves": {"stream": [[1, 0]]}},
    ],
)
def test_broken_rates_are_refused(damage):
    text = json.dumps(json.loads(flat().to_json()) | damage)
    with pytest.raises(ValueError):  # noqa: PT011  # whatever is wrong, callers measure again
        Rates.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_text_that_is_no_rates_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        Rates.from_json(text)


def test_shares_of_a_step_add_up():
    pricing = Pricing.of("calibrated", [(3.0, CostSource.CALIBRATED), (0.5, CostSource.CALIBRATED), (0.5, CostSource.ASSUMED)])
    assert pricing == Pricing("calibrated", 0.875, 0.125)
    assert Pricing.of("roofline", []) == Pricing("roofline", 0.0, 1.0)
