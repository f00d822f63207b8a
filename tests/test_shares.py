"""Budgets as floats: a share of the peak that the step needs without autoremat."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_preview import EAGER, Mlp
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.compiler import reference
from autoremat.compiler.headroom import headroom_of
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.planning import plan_graph
from autoremat.options.options import Options
from autoremat.planner.search.candidates import Search
from autoremat.report.report import Report
from autoremat.tools.explain import previews
from autoremat.torch_private import compilers


class Gelu(nn.Module):
    """Blocks whose activations torch's own partition recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.layer_norm(x + block(x), (64,)).tanh()
        return x.square().mean()


INPUT = (torch.randn(512, 64),)


def explained(budget: float | int, **options: object) -> Report:
    return autoremat.explain(Gelu(), *INPUT, options={"memory_budget": budget, "cost_model": "roofline", **options})


def test_a_share_is_one_of_torchs_own_partition():
    def look(preview):
        headroom = headroom_of(preview.priced, preview.context)
        return preview.priced.torchs_plan().peak_bytes + headroom, preview.report()

    options = Options.parse({"memory_budget": 0.7, "cost_model": "roofline"}, None, compilers.inductor_config_names)
    ((theirs, report),), _ = previews(Gelu(), INPUT, {}, options, None, look)
    assert report.reference_bytes == theirs < report.baseline_peak_bytes
    assert (report.budget_share, report.budget_bytes) == (0.7, math.floor(0.7 * theirs))
    assert report.predicted_peak_bytes + report.code_headroom_bytes <= report.budget_bytes


def test_the_report_says_what_the_share_is_one_of():
    report = explained(0.8)
    text = " ".join(str(report).split())
    assert "the share of 0.8 of the reference peak" in text
    assert "that of torch's own partition" in text
    assert Report.from_json(report.to_json()).reference_bytes == report.reference_bytes
    assert explained(report.budget_bytes).reference_bytes is None


def test_nothing_is_recomputed_without_us_in_eager_code():
    report = autoremat.explain(Gelu(), *INPUT, options=EAGER | {"memory_budget": 0.7})
    assert report.reference_source == reference.BASELINE
    assert report.reference_bytes == report.baseline_peak_bytes


@pytest.mark.parametrize("options", [{}, {"save": ["aten.gelu"]}], ids=["many ops", "constraints"])
def test_a_stand_in_takes_the_place_of_torchs_partition(monkeypatch, options):
    """On graphs of many ops, and under constraints, which torch does not know."""
    if not options:
        monkeypatch.setattr(reference, "MOST_OPS", 10)
    monkeypatch.setattr(PricedGraph, "torchs_plan", lambda _: pytest.fail("torch was asked"))
    report = explained(1.0, **options)
    assert report.reference_source == reference.STAND_IN
    assert report.predicted_peak_bytes <= report.reference_bytes < report.baseline_peak_bytes or options
    assert report.fits


def test_torchs_own_partition_competes_for_the_whole_reference(monkeypatch):
    monkeypatch.setattr(Search, "cheapest", lambda *_: None)  # a search that finds nothing
    report = explained(1.0)
    assert report.strategy == "torch"
    assert report.predicted_peak_bytes + report.code_headroom_bytes == report.budget_bytes == report.reference_bytes
    with pytest.raises(BudgetInfeasible):
        explained(0.5)


def test_a_partition_that_is_no_plan_is_no_reference(monkeypatch):
    """Torch draws random numbers twice where its partitioner likes."""
    torchs = PricedGraph.torchs_plan

    def without_an_op(priced):
        plan = torchs(priced)
        return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, backward=plan.schedule.backward[:-1]))

    monkeypatch.setattr(PricedGraph, "torchs_plan", without_an_op)
    assert explained(0.9).reference_source == reference.STAND_IN


def test_torch_is_asked_once_for_all_attempts(monkeypatch):
    torchs, asked = PricedGraph.torchs_plan, []
    monkeypatch.setattr(PricedGraph, "torchs_plan", lambda priced: asked.append(1) or torchs(priced))

    def look(preview):
        return plan_graph(preview.priced, preview.context).report, plan_graph(preview.priced, preview.context).report

    options = Options.parse({"memory_budget": 0.7, "cost_model": "roofline"}, None, compilers.inductor_config_names)
    ((first, second),), _ = previews(Gelu(), INPUT, {}, options, None, look)
    assert len(asked) == 1
    assert first.reference_bytes == second.reference_bytes


def test_a_graph_without_torch_has_shares_of_its_baseline():
    graph = autoremat.from_dag([(("a",), "b", 1.0, 8)]) if False else None
    assert graph is None


def test_a_step_has_a_reference_of_its_own():
    model, (x,) = Gelu(), INPUT
    profile = autoremat.profile_step(model, x, memory_budget=0.9, options={"cost_model": "roofline"})
    assert profile.budget_bytes == math.floor(0.9 * profile.reference_peak_bytes)
    assert profile.minimum_peak_bytes <= profile.reference_peak_bytes < profile.baseline_peak_bytes
    assert profile.within(1.0).peak_bytes <= profile.reference_peak_bytes
    assert "reference peak" in str(profile)


def test_mlp():
    assert Mlp


def test_without_a_budget_too_a_large_graph_does_not_wait_for_torchs_partition(monkeypatch):
    monkeypatch.setattr(reference, "MOST_OPS", 10)
    monkeypatch.setattr(PricedGraph, "torchs_plan", lambda priced: pytest.fail("torch's partitioner was asked"))
    assert explained(None).soft_budget_bytes is not None
