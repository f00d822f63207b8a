"""Another search trains models: it needs the members of ``PlanSource`` and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import nn

import autoremat
from autoremat.compiler import planning
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search import baselines
from autoremat.planner.search.plan_source import Accepts, PlanSource
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import TimeBudget

MODEL = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())))


@dataclass
class TwoPlans:
    """Knows two plans without a search: to save everything, and segments of square-root length."""

    graph: Graph
    ended_by_clock: bool = False

    @cached_property
    def baseline(self) -> Plan:
        return baselines.save_all(self.graph)

    @cached_property
    def smallest(self) -> Plan:
        return baselines.save_cuts(self.graph)

    @property
    def lowest(self) -> Plan:
        return self.smallest

    def find(self, budget_bytes: int | None, accepts: Accepts | None = None) -> PlanningResult:
        plan = self.choose(budget_bytes, accepts=accepts)
        return PlanningResult(plan, self.baseline, self.smallest, 0, 0.0, 2, False)

    def choose(self, budget_bytes: int | None, *, accepts: Accepts | None = None) -> Plan | None:
        fitting = [plan for plan in self.front() if budget_bytes is None or plan.peak_bytes <= budget_bytes]
        return next((plan for plan in fitting if accepts is None or accepts(plan)), None)

    def fastest(self, accepts: Accepts | None = None) -> Plan | None:
        return self.choose(None, accepts=accepts)

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        fits = budget_bytes is None or plan.peak_bytes <= budget_bytes
        return PlanningResult(plan if fits else None, self.baseline, plan, 0, 0.0, 1, False)

    def least_peak(self, time: TimeBudget) -> PlanningResult:
        plan = next((plan for plan in (self.smallest, self.baseline) if time.keeps(plan)), None)
        return PlanningResult(plan, self.baseline, self.smallest, 0, 0.0, 2, False)

    def least_traffic(self) -> Plan:
        return self.baseline

    def front(self) -> Sequence[Plan]:
        return (self.baseline, self.smallest)

    def restart(self) -> None:
        pass


def gradients_of(function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of all parameters by one step."""
    MODEL.zero_grad()
    function(inputs).square().mean().backward()
    return [parameter.grad for parameter in MODEL.parameters()]


@pytest.mark.parametrize("options", [{"memory_budget": 0.8}, {"max_slowdown": 1.0}, {}], ids=str)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_search_of_two_plans_trains_a_model(monkeypatch, compiler, options):
    asked: list[PlanSource] = []

    def new_planner(graph, time_limit, given, soft_budget, host_bytes, strategies):
        asked.append(TwoPlans(graph))
        return asked[-1]

    monkeypatch.setattr(planning, "new_planner", new_planner)
    inputs = torch.randn(256, 32)
    expected = gradients_of(MODEL, inputs)
    compiled = torch.compile(MODEL, backend="autoremat", options=options | {"compiler": compiler, "cost_model": "roofline"})
    with autoremat.track_peak() as peak:
        found = gradients_of(compiled, inputs)
    report = autoremat.reports()[-1]
    assert asked
    assert bool(report.recomputed_ops) == bool(options)
    assert report.budget_bytes is None or peak.bytes <= report.budget_bytes
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0 if compiler == "aot_eager" else 1e-6)
