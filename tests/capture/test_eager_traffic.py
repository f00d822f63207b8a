"""The seconds of ops that nothing fuses, by data sheets."""

from __future__ import annotations

import pytest
import torch

import autoremat
from autoremat.planner.cost import cpu_device, cuda_device


@pytest.mark.parametrize("name", ["H100-80GB", "cpu"])
def test_an_op_that_nothing_fuses_moves_all_its_bytes(name):
    x = torch.empty(1 << 24, device="meta", requires_grad=True)
    options = {"compiler": "aot_eager", "cost_model": "roofline"}
    plan = autoremat.explain(lambda x: x.exp().sum(), x, device=name, options=options).plan
    device = cpu_device(torch.get_num_threads()) if name == "cpu" else cuda_device(name)
    exp = next(op for op in plan.graph.ops if "exp" in op.target)
    assert exp.seconds == pytest.approx(device.launch_seconds + 2 * 4 * 2**24 / device.bytes_per_second)
