"""The examples of distributed training, and those of other libraries, run in two processes under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT
from processes import ONE_THREAD

FOLDER = ROOT / "examples" / "distributed"
UNCOMPILED = ROOT / "tests" / "uncompiled.py"
INTEGRATIONS = {"accelerate_loop": "accelerate", "huggingface_trainer": "accelerate"}


def by_torchrun(*command: Path) -> str:
    """The output of a script in two processes."""
    environment = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, *map(str, command)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline"])
def test_the_example_trains_on_two_ranks(name):
    script = FOLDER / f"{name}.py"
    output = by_torchrun(UNCOMPILED, script)
    assert re.search(r"^loss \d+\.\d+$", output, re.MULTILINE)
    rows = re.findall(r"^ +(\d) .* (its own|of \d ranks)$", output, re.MULTILINE)
    by = "of 2 ranks" if name == "tensor_parallel" else "its own"
    assert set(rows) == {("0", by), ("1", by)}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_example_of_another_library_trains_on_two_ranks(name):
    pytest.importorskip("transformers", reason="needs transformers, of the extra `integrations`")
    pytest.importorskip(INTEGRATIONS[name], reason="needs accelerate, of the extra `integrations`")
    output = by_torchrun(UNCOMPILED, ROOT / "examples" / "integrations" / f"{name}.py")
    assert output.count("recomputation") == 2, "each rank reports"


def test_every_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"ddp", "fsdp2", "tensor_parallel", "pipeline", "tiny_model"}
