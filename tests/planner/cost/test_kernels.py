"""Seconds of library kernels of cards by name, against published times that were not fitted; rates as JSON."""

import csv
import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.planner.cost.datasheets import TF32
from autoremat.planner.cost.device import (
    SPECIALS,
    Attention,
    AttentionKernel,
    Product,
    Rate,
    Rates,
    Work,
    cpu_device,
    cuda_device,
)
from autoremat.planner.cost.links import Pattern, assumed_interconnect, sent_bytes, steps_of

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


def test_the_arithmetic_of_fused_kernels():
    """Each op of a class has the same price. What repeats few ops takes the time of its memory traffic."""
    rows, found = rows_of("arithmetic"), []
    for row in rows:
        device, elements = cuda_device(row["card"]), int(row["elements"])
        work = Work(specials=SPECIALS[Rate(row["rate"])] * elements * int(row["times"]))
        found.append(max(device.kernel_seconds(0, 6 * elements), device.seconds(work)))
    assert median_error(found, rows) <= 0.2


MEASURED = Rates(1e-5, 2e9, (("float32", 1e9), ("bfloat16", 4e9)))
amounts = st.floats(0.0, 1e12)
works = st.builds(Work, amounts, st.sampled_from(["float32", "bfloat16", "float64", "int8"]), amounts, amounts, st.booleans())


@given(st.sampled_from([cpu_device(2), cpu_device(2).with_rates(MEASURED), cuda_device("H100")]), works, st.floats(1.0, 1e3))
def test_an_op_that_does_more_of_anything_takes_no_less(device, work, factor):
    seconds = device.seconds(work)
    for name in ("flops", "moved_bytes", "specials"):
        assert seconds <= device.seconds(dataclasses.replace(work, **{name: factor * getattr(work, name)}))
    assert seconds <= device.seconds(dataclasses.replace(work, launches=True))


def test_measured_rates_take_the_place_of_those_of_the_data_sheet():
    for device in (cpu_device(2), cuda_device("a card of tomorrow")):
        found = device.with_rates(MEASURED)
        assert (found.launch_seconds, found.saving_seconds_per_byte) == (1e-5, 1e-9)
        rates = [found.of_type(dtype).flops_per_second for dtype in ("float32", "bfloat16", TF32, "int8")]
        assert rates == [1e9, 4e9, 1e9, 1e9]
        assert found.seconds(Work(1e9, "bfloat16", 1e9, launches=True)) == pytest.approx(0.5 + 1e-5)


def test_rates_come_back_from_json_as_they_were():
    assert Rates.from_json(MEASURED.to_json()) == MEASURED


DAMAGES = ({"curves": []}, {"launch_seconds": -1}, {"bytes_per_second": 0}, {"flops_by_type": [["bfloat16", 1.0]]})


@pytest.mark.parametrize("text", ["", "[]", "{}", *(json.dumps(json.loads(MEASURED.to_json()) | one) for one in DAMAGES)])
def test_broken_rates_are_refused(text):
    with pytest.raises((ValueError, TypeError)):
        Rates.from_json(text)
