"""The profile that ranks share: which plans it may take."""

from __future__ import annotations

from autoremat.compiler.agreed_profile import Gathers, agreed_step
from autoremat.planner.multigraph.ledger import Moment, PlanPoint
from autoremat.planner.multigraph.step_profile import Step, StepGraph
from autoremat.request.request import Request


def step_of(peak: int) -> Step:
    point = PlanPoint(0.0, 0, peak, peak)
    graph = StepGraph("key", "train.py:7", 1, (point,), point)
    return Step((graph,), (Moment(0, running=0, backward=True),), (), "cpu")


def test_gathers_run_once_if_their_ranks_do_not_share_the_plans():
    def profile(ranks: set[int]) -> int:
        gathers = Gathers(frozenset(ranks), lambda: step_of(700))
        return agreed_step(step_of(400), Request(), "a step", gathers=gathers).step.shared_out(None).peak_bytes

    assert profile({0, 1}) == 700  # this process is alone
    assert profile(set()) == 400
