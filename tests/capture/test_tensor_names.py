"""Names that a model gives to its tensors, and the constraints that refer to them."""

from __future__ import annotations

import pytest
import torch
from captured import planned
from models import Named

import autoremat


def test_named_tensors_take_orders():
    x = torch.randn(4, 8)
    seen, _ = planned(Named(), x, save=["qkv"], recompute=["hidden"])
    assert seen.recomputed() == [("", "aten.gelu.default")]
    assert ("qkv", "aten.addmm.default") in seen.saved()
    seen, _ = planned(Named(), x, recompute=["qkv", "hid*"])
    assert ("qkv", "aten.addmm.default") in seen.recomputed()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_name_changes_nothing_elsewhere(backend):
    model, x = Named(), torch.randn(4, 8)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x).backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))
    y = torch.randn(2, 2, requires_grad=True)
    assert autoremat.name(y, "y").grad_fn is None
