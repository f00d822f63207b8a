"""CUDA graphs on the emulated card: recorded in their pool by torch's own manager, with the bytes of the replay."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.torch_private import inductor_lowering
from emulated_cuda import graphs, small_models
from emulated_cuda.cells import ROUNDING
from emulated_cuda.steps import on_card, planned_step, relative_error, replayed_peaks, run_step

BATCH = torch.Size((128, 64))
INPUT_BYTES = 4 * BATCH.numel()
TANGENT_BYTES = 512
"""The gradient of the loss, which autograd holds outside of the pool."""

RECORDED = {"triton.cudagraphs": True, "cost_model": "roofline"}


class Broken(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.first, self.second, self.split = nn.Linear(64, 256), nn.Linear(256, 16), split

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x))
        if self.split:
            hidden = hidden.cpu().sin().cuda() * hidden
        return self.second(hidden).square().mean()


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was recorded. Bytes outside of the pool are above those at its start."""

    gradients: tuple[Tensor, ...]
    pool_bytes: int
    other_bytes: int
    peak_bytes: int
    """Of both at one time."""
    halves: dict[bool, inductor_lowering.LoweredPeak]
    report: autoremat.Report


def recorded_step(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> RecordedStep:
    """Compiles ``module`` and returns its second step, in which torch records it. The first one warms up."""
    torch._dynamo.reset()
    settings = torch._inductor.config.patch(fx_graph_cache=False, shape_padding=False)
    with replayed_peaks() as halves, settings, torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(module, backend="autoremat", options=RECORDED | options)
        run_step(compiled, module, inputs)
        module.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        result = run_step(compiled, module, inputs)
    pool, outside = graphs.peaks()
    return RecordedStep(result.gradients, pool, outside - before, result.peak_bytes, dict(halves), autoremat.reports()[-1])


def tensor_bytes(step: RecordedStep) -> tuple[int, int]:
    """Returns the replayed bytes in the pool and outside of it, without code headroom and workspaces."""
    pools = [half.pool_bytes or 0 for half in step.halves.values()]
    return max(pools), max(half.peak_bytes - (half.pool_bytes or 0) for half in step.halves.values())


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_recorded_step_needs_the_pool_and_what_lies_outside(split):
    module, inputs = on_card((Broken(split), (torch.randn(BATCH),)))
    reference = run_step(module, module, inputs).gradients
    step = recorded_step(module, inputs)
    assert relative_error(step.gradients, reference) <= ROUNDING[torch.float32]
    assert (step.pool_bytes, step.other_bytes) == tensor_bytes(step)
    assert step.report.graph_pool_bytes == step.pool_bytes  # its kernels have no workspaces
    assert step.report.compiled_peak_bytes >= step.pool_bytes + step.other_bytes
    assert (step.other_bytes == TANGENT_BYTES) == (not split)
    if split:
        assert step.pool_bytes + step.other_bytes > step.peak_bytes  # they peak at different times
    else:
        whole = planned_step(module, inputs, cost_model="roofline")
        assert whole.report.graph_pool_bytes is None
        assert step.peak_bytes == whole.result.peak_bytes + INPUT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("llama", {"layers": 1}), ("gpt2", {"layers": 1}), ("resnet", {"blocks": 1})])
def test_recorded_models_keep_to_their_budgets(name, sizes):
    built = on_card(small_models.build(name, **sizes))
    free = recorded_step(*built)
    budget = int(0.8 * free.report.compiled_peak_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        tight = recorded_step(*built, memory_budget=budget, on_infeasible="best_effort")
    for step in (free, tight):
        assert (step.pool_bytes, step.other_bytes) == tensor_bytes(step)
        assert step.report.graph_pool_bytes >= step.pool_bytes
    assert tight.report.recomputed_ops > free.report.recomputed_ops
    assert tight.pool_bytes < free.pool_bytes
    assert not tight.report.within_budget or tight.pool_bytes + tight.other_bytes <= budget
    allowed = 5e-3 if name == "resnet" else ROUNDING[torch.float32]
    assert relative_error(tight.gradients, free.gradients) <= allowed
