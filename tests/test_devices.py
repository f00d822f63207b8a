"""The table of devices: names are found as vendors and torch spell them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoremat.cost import DATASHEETS, cuda_device, device_memory
from autoremat.cost.devices import MATMUL_EFFICIENCY, UNKNOWN_GPU, datasheet


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
    ],
)
def test_names(name, key):
    assert datasheet(name) == DATASHEETS[key]


def test_memory_is_the_names_or_the_sheets():
    assert device_memory("V100-16GB") == 16 * 10**9
    assert device_memory("V100") == 32 * 10**9
    assert device_memory("A100 40 GB") == 40 * 10**9
    assert device_memory("Abacus") is None


@pytest.mark.parametrize("name", ["H1000", "NVIDIA T400 4GB", "RTX A1000", "RTX 40900"])
def test_another_number_is_another_card(name):
    assert datasheet(name) is None


def test_an_unknown_card_has_middling_rates():
    assert cuda_device("Abacus", True).flops_per_second == UNKNOWN_GPU.half_flops * MATMUL_EFFICIENCY
    assert cuda_device("H100", False).flops_per_second < cuda_device("H100", True).flops_per_second


def test_where_there_is_no_gpu_its_benchmark_writes_nothing(tmp_path):
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--output", str(tmp_path / "results")]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=True)
    assert done.stdout == "skipped: there is no CUDA device, and nothing was written\n"
    assert list(tmp_path.iterdir()) == []
