"""Figures and words that people compare with one another agree: sums, percents, names of columns, what differs."""

import pytest
import torch
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.multigraph.step import Step, StepGraph
from autoremat.planner.multigraph.step_profile import share_out
from autoremat.planner.plans.limits import PlanPoint

FIRST, SECOND = nn.Linear(64, 256), nn.Linear(256, 64)
X = torch.zeros(32, 64)


def loss(x: torch.Tensor) -> torch.Tensor:
    return SECOND(FIRST(x).relu()).sum()


def broken(x: torch.Tensor) -> torch.Tensor:
    h = FIRST(x).tanh()
    torch._dynamo.graph_break()
    return SECOND(h).square().mean()


def by_explain(inner: str) -> None:
    autoremat.explain(loss, X, options={"memory_budget": 1000, "compiler": inner})


def by_survey(inner: str) -> None:
    autoremat.profile_step(broken, X, memory_budget=1000, options={"compiler": inner})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's, after a graph break
@pytest.mark.parametrize(("look", "inner"), [(by_explain, "aot_eager"), (by_explain, "inductor"), (by_survey, "aot_eager")])
def test_what_an_error_lists_sums_to_the_smallest_peak(look, inner):
    with pytest.raises(BudgetInfeasible) as raised:
        look(inner)
    error = raised.value
    assert sum(occupant.bytes for occupant in error.occupants) == error.minimum_bytes
    assert ("code headroom" in str(error)) == (inner == "inductor")


def test_what_a_step_lists_sums_to_its_peak_also_where_plans_count_what_was_not_alive():
    point = PlanPoint(0.0, 400, 500, 900)
    graph = StepGraph("key", "train.py:7", 1, (point,), point)
    step = Step((graph,), (Moment(-100, running=0, backward=True),), (), "cpu")
    with pytest.raises(BudgetInfeasible, match="1 tensor, 800 B") as raised:
        share_out(step, 10)
    assert [occupant.bytes for occupant in raised.value.occupants] == [800] == [raised.value.minimum_bytes]


def test_the_bound_on_the_peak_is_not_below_an_optimal_plan():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    report = autoremat.explain(lambda x: model(x).square().mean(), torch.randn(64, 8), options={"compiler": "aot_eager"})
    assert report.lower_bound_bytes == report.minimum_peak_bytes
