"""The emulated card itself, and the budget of a whole card: its memory, its context, and steps under it."""

import pytest
import torch
from torch import nn

import autoremat
from autoremat.planner.multigraph.device_budget import StepPart
from autoremat.request.surroundings import free_device_bytes


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters()), torch.randn(256, 64, device="cuda")


def test_a_budget_of_the_card_counts_its_context_and_rounds_as_its_allocator():
    model, optimizer, _ = parts()
    budget = autoremat.device_budget("auto", model, optimizer)
    free, total = torch.cuda.mem_get_info()
    rows = {row.name: row.bytes for row in budget.rows}
    assert budget.total_bytes == total
    assert rows.get("context and libraries", 0) == max(0, total - free - torch.cuda.memory_reserved())
    assert rows["parameters"] % 512 == 0
    assert rows["parameters"] == sum(-(-4 * p.numel() // 512) * 512 for p in model.parameters())
    assert "temporaries of the optimizer's later steps" in rows  # foreach, the default on CUDA


def test_the_predicted_peak_of_the_card_is_the_measured_one():
    torch.compiler.reset()
    start = torch.cuda.memory_allocated()
    model, optimizer, x = parts()
    budget = autoremat.device_budget("64MiB", model, optimizer, accumulate=2, reserve=0, context=0)
    step = torch.compile(lambda x: model(x).square().mean(), backend="autoremat",
                         options={"memory_budget": budget, "compiler": "aot_eager", "cost_model": "roofline"})  # fmt: skip
    step(x).backward()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        for _ in range(2):
            (step(x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    measured = torch.cuda.max_memory_allocated() - start
    report = autoremat.reports()[-1]
    assert report.device_ledger.binding(report.peak_bytes) is StepPart.LATER_MICRO_BATCH
    assert abs(report.predicted_device_bytes / measured - 1) < 0.03


def test_auto_leaves_room_for_the_state_to_come():
    torch.compiler.reset()
    model, optimizer, x = parts()
    free = free_device_bytes(torch.device("cuda", 0))
    torch.compile(lambda x: model(x).square().mean(), backend="autoremat",
                  options={"memory_budget": "auto", "compiler": "aot_eager", "cost_model": "roofline"})(x)  # fmt: skip
    report = autoremat.reports()[-1]
    state = 2 * sum(-(-4 * p.numel() // 512) * 512 for p in model.parameters())
    assert report.device_ledger is not None
    assert report.budget_bytes <= free - 2**29 - state
    assert optimizer.state == {}


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": False}, {"capturable": True}])
def test_optimizers_on_the_card_are_predicted(how):
    model, _, _ = parts()
    budget = autoremat.device_budget("64MiB", model, torch.optim.AdamW(model.parameters(), **how))
    rows = {row.name: row.bytes for row in budget.rows}
    assert rows["optimizer state after the first step"] >= 2 * rows["parameters"]
    copies = rows.get("temporaries of the optimizer's later steps", 0)
    assert copies < rows["parameters"] / 2 or how == {"capturable": True}
    assert (copies == 0) == ("fused" in how)
