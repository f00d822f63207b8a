"""Seconds of library kernels of cards by name, against published times that were not fitted; rates as JSON."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.planner.cost.device import cpu_device, cuda_device
from autoremat.planner.cost.links import Pattern, assumed_interconnect, sent_bytes, steps_of
from autoremat.planner.cost.rates import (
    FLOP_RATES,
    Attention,
    AttentionKernel,
    Curve,
    Product,
    Rate,
    Rates,
    Task,
    Work,
    curve_name,
)

TIMES = Path(__file__).resolve().parents[2] / "data" / "kernel_times"
FITTED = {"A100", "H100", "B200", "B300", "L40S", "RTX PRO 6000"}
"""Cards whose even rows were fitted; of B300, attention alone."""


def rows_of(name: str) -> list[dict[str, str]]:
    with (TIMES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def held_out(name: str) -> list[dict[str, str]]:
    """The rows of a file that were not fitted."""
    return [row for number, row in enumerate(rows_of(name)) if number % 2 or row["card"] not in FITTED]


def product(row: dict[str, str]) -> tuple[Product, int, int]:
    m, n, k = (int(row[side]) for side in "mnk")
    return Product(m, n, k), 2 * m * n * k, 2 * (m * k + k * n + m * n)


def median_error(predicted: list[float], rows: list[dict[str, str]]) -> float:
    return statistics.median(abs(p / float(r["microseconds"]) * 1e6 - 1) for p, r in zip(predicted, rows, strict=True))


@pytest.mark.parametrize(("least", "most", "error"), [(0, 1e9, 0.15), (1e9, 1e11, 0.11), (1e11, 1e20, 0.08)])
def test_products_of_shapes_and_cards_that_were_not_fitted(least, most, error):
    rows = [row for row in held_out("products") if least <= product(row)[1] < most]
    found, launchless = [], []
    for row in rows:
        shape, flops, moved = product(row)
        device = cuda_device(row["card"]).of_type("bfloat16")
        found.append(device.kernel_seconds(flops, moved, (shape,)))
        launchless.append(max(flops / device.flops_per_second, moved / device.bytes_per_second))
    assert median_error(found, rows) <= error < median_error(launchless, rows)


def test_float8_products_of_shapes_and_cards_that_were_not_fitted():
    rows, found, of_16_bits = [row for row in held_out("products_float8") if product(row)[1] >= 1e11], [], []
    for row in rows:
        shape, flops, moved = product(row)
        moved -= shape.inner * (shape.rows + shape.columns)
        for dtype, seconds in (("float8_e4m3fn", found), ("bfloat16", of_16_bits)):
            seconds.append(cuda_device(row["card"]).of_type(dtype).kernel_seconds(flops, moved, (shape,)))
    assert median_error(found, rows) <= 0.1 < 0.5 < median_error(of_16_bits, rows)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.02), ("tf32", 0.03), ("float8_e4m3fn", 0.2)])
def test_types_beside_bfloat16(dtype, error):
    """Without the RTX 5090, whose float8 products are faster than its data sheet says."""
    rows = [row for row in rows_of("products_by_type") if row["type"] == dtype and row["card"] != "RTX 5090"]
    ratios = []
    for row in rows:
        side, card = int(row["side"]), cuda_device(row["card"])
        mine, half = (
            card.of_type(one).kernel_seconds(2 * side**3, 0, (Product(side, side, side),)) for one in (dtype, "bfloat16")
        )
        ratios.append(mine / half * float(row["bfloat16_microseconds"]) / float(row["microseconds"]))
    assert statistics.median(abs(ratio - 1) for ratio in ratios) <= error


@pytest.mark.parametrize("file", ["attention", "attention_cudnn"])
def test_attention_of_shapes_and_cards(file):
    """Those that were not fitted; of cuDNN no others are published."""
    by_cudnn = file == "attention_cudnn"
    rows, found = rows_of(file) if by_cudnn else held_out(file), []
    for row in rows:
        batch, tokens, heads, width = (int(row[name]) for name in ("batch", "tokens", "heads", "width"))
        backward, elements = row.get("backward") == "1", batch * heads * tokens * width
        kernel = {"kernel": AttentionKernel.CUDNN} if by_cudnn else {}
        shape = Attention(width, tokens, row["causal"] == "1", backward, **kernel)
        device = cuda_device(row["card"]).of_type("bfloat16")
        found.append(device.kernel_seconds((10 if backward else 4) * elements * tokens, 8 * elements, shape))
    assert median_error(found, rows) <= 0.1


def test_collectives_by_nvlink_of_cards_that_were_not_fitted():
    rows = [row for row in held_out("collectives") if row["card"] in ("H200", "B300", "GB200", "GB300")]
    found = []
    for row in rows:
        ranks, pattern = int(row["ranks"]), Pattern.REDUCE if row["collective"] == "all_reduce" else Pattern.GATHER
        link = assumed_interconnect(row["card"], ranks)
        found.append(link.seconds(sent_bytes(pattern, int(row["bytes"]), ranks), steps_of(pattern, ranks)))
    assert median_error(found, rows) <= 0.1


def test_the_backward_older_kernels_and_the_lack_of_a_mask_take_longer():
    device, flops = cuda_device("H100").of_type("bfloat16"), 10**12
    seconds = device.kernel_seconds(flops, 0, Attention(128, 4096, causal=True))
    for other in (
        Attention(128, 4096, causal=False),
        Attention(128, 4096, causal=True, backward=True),
        Attention(128, 4096, causal=True, kernel=AttentionKernel.AMPERE),
        Attention(64, 4096, causal=True),
        Attention(128, 512, causal=True),
    ):
        assert device.kernel_seconds(flops, 0, other) > 1.1 * seconds


def test_a_cpu_has_the_seconds_of_its_roofline():
    cpu, shapes = cpu_device(4), (Product(512, 512, 512),)
    for flops, moved in ((2 * 512**3, 3 * 512**2), (512, 512**2)):
        tasks = Task(Rate.MATMUL, flops), Task(Rate.STREAM, moved)
        longest = max(flops / cpu.flops_per_second, moved / cpu.bytes_per_second)
        assert cpu.seconds(Work(tasks, True, shapes)) == longest


def test_the_arithmetic_of_fused_kernels():
    """Each op of a class has the same price. What repeats few ops takes the time of its memory traffic."""
    rows, found = rows_of("arithmetic"), []
    for row in rows:
        device, elements = cuda_device(row["card"]), int(row["elements"])
        work = Work((Task(Rate(row["rate"]), elements, count=int(row["times"])),))
        found.append(max(device.kernel_seconds(0, 6 * elements), device.seconds(work)))
    assert median_error(found, rows) <= 0.2


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


DAMAGES = ({"device": None, "curves": []}, {"launch_seconds": -1}, {"curves": {"matmul.float32": [[1, 2, 3]]}},
           {"curves": {"stream": [[1, 0]]}})  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{}", *(json.dumps(json.loads(flat().to_json()) | damage) for damage in DAMAGES)])
def test_broken_rates_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  # whatever is wrong, callers measure again
        Rates.from_json(text)
