"""Measured bytes of each op: those of the simulation and of the replay, in code that runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.measure.peak import PeakTracker, track_peak
from autoremat.planner.memory.code_places import PlaceBytes, start_of
from autoremat.torch_private import running_code


class Chain(nn.Module):
    """Three products and a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((16, 64), (64, 128), (128, 8))
        up, wider, down = (nn.Linear(*width, bias=False) for width in widths)
        self.layers = nn.Sequential(up, wider, nn.Tanh(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean()


class Attention(nn.Module):
    """Attention with one head, and a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.gelu(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)).mean()


MODELS = [(Chain, (8192, 16), True), (Attention, (32, 64, 16), False)]
"""Each with the size of its input, and True if it recomputes under a budget."""


def report_and_bytes(model: nn.Module, size: tuple[int, ...], **options: object) -> tuple[autoremat.Report, PeakTracker]:
    """Returns the report of a step, and the tracker of its second run, beside memory that is allocated in the block."""
    torch.manual_seed(0)
    x = torch.randn(*size)
    step = torch.compile(model, backend="autoremat", options={"cost_model": "roofline", **options})
    step(x).backward()
    model.zero_grad(set_to_none=True)
    with track_peak("cpu", ops=True) as peak:
        beside = torch.empty(1000, dtype=torch.uint8)
        step(x).backward()
    assert len(beside) == 1000
    return autoremat.reports()[-1], peak


def measured(report: autoremat.Report, peak: PeakTracker) -> list[int | None]:
    """Returns the measured bytes of each execution above the start of the forward."""
    assert report.plan is not None
    assert report.op_bytes_table(peak.op_bytes) is not None
    start = peak.op_bytes[start_of(report.kernels[0].place)]
    assert start == 1000
    return [None if one is None else peak.op_bytes[one.place] - start for one in report.kernels]


@pytest.mark.parametrize(("model", "size", "recomputes"), MODELS)
def test_uncompiled_ops_take_the_simulated_bytes(model, size, recomputes):
    report, peak = report_and_bytes(model(), size, compiler="aot_eager", memory_budget=0.99 if recomputes else None)
    plan = report.plan
    for op, found, simulated in zip(plan.sequence, measured(report, peak), plan.timeline.bytes_at, strict=True):
        spare = plan.graph.ops[op].workspace_bytes  # of which a kernel need not use all
        assert simulated - spare <= found <= simulated
    assert bool(plan.recomputed) is recomputes


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size", "recomputes"), MODELS)
def test_kernels_of_generated_code_take_the_replayed_bytes(model, size, recomputes):
    report, peak = report_and_bytes(model(), size, memory_budget=0.85 if recomputes else None)
    found = measured(report, peak)
    assert found == [None if one is None else one.bytes for one in report.kernels]
    assert len([size for size in found if size is not None]) > 6


def test_code_is_as_before_behind_the_block_and_where_the_source_is_another():
    report_and_bytes(Chain(), (64, 16), compiler="aot_eager")
    functions = {function: function.__code__ for function, _ in running_code._uncompiled()}
    assert functions
    with running_code.noting_places(print):
        assert all(function.__code__ is not code for function, code in functions.items())
    assert all(function.__code__ is code for function, code in functions.items())
    assert all(running_code.NOTE not in function.__globals__ for function in functions)
    (function, *_) = functions
    assert running_code._with_notes(function.__code__, "def forward(self, args):\n    return args") is function.__code__


def test_the_last_call_of_a_half_counts():
    places = PlaceBytes()
    for live in (50, 10):
        places.reach("a:0", live)
        places.reach("a:3", live + 1)
        places.see(live + 7)
        places.see(live)
        places.reach("b:0", live)
    assert places.found == {"a:0": 10, "a:3": 17, "b:0": 10}
