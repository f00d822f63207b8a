"""Stages of real pipelines keep their budgets with all their calls in flight."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_ranks, values
from torch import distributed, nn

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.measure.peak import track_peak

WIDTH, ROWS, MICROBATCHES = 64, 1024, 8
"""Rows of a micro-batch."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Part(nn.Module):  # Dynamo compiles no nn.Sequential in place
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that saves no tensor of its own: the loss is not compiled, so no budget counts what it saves."""
    return (output * target).sum()


def pipeline_of(
    rank: int, kind: str, options: dict[str, Any] | None, microbatches: int = MICROBATCHES
) -> tuple[Any, nn.Module]:
    """The schedule of this rank and its stage's module, compiled with ``options`` or not at all."""
    from torch.distributed import pipelining

    stages = distributed.get_world_size()
    torch.manual_seed(rank)
    module = Part()
    stage = pipelining.PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, microbatches, product)
    if options is not None:
        counted = {"in_flight": autoremat.in_flight(schedule, rank)}
        module.compile(backend="autoremat", options={"progress": False, **counted, **options})
    return schedule, module


def steps_of(schedule: Any, rank: int) -> Callable[[], Any]:
    """A function that runs a step on inputs that exist already."""
    torch.manual_seed(0)
    whole, target = torch.randn(2, schedule._n_microbatches * ROWS, WIDTH)
    positional, named = [whole] if rank == 0 else [], {"target": target} if rank == distributed.get_world_size() - 1 else {}
    return lambda: schedule.step(*positional, **named, return_outputs=False)


def measured(rank: int, kind: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of the second step of a rank, and the gradients."""
    schedule, module = pipeline_of(rank, kind, options)
    step = steps_of(schedule, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        module.zero_grad(set_to_none=True)
        with track_peak("cpu") as peak:
            step()
    found: dict[str, Any] = {"peak": peak.bytes, "gradients": [p.grad.numpy() for p in module.parameters()]}
    found["warnings"] = [str(one.message) for one in caught if issubclass(one.category, BudgetWarning)]
    if options is not None:
        report = autoremat.reports()[-1]
        found |= {name: getattr(report, name) for name in ("budget_bytes", "peak_bytes", "in_flight", "recomputed_ops")}
        found["reports"] = len(autoremat.reports())
    return found


def plain_and_planned(rank: int, kind: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return measured(rank, kind, None), measured(rank, kind, {"compiler": "aot_eager", **options})


def judge(results: list[tuple[dict[str, Any], dict[str, Any]]], used: float) -> None:
    """All stages are within their budgets, which plain training is not, use most of their plans' peaks, and train alike."""
    for plain, planned in results:
        assert planned["reports"] == 1
        assert planned["warnings"] == []
        assert used * planned["peak_bytes"] <= planned["peak"] <= planned["budget_bytes"] < plain["peak"]
        assert planned["recomputed_ops"] > 0
        assert all((a == b).all() for a, b in zip(planned["gradients"], plain["gradients"], strict=True))


@pytest.mark.slow
def test_stages_keep_their_budgets_with_all_calls_in_flight():
    found = values(run_ranks(plain_and_planned, 2, args=("Schedule1F1B", {"memory_budget": 0.8})))
    assert [planned["in_flight"] for _, planned in found] == [2, 1]
    judge(found, used=0.99)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "calls"), [("Schedule1F1B", [4, 3, 2, 1]), ("ScheduleGPipe", [8, 8, 8, 8])])
def test_four_stages_keep_their_budgets(kind, calls):
    found = values(run_ranks(plain_and_planned, 4, args=(kind, {"memory_budget": 0.8})))
    assert [planned["in_flight"] for _, planned in found] == calls
    judge(found, used=0.9)


def too_few_in_flight(rank: int) -> list[str]:
    """Warnings under bytes: under a share, the open calls are judged by the share of what all of them need."""
    options: dict[str, Any] = {"compiler": "aot_eager", "memory_budget": 0.9, "in_flight": 2}
    options["memory_budget"] = measured(rank, "ScheduleGPipe", options)["budget_bytes"]
    gc.collect()  # gradients of the first pipeline would count
    return measured(rank, "ScheduleGPipe", options)["warnings"]


@pytest.mark.slow
def test_more_open_calls_than_in_flight_says_are_noticed():
    for said in values(run_ranks(too_few_in_flight, 2)):
        assert len(said) == 1
        assert "beside the 2 that in_flight counts, " in said[0]
        assert "in_flight=" in said[0]
