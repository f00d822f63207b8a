"""The budget of time: the planner's search, the option, its report and its errors."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_of_options import key_of
from strategies import chain, graphs, training_chain
from torch import nn

import autoremat
from autoremat.basics.errors import AgreementError, BudgetInfeasible, BudgetWarning, OptionsError
from autoremat.compiler.joint_graph import ToldPlan
from autoremat.compiler.peers import _compare_options
from autoremat.compiler.planning import plan_graph
from autoremat.options.options import Options
from autoremat.planner.plans.plan_file import PlanFile
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.planning_result import ROUNDING
from autoremat.planner.search.time_budget import Descent, TimeBudget
from autoremat.planner.settings import SETTINGS
from autoremat.report.report import Report
from autoremat.tools.explain import Preview, previews

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}
SLOWDOWNS = (0.0, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0)
MIB = 1 << 20

blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(4)]
model = nn.Sequential(*blocks)
X = torch.randn(256, 32)


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def explained(**options: object) -> Report:
    return autoremat.explain(loss, X, options=EAGER | options)


# -- the planner -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(graphs(), st.sampled_from(SLOWDOWNS))
def test_the_plan_keeps_to_the_time_and_needs_no_more_than_the_fastest(graph, allowed):
    planner = Planner(graph, 60.0)
    time = TimeBudget(planner.fastest(), allowed)
    plan, fastest = planner.least_peak(time).plan, planner.fastest()
    assert plan is not None
    assert fastest is not None
    assert time.slowdown(fastest) == pytest.approx(0.0, abs=ROUNDING)
    assert plan.predicted_seconds <= (1 + allowed + 2 * ROUNDING) * fastest.predicted_seconds
    assert plan.peak_bytes <= fastest.peak_bytes
    plan.check()


@settings(max_examples=40)
@given(graphs())
def test_a_larger_slowdown_ends_at_no_higher_level(graph):
    budgets = []
    for allowed in SLOWDOWNS:
        planner = Planner(graph, 60.0)
        descent = Descent(planner.search, TimeBudget(planner.fastest(), allowed))
        descent.run()
        budgets.append(descent.bytes_at(descent.level))
        assert descent.best is not None
        assert descent.best.peak_bytes <= budgets[-1]
    assert budgets == sorted(budgets, reverse=True)


@settings(max_examples=20)
@given(graphs(), st.sampled_from(SLOWDOWNS))
def test_equal_questions_have_equal_answers(graph, allowed):
    used, fresh = Planner(graph, 60.0), Planner(graph, 60.0)
    used.choose(used.baseline.peak_bytes // 2)
    used.restart()
    plans = [planner.least_peak(TimeBudget(planner.fastest(), allowed)).plan for planner in (used, fresh)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].schedule == plans[1].schedule


def test_peaks_of_a_chain_fall_with_the_allowed_time():
    planner = Planner(training_chain(24, size=MIB), 60.0)  # 48 ops of a second
    plans = [planner.least_peak(TimeBudget(planner.fastest(), allowed)).plan for allowed in (0.0, 0.05, 0.1, 0.2, 1.0)]
    found = [(plan.peak_bytes // MIB, len(plan.recomputed)) for plan in plans if plan is not None]
    assert found[:4] == [(25, 0), (23, 2), (21, 4), (16, 9)]
    assert plans[-1].peak_bytes == planner.search.smallest.peak_bytes


def test_no_plan_is_as_fast_as_a_faster_form_of_the_graph():
    planner, faster = (Planner(chain(8, seconds=seconds), 60.0) for seconds in (1.0, 0.5))
    time = TimeBudget(faster.fastest(), 0.5)
    assert planner.least_peak(time).plan is None


def test_the_peak_is_never_above_that_without_a_budget(monkeypatch):
    planner = Planner(training_chain(24, size=MIB), 60.0, soft_budget_bytes=24 * MIB)
    without_budget = planner.choose(None)
    assert without_budget.peak_bytes < planner.fastest().peak_bytes
    time = TimeBudget(without_budget, 0.0)
    assert planner.least_peak(time).plan.peak_bytes <= without_budget.peak_bytes
    planner.restart()
    monkeypatch.setattr(planner.search, "fill", lambda budget: None)
    assert planner.least_peak(time).plan is without_budget


def test_a_step_without_seconds_is_never_slower():
    graph = chain(6, seconds=0.0, saving_seconds_per_byte=0.0)
    planner = Planner(graph, 60.0)
    plan = planner.least_peak(TimeBudget(planner.fastest(), 0.0)).plan
    assert plan is not None
    assert plan.peak_bytes == planner.search.smallest.peak_bytes


# -- the option --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["fast", -0.1, 1.5, 3, True, float("nan"), [0.03]])
def test_other_values_are_refused(value):
    with pytest.raises(OptionsError, match='max_slowdown=.*such as 0.03 or "3%"'):
        Options.parse({"max_slowdown": value})


def test_values():
    assert Options.parse({"max-slowdown": 0}).max_slowdown == 0.0
    assert Options.parse({"max_slowdown": "3%"}).max_slowdown == 0.03
    assert Options.parse({"max_slowdown": "free"}).max_slowdown == SETTINGS.search.free_slowdown
    assert Options.parse({}).max_slowdown is None
    one, other = (key_of(Options.parse({"max_slowdown": share})) for share in (0.03, 0.1))
    assert one != other


def test_a_stored_plan_and_a_step_profile_exclude_it(tmp_path):
    plan = explained().plan
    with pytest.raises(OptionsError, match="`plan` applies a stored plan as it is: max_slowdown"):
        Options.parse({"plan": plan, "max_slowdown": 0.03})
    profile = autoremat.profile_step(loss, X, memory_budget="1GiB", options=EAGER)
    with pytest.raises(OptionsError, match="a step profile divides one budget among several"):
        Options.parse({"memory_budget": profile, "max_slowdown": 0.03})
    with pytest.raises(OptionsError, match="a step profile divides bytes"):
        autoremat.profile_step(loss, X, memory_budget="1GiB", options=EAGER | {"max_slowdown": 0.03})
    with pytest.raises(OptionsError, match="no meaning for pareto"):
        autoremat.pareto(loss, X, options={"max_slowdown": 0.03})


# -- one graph ---------------------------------------------------------------------------------------------------------


def test_alone_it_asks_for_the_least_peak_within_the_time():
    reports = [explained(max_slowdown=allowed) for allowed in (0, "free", 0.03, 0.1, 1.0)]
    peaks = [report.predicted_peak_bytes for report in reports]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == reports[0].minimum_peak_bytes < peaks[0]
    for report in reports:
        assert report.slowdown <= report.max_slowdown + 1e-9
        assert report.budget_bytes is None
        assert report.fits
        assert report.soft_budget_bytes is None
    assert [report.binding_budget for report in reports[2:]] == ["max_slowdown", "max_slowdown", ""]
    assert "allowed 3.0%; max_slowdown binds" in str(reports[2])
    assert "no plan needs less memory" in str(reports[-1])
    assert Report.from_json(reports[2].to_json()).slowdown == reports[2].slowdown


def test_it_is_a_share_beyond_the_time_without_a_budget():
    without_budget, timed = explained(compiler="inductor"), explained(compiler="inductor", max_slowdown=0)
    assert timed.soft_budget_bytes == without_budget.soft_budget_bytes is not None
    assert timed.seconds_without_budget == pytest.approx(TimeBudget(without_budget.plan, 0.0).seconds)
    assert timed.seconds_without_budget <= without_budget.predicted_seconds
    assert timed.predicted_peak_bytes <= without_budget.predicted_peak_bytes


def test_beside_a_budget_of_memory_it_bounds_the_time():
    alone, both = explained(memory_budget=0.7), explained(memory_budget=0.7, max_slowdown=0.5)
    assert both.predicted_peak_bytes == alone.predicted_peak_bytes
    assert both.binding_budget == "memory_budget"
    assert "memory_budget binds" in str(both)
    idle = explained(memory_budget="1GiB", max_slowdown=0.5)
    assert idle.binding_budget == ""
    assert "neither budget binds" in str(idle)


def test_the_error_names_both_figures_and_either_helps():
    with pytest.raises(BudgetInfeasible) as raised:
        explained(memory_budget=0.5, max_slowdown=0.01, on_infeasible="raise")
    error = raised.value
    assert error.max_slowdown == 0.01
    assert error.least_slowdown > 0.01
    assert error.budget_bytes < error.minimum_bytes
    assert error.untimed_bytes < error.budget_bytes
    assert sum(occupant.bytes for occupant in error.occupants) == error.minimum_bytes
    assert "minimum peak found within max_slowdown" in str(error)
    assert f", or to {error.minimum_bytes} (" in str(error)
    assert "raise max_slowdown to" in str(error)
    assert explained(memory_budget=error.minimum_bytes, max_slowdown=0.01).fits
    enough = float(str(error).partition("raise max_slowdown to ")[2].partition(",")[0])
    assert explained(memory_budget=0.5, max_slowdown=enough).fits
    again = BudgetInfeasible(**json.loads(json.dumps(error.figures() | {"occupants": []})) | {"remedies": []})
    assert again.least_slowdown == error.least_slowdown


def test_the_error_says_if_no_plan_fits_the_memory():
    with pytest.raises(BudgetInfeasible) as raised:
        explained(memory_budget=1000, max_slowdown=0.01)
    assert raised.value.least_slowdown is None
    assert raised.value.minimum_bytes > raised.value.untimed_bytes > 1000
    assert "least slow-down found within memory_budget:  no plan fits" in str(raised.value)
    assert "raise max_slowdown" not in str(raised.value)


@pytest.mark.slow
def test_by_best_effort_the_memory_takes_precedence():
    options = {"memory_budget": 0.5, "max_slowdown": 0.01, "on_infeasible": "best_effort"}
    report = explained(**options)
    assert report.within_budget
    assert not report.keeps_time
    assert report.timed_minimum_bytes > report.budget_bytes
    assert "MORE than the allowed 1.0%" in str(report)
    torch._dynamo.reset()
    with pytest.warns(BudgetWarning, match="over its max_slowdown of 1.0%.*within that time the minimum peak"):
        torch.compile(loss, backend="autoremat", options=EAGER | options)(X).backward()


def test_a_policy_demands_recomputation_within_the_time():
    exact, bounded = explained(policy="full"), explained(policy="full", max_slowdown=0.0)
    assert bounded.slowdown <= 1e-9
    assert bounded.predicted_peak_bytes <= exact.predicted_peak_bytes
    assert bounded.recomputed_ops > 0


@pytest.mark.slow
def test_chunks_of_the_loss_are_compared_by_their_peaks():
    head = nn.Linear(16, 512)
    tokens = torch.randint(512, (256,))

    def token_loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(x), tokens)

    hidden = torch.randn(256, 16)
    plain = autoremat.explain(token_loss, hidden, options=EAGER | {"max_slowdown": 1.0})
    chunked = autoremat.explain(token_loss, hidden, options=EAGER | {"max_slowdown": 1.0, "chunk_loss": True})
    always = autoremat.explain(token_loss, hidden, options=EAGER | {"max_slowdown": 0.0, "chunk_loss": 8})
    assert plain.loss_chunks == 1
    assert chunked.loss_chunks > 1
    assert chunked.predicted_peak_bytes < plain.predicted_peak_bytes
    assert always.loss_chunks == 8
    assert always.slowdown == pytest.approx(0.0, abs=1e-9)


def gradients(**options: object) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    torch.compile(loss, backend="autoremat", options=EAGER | options)(X).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_those_without_recomputation():
    expected, found = gradients(memory_budget=1.0), gradients(max_slowdown=0.1)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    report = autoremat.reports()[-1]
    assert report.max_slowdown == 0.1
    assert report.recomputed_ops > 0


def test_another_rank_takes_the_plan_with_its_time():
    def look(preview: Preview) -> tuple[Report, Report]:
        leading = plan_graph(preview.priced, preview.context)
        told = ToldPlan(PlanFile.of(leading.plan), leading.report.loss_chunks)
        following = plan_graph(preview.priced, dataclasses.replace(preview.context, told=told))
        assert leading.report is not None
        assert following.report is not None
        return leading.report, following.report

    options = Options.parse(EAGER | {"max_slowdown": 0.05})
    [(leading, following)], _ = previews(loss, (X,), {}, options, None, look)
    assert following.slowdown == pytest.approx(leading.slowdown)
    assert following.seconds_without_budget == leading.seconds_without_budget
    assert following.predicted_peak_bytes == leading.predicted_peak_bytes
    assert following.max_slowdown == 0.05


def test_ranks_with_other_budgets_of_time_do_not_agree():
    options = [json.loads(key_of(Options.parse({"max_slowdown": share}))) for share in (0.03, 0.1)]
    with pytest.raises(AgreementError, match="max_slowdown is 0.03 on rank 0, 0.1 on rank 1"):
        _compare_options({rank: {"options": one} for rank, one in enumerate(options)})


@pytest.mark.slow
def test_max_batch_keeps_to_the_time():
    options = EAGER | {"max_slowdown": 0.01}
    fit = autoremat.max_batch(lambda rows: torch.randn(rows, 32), loss, "400KiB", step=64, limit=256, options=options)
    assert fit.size < 256
    assert fit.report.slowdown <= 0.01
    assert explained(memory_budget="400KiB").fits  # of 256 rows, but slower


@pytest.mark.slow
def test_generated_code_is_taken_at_any_peak():
    torch._dynamo.reset()
    report = autoremat.explain(loss, X, options={"cost_model": "roofline", "max_slowdown": 0.1}, lower=True)
    assert report.compiled_peak_bytes is not None
    assert report.replans == 0
    assert report.slowdown <= 0.1
    assert dataclasses.replace(report, max_slowdown=None).keeps_time
