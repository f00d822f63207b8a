"""Plans that were made for the card by its name, in a process without it, hold on the card."""

import json
import os
from pathlib import Path

import pytest

import autoremat
from autoremat.planner.plans.plan_file import graph_hash
from emulated_cuda import named

WORKSPACES = 128 * 1024
"""Most bytes of the workspaces of convolutions that are measured on the card and unknown without it."""

ESTIMATED = 384 * 1024
"""Most bytes of the workspaces of cuDNN's attention, estimated without the card. The emulated card's kernels need none."""


@pytest.mark.slow
@pytest.mark.parametrize("name", named.STEPS)
def test_the_plan_and_the_peak_of_its_code_are_those_of_the_card(name):
    folder = Path(os.environ[named.FOLDER_VARIABLE])
    path = folder / f"{name}.json"
    predicted = json.loads((folder / "peaks.json").read_text())[name]
    step, inputs = named.built(name)
    stored = autoremat.Plan.load(path)
    options = {"cost_model": "roofline", "plan": str(path)}
    report = autoremat.explain(step, *inputs, device="cuda", lower=True, options=options)
    assert report.strategy.startswith("stored plan")
    assert graph_hash(report.plan.graph) == graph_hash(stored.graph)
    assert report.plan.schedule == stored.schedule
    least, most = -ESTIMATED * ("attention" in name), WORKSPACES * ("llama" not in name)
    assert least <= report.compiled_peak_bytes - predicted <= most


@pytest.mark.slow
@pytest.mark.parametrize("name", named.steps())
def test_the_graph_of_a_small_step_is_that_of_the_card(name):
    assert named.difference_on_card(Path(os.environ[named.FOLDER_VARIABLE]), name) == ""
