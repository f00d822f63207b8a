"""The table of devices: names are found as vendors and torch spell them."""

from __future__ import annotations

import pytest

from autoremat.planner.cost import DATASHEETS, cuda_device, device_memory
from autoremat.planner.cost.devices import UNKNOWN_GPU, datasheet, efficiencies


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100-80GB", "H100"),
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("A100-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144G"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("mi325x", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_names(name, key):
    assert datasheet(name) == DATASHEETS[key]


def test_memory_is_the_names_or_the_sheets():
    assert device_memory("V100-16GB") == 16 * 10**9
    assert device_memory("V100") == 32 * 10**9
    assert device_memory("A100 40 GB") == 40 * 10**9
    assert device_memory("Abacus") is None
    assert device_memory("NVIDIA GH200 480GB") == 96 * 10**9  # the CPU beside it has the 480
    assert device_memory("NVIDIA H100 NVL") == 94 * 10**9
    assert device_memory("AMD Instinct MI300X") == 192 * 10**9


@pytest.mark.parametrize(
    "name",
    [
        "H1000", "NVIDIA T400 4GB", "RTX A1000", "RTX 40900", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER", "Quadro RTX 6000",
    ],
)  # fmt: skip
def test_another_number_is_another_card(name):
    assert datasheet(name) is None


def test_an_unknown_card_has_middling_rates():
    assert cuda_device("Abacus").of_type("float16").flops_per_second == UNKNOWN_GPU.half_flops * efficiencies("Abacus").product


@pytest.mark.parametrize("name", [*DATASHEETS, "Abacus"])
def test_float32_is_never_faster_than_what_it_is_rounded_to(name):
    half, tf32, single = (cuda_device(name).of_type(dtype).flops_per_second for dtype in ("float16", "tf32", "float32"))
    assert half > tf32 >= single


@pytest.mark.parametrize(
    ("name", "dtype", "same_as"),
    [
        ("V100", "bfloat16", "float32"),  # its tensor cores know float16 alone
        ("A100", "bfloat16", "float16"),
        ("A100", "float8_e4m3fn", "float32"),
        ("H100", "float64", "float32"),
    ],
)
def test_types_that_tensor_cores_do_not_know_have_another_rate(name, dtype, same_as):
    card = cuda_device(name)
    assert card.of_type(dtype).flops_per_second == card.of_type(same_as).flops_per_second


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [
        ("MI300X", "bfloat16", 668e12),
        ("MI325X", "bfloat16", 785e12),
        ("MI355X", "bfloat16", 1565e12),
        ("MI300X", "float8_e4m3fnuz", 1273e12),
        ("MI325X", "float8_e4m3fnuz", 1519e12),
    ],
)
def test_cards_of_amd_have_the_published_rates_of_large_products(name, dtype, published):
    assert cuda_device(name).of_type(dtype).flops_per_second == pytest.approx(published, rel=0.08)


def test_float8_products_are_faster_than_16_bits_where_there_are_any():
    rates = [cuda_device("L4").of_type(dtype).flops_per_second for dtype in ("float8_e5m2", "bfloat16")]
    assert 1.5 < rates[0] / rates[1] <= 2
