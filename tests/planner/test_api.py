"""The planning interface: what every solver promises for every graph, and known optima."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_oracle import replay_bytes
from oracles import least_added_seconds
from strategies import changed, dags, graphs, training_chain

from autoremat.basics.errors import OptionsError
from autoremat.planner.api import SOLVERS, plan
from autoremat.planner.exact import annealing
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.simulator import simulate
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan, Status
from autoremat.planner.search.lower_bounds import lower_bound
from autoremat.planner.search.starts import split_at, without_recomputation

every_solver = pytest.mark.parametrize("solver", SOLVERS)


def shares(graph: Graph, count: int = 6) -> list[int]:
    """Budgets from little to more than enough, a byte apart where the graph is small."""
    peak = without_recomputation(graph).peak_bytes
    return sorted({max(1, peak * part // count) for part in range(1, count + 1)} | {max(1, peak - 1), peak + 1})


def slack(seconds: float) -> float:
    """What rounding may add: bounds come from capacities that are integers."""
    return seconds * 1e-6 + 1e-9


@pytest.fixture(autouse=True, scope="module")
def few_moves():
    """The graphs are small, so that most of the usual number would be made in vain."""
    with pytest.MonkeyPatch.context() as patch:
        fewer = dataclasses.replace(annealing.settings, moves_per_second=annealing.settings.moves_per_second // 10)
        patch.setattr(annealing, "settings", fewer)
        yield


@every_solver
@settings(max_examples=25)
@given(st.one_of(dags(), graphs(max_ops=20)))
def test_every_plan_keeps_what_it_says(solver, graph):
    if solver == "ilp":
        graph = changed(graph, fuses=False)
    for budget in shares(graph, 3):
        found = plan(graph, budget, solver)
        found.check()
        assert found.peak_bytes == simulate(graph, found.schedule).peak_bytes
        assert found.peak_bytes == max(replay_bytes(graph, found.schedule), default=0)
        assert found.peak_bytes >= found.lower_bound_bytes
        assert (found.status is Status.INFEASIBLE) == (found.peak_bytes > budget)
        if found.status is not Status.INFEASIBLE:
            assert found.cost_seconds >= found.lower_bound_seconds - slack(graph.step_seconds)
        assert not found.interrupted


@settings(max_examples=25)
@given(st.one_of(dags(), graphs(max_ops=20)))
def test_a_larger_budget_never_costs_more_though_planned_afresh(graph):
    plans = [plan(graph, budget, "min_cut") for budget in (*shares(graph, 12), None)]
    fitting = [found for found in plans if found.status is not Status.INFEASIBLE]
    assert fitting == plans[len(plans) - len(fitting) :]
    costs = [found.cost_seconds for found in fitting]
    assert all(after <= before * (1 + 1e-9) + 1e-12 for before, after in zip(costs, costs[1:], strict=False))


@settings(max_examples=15)
@given(dags())
def test_all_means_together_are_never_worse_than_one_alone(graph):
    for budget in shares(graph, 4):
        best, other = plan(graph, budget), plan(graph, budget, "min_cut")
        if other.status is not Status.INFEASIBLE:
            assert best.added_seconds <= max(other.added_seconds, best.lower_bound_seconds + 0.01 * graph.step_seconds)
            assert best.peak_bytes <= budget


@every_solver
@settings(max_examples=15)
@given(dags())
def test_equal_questions_have_equal_answers(solver, graph):
    for budget in (0.5, 0.8, None):
        first, second = (plan(graph, budget, solver, seed=3) for _ in range(2))
        assert first.schedule == second.schedule
        assert first == second


@pytest.mark.parametrize("single_phase", [True, False])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_bound_is_over_the_optimum_and_no_plan_under_it(single_phase, data):
    graph = data.draw(dags(max_ops=6, single_phase=single_phase))
    if not single_phase:
        graph = dataclasses.replace(graph, forward_outputs=())
    for budget in shares(graph):
        optimum, bound = least_added_seconds(graph, budget), lower_bound(graph, Limits(budget))
        assert bound.seconds <= optimum + slack(graph.step_seconds)
        assert math.isinf(optimum) or bound.peak_bytes <= budget
        for solver in SOLVERS:
            found = plan(graph, budget, solver)
            if found.status is not Status.INFEASIBLE:
                assert found.added_seconds >= optimum - slack(graph.step_seconds)
            if found.status is Status.OPTIMAL:
                assert found.added_seconds <= optimum + slack(graph.step_seconds)


@settings(max_examples=40)
@given(dags(single_phase=True), st.data())
def test_a_plan_of_a_split_is_a_plan_of_the_whole(graph, data):
    if len(graph.ops) < 2:
        return
    half = split_at(graph, data.draw(st.integers(1, len(graph.ops) - 1)))
    for budget in (0.5, None):
        found = plan(half, budget)
        whole = Plan.of(graph, Schedule(found.sequence, ()))
        whole.check()
        assert (whole.peak_bytes, whole.added_seconds) == (found.peak_bytes, found.added_seconds)


@pytest.mark.parametrize(("length", "budget", "optimum"), [(3, 3, 1), (4, 3, 3), (5, 3, 6), (4, 4, 1), (5, 4, 2), (6, 4, 3)])
def test_chains_with_few_places_cost_what_griewank_says(length, budget, optimum):
    """Reversing a chain of so many steps with so many checkpoints, by brute force; no solver and no bound contradicts it."""
    for single_phase in (True, False):
        graph = training_chain(length, single_phase)
        assert least_added_seconds(graph, budget) == optimum
        assert lower_bound(graph, Limits(budget)).seconds <= optimum
        found = plan(graph, budget)
        assert found.status is Status.INFEASIBLE or found.added_seconds >= optimum


@pytest.mark.parametrize("single_phase", [True, False])
@pytest.mark.parametrize("length", [4, 5, 6, 8])
def test_a_chain_that_lacks_one_place_is_planned_optimally(length, single_phase):
    graph = training_chain(length, single_phase)
    found = plan(graph, without_recomputation(graph).peak_bytes - 1)
    assert (found.added_seconds, found.status) == (1.0, Status.OPTIMAL)


@pytest.mark.parametrize("single_phase", [True, False])
def test_a_long_chain_is_planned_close_to_its_bound(single_phase):
    graph = training_chain(60, single_phase)
    for share in (0.8, 0.6, 0.4, 0.3):
        assert plan(graph, share).gap <= 0.01


def test_budgets_are_given_as_in_options():
    graph = training_chain(8, size=1024)
    peak = without_recomputation(graph).peak_bytes
    assert plan(graph).budget_bytes is None
    assert plan(graph, 0.5).budget_bytes == peak // 2
    assert plan(graph, "5KiB").budget_bytes == 5 * 1024
    for refused in (0, -1, 1.5, "auto", True):
        with pytest.raises(OptionsError):
            plan(graph, refused)
    with pytest.raises(OptionsError, match="time_limit"):
        plan(graph, time_limit=0)


@every_solver
def test_graphs_with_nothing_to_split(solver):
    assert plan(Graph.from_dag([], [], []), 0.5, solver).sequence == ()
    one = Graph.from_dag([1.0], [5], [], outputs=(0,))
    assert plan(one, 5, solver).status is Status.OPTIMAL
    assert plan(one, 4, solver).status is Status.INFEASIBLE
    assert plan(Graph.from_dag([1.0], [5], [], num_forward=0), None, solver).sequence == (0,)


@pytest.mark.parametrize("single_phase", [True, False])
def test_a_search_out_of_time_says_so_and_still_answers(single_phase):
    found = plan(training_chain(100, single_phase), 0.5, time_limit=1e-9)
    found.check()
    assert found.interrupted
    assert found.status in (Status.TIME_LIMIT, Status.INFEASIBLE)
