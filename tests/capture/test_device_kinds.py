"""Devices of other kinds than CPU and CUDA: planned for with a warning if they are here, refused if not."""

from __future__ import annotations

import pytest
import torch

import autoremat
from autoremat.basics.errors import OptionsError, OptionWarning
from autoremat.capture import capture


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="one of them may be here")
@pytest.mark.parametrize("device", ["xpu:0", torch.device("mps")])
def test_a_device_that_is_not_here_is_refused_before_anything_is_traced(device):
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(OptionsError, match=r"finds no such device here, only cpu\."):
        autoremat.explain(loss, x, device=device, options={"compiler": "aot_eager", "cost_model": "roofline"})
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptionsError, match=r"finds no such device here, only cpu\."):
        autoremat.device_budget("24GiB", model, torch.optim.SGD(model.parameters()), device=device)


def test_a_device_of_an_unknown_kind_is_planned_for_with_one_warning(monkeypatch):
    monkeypatch.setattr(capture, "_unknown_kinds", set())
    with pytest.warns(OptionWarning, match="xpu is planned as a middling CUDA card"):
        capture.device_rates(torch.device("xpu"), None)
    capture.device_rates(torch.device("xpu"), None)
