"""The CUDA path on an emulated card: the checks in `emulated_cuda/` run in processes that have the card from the start."""

import os
import subprocess
import sys

import pytest
from emulated_cuda import library, named
from folders import ROOT, TESTS
from processes import ONE_THREAD

pytestmark = [
    pytest.mark.slow,  # a C++ compiler builds the card first
    pytest.mark.skipif(bool(library.missing()), reason=f"no emulated card: {library.missing()}"),
]


def run(*files: str, marks: str, interpreted: bool = True) -> None:
    """Runs the checks of ``files`` with these marks on the card. If ``interpreted``, Triton's interpreter runs the kernels."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "emulated_cuda.plugin", "-o", "python_files=check_*.py", "-m", marks,
            "-W", "ignore:TensorFloat32", *(str(TESTS / "emulated_cuda" / file) for file in files),
        ],
        env=os.environ | ONE_THREAD | {"PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "1" if interpreted else "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


def test_the_card_and_small_steps_under_budgets():
    run("check_device.py", "check_steps.py", "check_cuda_graphs.py", marks="not slow")


@pytest.mark.card
def test_stays_on_the_host():
    run("check_host_memory.py", marks="slow or not slow")


@pytest.mark.card
def test_models_under_budgets():
    run("check_steps.py", "check_features.py", marks="slow")


@pytest.mark.card
def test_cuda_graphs_streams_and_kernels_of_the_user():
    run("check_cuda_graphs.py", marks="slow")


@pytest.mark.card
def test_kernels_of_models_compile():
    run("check_code.py", marks="slow", interpreted=False)


@pytest.mark.card
def test_plans_that_are_made_by_name_hold_on_the_card(tmp_path, monkeypatch):
    named.write_plans(tmp_path, "NVIDIA H100 80GB HBM3")
    named.write_graphs(tmp_path, "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv(named.FOLDER_VARIABLE, str(tmp_path))
    run("check_named.py", marks="slow", interpreted=False)
