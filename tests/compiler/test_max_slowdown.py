"""The budget of time: the planner's search, the option, its report and its errors."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.planning import plan_graph
from autoremat.options.options import Options
from autoremat.planner.cost.durations import ROUNDING
from autoremat.planner.plans.limits import Limits
from autoremat.planner.search.planner import Planner
from autoremat.report.report import Report
from autoremat.tools.explain import previews

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}
SLOWDOWNS = (0.0, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0)
blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(4)]
model = nn.Sequential(*blocks)
X = torch.randn(256, 32)


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def explained(**options: object) -> Report:
    return autoremat.explain(loss, X, options=EAGER | options)


@settings(max_examples=60)
@given(graphs(), st.sampled_from(SLOWDOWNS))
def test_the_plan_keeps_to_the_time_and_needs_no_more_than_the_fastest(graph, allowed):
    planner = Planner(graph, 60.0)
    fastest = planner.fastest()
    plan = planner.find(Limits(seconds=fastest.predicted_seconds * (1 + allowed + ROUNDING))).plan
    assert plan is not None
    assert plan.predicted_seconds <= (1 + allowed + 2 * ROUNDING) * fastest.predicted_seconds
    assert plan.peak_bytes <= fastest.peak_bytes
    plan.check()


def test_a_stored_plan_and_a_step_profile_exclude_it_and_orders():
    plan = explained().plan
    with pytest.raises(OptionsError, match="applies a stored plan as it is: .*max_slowdown"):
        Options.parse({"plan": plan, "max_slowdown": 0.03})
    for orders in ({"policy": "full"}, {"save": ["a"]}, {"recompute": ["a"]}):
        with pytest.raises(OptionsError, match="cannot be given beside it"):
            Options.parse({"plan": plan, **orders})
    profile = autoremat.profile_step(loss, X, memory_budget="1GiB", options=EAGER)
    with pytest.raises(OptionsError, match="a step profile divides one budget among several"):
        Options.parse({"memory_budget": profile, "max_slowdown": 0.03})
    with pytest.raises(OptionsError, match="no meaning for pareto"):
        autoremat.pareto(loss, X, options={"max_slowdown": 0.03})


def test_alone_it_asks_for_the_least_peak_within_the_time():
    reports = [explained(max_slowdown=allowed) for allowed in (0, "free", 0.03, 0.1, 1.0)]
    peaks = [report.predicted_peak_bytes for report in reports]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] <= reports[0].minimum_peak_bytes < peaks[0]
    for report in reports:
        assert report.slowdown <= report.max_slowdown + 1e-9
        assert report.budget_bytes is None
        assert report.fits
        assert report.soft_budget_bytes is None
    assert [report.binding_budget for report in reports[2:]] == ["max_slowdown", "max_slowdown", ""]
    assert Report.from_json(reports[2].to_json()).slowdown == reports[2].slowdown


def test_it_is_a_share_beyond_the_time_without_a_budget():
    without_budget, timed = explained(compiler="inductor"), explained(compiler="inductor", max_slowdown=0)
    assert timed.soft_budget_bytes == without_budget.soft_budget_bytes is not None
    assert timed.seconds_without_budget == pytest.approx(without_budget.plan.predicted_seconds)
    assert timed.seconds_without_budget <= without_budget.predicted_seconds
    assert timed.predicted_peak_bytes <= without_budget.predicted_peak_bytes


def test_beside_a_budget_of_memory_it_bounds_the_time():
    alone, both = explained(memory_budget=0.7), explained(memory_budget=0.7, max_slowdown=0.5)
    assert both.predicted_peak_bytes == alone.predicted_peak_bytes
    assert both.binding_budget == "memory_budget"
    idle = explained(memory_budget="1GiB", max_slowdown=0.5)
    assert idle.binding_budget == ""


def test_the_error_names_both_figures_and_either_helps():
    with pytest.raises(BudgetInfeasible) as raised:
        explained(memory_budget=0.5, max_slowdown=0.01, on_infeasible="raise")
    error = raised.value
    assert error.max_slowdown == 0.01
    assert error.least_slowdown > 0.01
    assert error.budget_bytes < error.minimum_bytes
    assert error.untimed_bytes < error.budget_bytes
    assert sum(occupant.bytes for occupant in error.occupants) == error.minimum_bytes
    assert explained(memory_budget=error.minimum_bytes, max_slowdown=0.01).fits
    enough = float(str(error).partition("raise max_slowdown to ")[2].partition(",")[0])
    assert explained(memory_budget=0.5, max_slowdown=enough).fits
    again = BudgetInfeasible(**json.loads(json.dumps(error.figures() | {"occupants": []})) | {"remedies": []})
    assert again.least_slowdown == error.least_slowdown


def test_another_rank_takes_the_plan_with_its_time():
    def look(priced: PricedGraph) -> tuple[Report, Report]:
        leading = plan_graph(priced).report
        told = dataclasses.replace(priced.problem, told=leading)
        return leading, plan_graph(dataclasses.replace(priced, problem=told)).report

    options = Options.parse(EAGER | {"max_slowdown": 0.05})
    [(leading, following)], _ = previews(loss, (X,), {}, options, None, look)
    assert following.slowdown == pytest.approx(leading.slowdown)
    assert following.seconds_without_budget == leading.seconds_without_budget
    assert following.predicted_peak_bytes == leading.predicted_peak_bytes
    assert following.max_slowdown == 0.05


@pytest.mark.slow
def test_generated_code_is_taken_at_any_peak():
    torch._dynamo.reset()
    report = autoremat.explain(loss, X, options={"cost_model": "roofline", "max_slowdown": 0.1}, lower=True)
    assert report.compiled_peak_bytes is not None
    assert report.replans == 0
    assert report.slowdown <= 0.1
    assert dataclasses.replace(report, max_slowdown=None).keeps_time
