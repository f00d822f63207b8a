"""The seconds of ops that nothing fuses, on a card by name."""

from __future__ import annotations

import pytest
import torch

import autoremat
from autoremat.planner.cost import cuda_device


def test_an_op_that_nothing_fuses_moves_all_its_bytes_on_a_card_by_name():
    x = torch.empty(1 << 24, device="meta", requires_grad=True)
    options = {"compiler": "aot_eager"}
    plan = autoremat.explain(lambda x: x.exp().sum(), x, device="H100-80GB", options=options).plan
    card = cuda_device("H100-80GB")
    exp = next(op for op in plan.graph.ops if "exp" in op.target)
    assert exp.seconds == pytest.approx(card.launch_seconds + 2 * 4 * 2**24 / card.bytes_per_second)
