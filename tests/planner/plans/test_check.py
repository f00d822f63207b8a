"""`Plan.check` refuses exactly the changes of random plans that break a rule, and the figures of a plan are what they say."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import changed, dags, graphs, saved_sets

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.plans.plan import Plan, Status


def runs_what_it_must(graph: Graph, schedule: Schedule) -> bool:
    """Whether both halves hold the ops that they must, in a sequence that they may have."""
    first, count, forward = graph.num_forward, len(graph.ops), list(schedule.forward)
    own = [op for op in schedule.backward if op >= first]
    firsts = list(dict.fromkeys(forward)) if graph.single_phase else forward
    return (
        all(0 <= op < first for op in forward)
        and all(0 <= op < count for op in schedule.backward)
        and own == list(range(first, count))
        and firsts == sorted(set(forward))
        and graph.required_forward <= set(forward)
        and not (graph.single_phase and schedule.backward)
    )


def reads_what_is_there(graph: Graph, schedule: Schedule) -> bool:
    made = {v for v, value in enumerate(graph.values) if value.producer is None}
    for op in schedule.sequence:
        if not made.issuperset(graph.ops[op].inputs):
            return False
        made.update(graph.ops[op].outputs)
    return made.issuperset(graph.backward_outputs)


def crossing(graph: Graph, schedule: Schedule) -> set[int]:
    """The values that the backward takes from the forward."""
    wanted = {v for op in schedule.backward for v in graph.ops[op].inputs} | set(graph.backward_outputs)

    def is_read_first(value: int) -> bool:
        made = [at for at, op in enumerate(schedule.backward) if value in graph.ops[op].outputs]
        read = [at for at, op in enumerate(schedule.backward) if value in graph.ops[op].inputs]
        return not made or (bool(read) and min(read) <= min(made))

    return {v for v in wanted.intersection(graph.forward_values) if is_read_first(v)}


def keeps_constraints(graph: Graph, schedule: Schedule) -> bool:
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        runs_once = schedule.sequence.count(index) <= 1 and index not in schedule.backward
        if not runs_once and (not op.rematerializable or op.constraint is Constraint.SAVE):
            return False
        is_saved = not crossing(graph, schedule).difference(graph.forward_outputs).isdisjoint(op.outputs)
        if is_saved and op.rematerializable and op.constraint is Constraint.RECOMPUTE:
            return False
    return True


@st.composite
def changed_schedules(draw: st.DrawFn, plan: Plan) -> Schedule:
    """The schedule of `plan` with one or two executions put in, left out, exchanged or moved, also to the other half."""
    halves, ops = [list(plan.schedule.forward), list(plan.schedule.backward)], st.integers(-2, len(plan.graph.ops) + 1)
    for _ in range(draw(st.integers(1, 2))):
        half, other = (halves[draw(st.integers(0, 1))] for _ in range(2))
        change = draw(st.sampled_from(["put in", "leave out", "exchange", "move"])) if half else "put in"
        op = draw(ops) if change == "put in" else half.pop(draw(st.integers(0, len(half) - 1)))
        if change != "leave out":
            other.insert(draw(st.integers(0, len(other))), draw(ops) if change == "exchange" else op)
    return Schedule(*map(tuple, halves))


def passes(plan: Plan) -> bool:
    try:
        plan.check()
    except PlanInvalid:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    graph = draw(st.one_of(graphs(max_ops=14), dags(max_ops=10)))
    calls = 1 if graph.single_phase else draw(st.integers(1, 3))
    graph = changed(graph, in_flight=calls)
    return Plan.of(graph, build_schedule(graph, draw(saved_sets(graph))))


@given(st.data())
def test_a_changed_schedule_passes_exactly_if_it_obeys_all_rules(data):
    plan = data.draw(plans())
    assert passes(plan)
    schedule = data.draw(changed_schedules(plan))
    obeys = runs_what_it_must(plan.graph, schedule) and reads_what_is_there(plan.graph, schedule)
    changed = Plan.of(plan.graph, schedule) if obeys else dataclasses.replace(plan, schedule=schedule)
    assert passes(changed) == (obeys and keeps_constraints(plan.graph, schedule))
    assert passes(dataclasses.replace(plan, schedule=schedule)) == (schedule == plan.schedule)


@given(st.data())
def test_a_changed_timeline_is_refused(data):
    plan, more = data.draw(plans()), data.draw(st.sampled_from([-1, 1, 2]))
    bytes_at = plan.timeline.bytes_at.copy()
    if len(bytes_at):
        bytes_at[data.draw(st.integers(0, len(bytes_at) - 1))] += more
        assert not passes(dataclasses.replace(plan, timeline=dataclasses.replace(plan.timeline, bytes_at=bytes_at)))


def diamond() -> Plan:
    """One phase; value 0 is freed and made again."""
    graph = Graph.from_dag([1.0] * 4, [8, 1, 4, 1], [(0, 1), (1, 2), (2, 3), (0, 3)], outputs=(1,))
    return Plan.of(graph, Schedule((0, 1, 2, 0, 3), ()))


def test_what_is_freed_when():
    plan = diamond()
    assert plan.frees == ((), (0,), (), (), (2, 0, 3))
    assert (plan.recomputed, plan.timeline.bytes_at.tolist()) == ((0,), [8, 9, 5, 13, 14])


@pytest.mark.parametrize(
    ("facts", "status", "gap"),
    [
        ({}, Status.FEASIBLE, 1.0 / 4),
        ({"interrupted": True}, Status.TIME_LIMIT, 1.0 / 4),
        ({"lower_bound_seconds": 1.0, "interrupted": True, "budget_bytes": 14}, Status.OPTIMAL, 0.0),
        ({"lower_bound_seconds": 0.5}, Status.FEASIBLE, 0.5 / 4.5),
        ({"budget_bytes": 13}, Status.INFEASIBLE, 1.0 / 4),
        ({"budget_bytes": 5, "lower_bound_seconds": math.inf}, Status.INFEASIBLE, math.inf),
    ],
)
def test_status_and_gap(facts, status, gap):
    plan = dataclasses.replace(diamond(), **facts)
    assert (plan.status, plan.gap) == (status, pytest.approx(gap))


def test_a_plan_is_checked_against_the_graph_that_is_given():
    plan = diamond()
    once = [False, True, True, True]
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    with pytest.raises(PlanInvalid, match="op0 may not run twice"):
        plan.check(Graph.from_dag([1.0] * 4, [8, 1, 4, 1], edges, outputs=(1,), rematerializable=once))
    with pytest.raises(PlanInvalid, match="not 14 as the plan says"):
        plan.check(Graph.from_dag([1.0] * 4, [8, 1, 4, 9], edges, outputs=(1,)))
