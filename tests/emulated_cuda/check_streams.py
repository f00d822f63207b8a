"""Several streams on the emulated card: around compiled graphs, between them and in them.

The card runs one kernel after the other, so it shows no race. It shows that graphs compile, compute and allocate as foretold.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoremat.basics.errors import CaptureError, find_cause
from emulated_cuda.cells import ROUNDING
from emulated_cuda.steps import MeanSquare, on_card, planned_step, relative_error, run_step


class Branches(nn.Module):
    def __init__(self, in_graph: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 16)
        self.left, self.right = nn.Linear(128, 128), nn.Linear(128, 128)
        self.side, self.ready, self.done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        self.apart = self.branches if in_graph else torch.compiler.disable(self.branches)

    def branches(self, x: Tensor) -> Tensor:
        self.ready.record()
        with torch.cuda.stream(self.side):
            self.ready.wait()
            right = F.gelu(self.right(x))
            self.done.record()
        left = F.gelu(self.left(x))
        self.done.wait()
        return left + right

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.apart(F.gelu(self.first(x))))).square().mean()


def branches(in_graph: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return on_card((Branches(in_graph), (torch.randn(256, 64),)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")  # the best effort exceeds one byte
def test_a_step_on_a_stream_of_its_own():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    module, inputs = on_card((MeanSquare(layers), (torch.randn(256, 64),)))
    expected = planned_step(module, inputs, cost_model="roofline", memory_budget=1, on_infeasible="best_effort")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step = planned_step(module, inputs, cost_model="roofline", memory_budget=1, on_infeasible="best_effort")
    torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, step.result.gradients, expected.result.gradients))
    assert step.result.peak_bytes == step.replayed_bytes == expected.replayed_bytes
    assert step.report.recomputed_ops > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_streams_between_two_graphs():
    module, inputs = branches(in_graph=False)
    reference = run_step(module, module, inputs).gradients
    step = planned_step(module, inputs, cost_model="roofline", memory_budget=1.0)
    assert relative_error(step.result.gradients, reference) <= ROUNDING[torch.float32]


def test_a_graph_with_streams_is_not_planned():
    module, inputs = branches(in_graph=True)
    with pytest.raises(Exception, match="stream") as caught:
        planned_step(module, inputs, memory_budget=0.8)
    assert find_cause(caught.value, CaptureError) is not None
    assert "torch.compiler.disable" in str(caught.value)
