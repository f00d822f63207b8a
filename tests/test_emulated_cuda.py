"""The CUDA path on an emulated card: the checks in `emulated_cuda/` run in processes that have the card from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_cuda import library

TESTS = Path(__file__).parent

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=f"no emulated card: {library.missing()}")


def run(marks: str) -> None:
    """Runs the checks with these marks on the card. Kernels run in Triton's interpreter."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "emulated_cuda.plugin", "-o", "python_files=check_*.py", "-m", marks,
            "-W", "ignore:TensorFloat32", str(TESTS / "emulated_cuda"),
        ],
        env=os.environ | {"PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


def test_the_card_and_small_steps_under_budgets():
    run("not slow")


@pytest.mark.slow
def test_models_under_budgets():
    run("slow")
