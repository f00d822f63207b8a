"""The table of devices: names are found as vendors and torch spell them."""

from __future__ import annotations

import pytest

from autoremat.planner.cost import DATASHEETS, cuda_device, device_memory
from autoremat.planner.cost.devices import UNKNOWN_GPU, datasheet, efficiencies
from autoremat.planner.cost.efficiencies import MIDDLING


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100-80GB", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"),
        ("NVIDIA A800 40GB Active", "A800 40GB"),
        ("NVIDIA H20-3e", "H20 3e"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("Tesla V100S-PCIE-32GB", "V100S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("mi325x", "MI325X"),
    ],
)
def test_names(name, key):
    assert datasheet(name) == DATASHEETS[key]


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [
        ("V100", 31.74),
        ("NVIDIA A100-SXM4-80GB", 79.15),
        ("NVIDIA H100 80GB HBM3", 79.19),
        ("NVIDIA GH200 144G HBM3e", 142.5),
        ("NVIDIA B200", 178.35),
        ("AMD Instinct MI300X", 191.69),
        ("NVIDIA GeForce RTX 4090", 23.52),
        ("Tesla T4", 14.75),
    ],
)
def test_memory_is_at_most_what_torch_reports_and_hardly_less(name, gibibytes):
    """Capacities are those of torch's messages about lack of memory in public issues."""
    found = device_memory(name)
    assert found is not None
    assert 0.975 < found / 2**30 / gibibytes <= 1


def test_memory_beside_a_card_is_not_its_own():
    assert device_memory("NVIDIA GH200 480GB") == device_memory("GH200")  # the CPU has the 480
    assert device_memory("A100-40G") == device_memory("A100 40GiB") == device_memory("A100-SXM4-40GB")
    assert device_memory("Abacus") is None


@pytest.mark.parametrize(
    "name",
    [
        "H1000", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "RTX 4080SUPER",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    ],
)  # fmt: skip
def test_another_number_is_another_card(name):
    assert datasheet(name) is None


def test_an_unknown_card_has_middling_rates():
    assert efficiencies("Abacus") == MIDDLING
    assert cuda_device("Abacus").of_type("float16").flops_per_second == UNKNOWN_GPU.half_flops * MIDDLING.product


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
        ("H100", "float64", "float32"),  # its tensor cores multiply float64 at this rate
    ],
)
def test_types_that_tensor_cores_do_not_know_have_another_rate(name, dtype, same_as):
    card = cuda_device(name)
    assert card.of_type(dtype).flops_per_second == card.of_type(same_as).flops_per_second


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [("MI300X", "bfloat16", 668e12), ("MI355X", "bfloat16", 1565e12), ("MI300X", "float8_e4m3fnuz", 1273e12)],
)
def test_cards_of_amd_have_the_published_rates_of_large_products(name, dtype, published):
    assert cuda_device(name).of_type(dtype).flops_per_second == pytest.approx(published, rel=0.08)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("V100", 7.8e12), ("T4", 0.25e12), ("RTX 4090", 1.29e12), ("H20", 1.0e12), ("B200", 40e12), ("B300", 1.2e12)],
)
def test_float64_products_have_the_rate_of_the_data_sheet(name, peak):
    single, double = (cuda_device(name).of_type(dtype).flops_per_second for dtype in ("float32", "float64"))
    assert double / single == pytest.approx(peak / DATASHEETS[name].single_flops, rel=0.35)
