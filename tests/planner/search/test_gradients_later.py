"""Gradients behind the fusible ops that follow them: what moves, what stays, and what a plan gains and never loses by it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, close_under_need, graphs, saved_sets, stays_of, with_forms

from autoremat.planner.graph.forms import Engine, Form, Transfer
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind, Role, Trait
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.bound_forms import BoundForms, set_aside
from autoremat.planner.search.gradients_later import with_gradients_later
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.strategies import EVERY_STRATEGY, IN_SEQUENCE, Strategies
from autoremat.planner.search.work_limit import WorkLimit

BYTE = 0.001
"""Seconds to read or write one byte in these graphs."""

POINTWISE = {"kind": Kind.POINTWISE, "seconds": 0.4, "memory_bound_seconds": 0.4}


class Layers:
    """Layers with activations between them: `h -> x = f(h) -> h' = x @ w`. Their gradients come as autograd traces them."""

    def __init__(self, *sizes: int, casts: int = 0, chain: int = 0, trait: Trait = Trait.NONE, **fields: object) -> None:
        build = GraphBuilder()
        hidden, activations, made = [build.op([build.source(0)], sizes[0])], [], []
        for size in sizes:
            activations.append(build.op([hidden[-1]], size, **POINTWISE))
            hidden.append(build.op([activations[-1]], size))
        gradient, self.gradients = build.source(0, Role.TANGENT), []
        for h, x, size in reversed(list(zip(hidden, activations, sizes, strict=False))):
            dx = build.op([gradient], size, forward=False)
            of_weight = build.op([gradient, x], 1, forward=False, traits=trait)
            self.gradients.append(build.values[of_weight].producer)
            gradient = build.op([dx, h], size, forward=False, in_place=(dx,), **POINTWISE)
            for _ in range(chain):
                gradient = build.op([gradient], size, forward=False, in_place=(gradient,), **POINTWISE)
            for _ in range(casts):
                of_weight = build.op([of_weight], 1, forward=False, **(POINTWISE | fields))
            made.append(of_weight)
        made.append(build.op([gradient], 1, forward=False))
        self.graph = build.graph(
            forward_outputs=(hidden[-1],), backward_outputs=tuple(made), fuses=True, saving_seconds_per_byte=2 * BYTE,
            launch_seconds=0.001,
        )  # fmt: skip
        self.plan = Plan.of(self.graph, build_schedule(self.graph, hidden[:-1]), "by hand")


def run_later(plan: Plan, **keywords: object) -> Plan:
    found = with_gradients_later(plan, WorkLimit(), **keywords)
    found.check()
    return found


def moved(layers: Layers, found: Plan) -> list[bool]:
    """Whether each gradient of a weight, the last layer's first, runs behind the gradient that follows it in the graph."""
    own = found.schedule.own(layers.graph)
    return [own.index(index) > own.index(index + 1) for index in layers.gradients]


def test_a_repeated_activation_and_its_gradient_share_a_kernel():
    layers = Layers(100)
    found = run_later(layers.plan)
    assert moved(layers, found) == [True]
    saved_read, saved_launch = 100 * BYTE, 0.001
    assert layers.plan.predicted_seconds - found.predicted_seconds == pytest.approx(saved_read + saved_launch)
    assert (found.saved, found.cost_seconds) == (layers.plan.saved, layers.plan.cost_seconds)
    assert sorted(found.recomputed) == sorted(layers.plan.recomputed)
    assert found.peak_bytes <= layers.plan.peak_bytes


def test_casts_of_a_gradient_move_with_it():
    layers = Layers(100, casts=2)
    found = run_later(layers.plan)
    own = found.schedule.own(layers.graph)
    place = own.index(layers.gradients[0])
    assert [layers.graph.ops[index].kind for index in own[place - 1 : place + 3]] == [
        Kind.POINTWISE, Kind.EXTERN, Kind.POINTWISE, Kind.POINTWISE,
    ]  # fmt: skip
    assert own[place + 3] == len(layers.graph.ops) - 1


@pytest.mark.parametrize("trait", [Trait.COLLECTIVE, Trait.RANDOM, Trait.EFFECTFUL])
def test_no_effect_moves(trait):
    layers = Layers(100, trait=trait)
    assert run_later(layers.plan) is layers.plan


@pytest.mark.parametrize("fields", [{"traits": Trait.OPAQUE}, {"kind": Kind.REDUCTION}], ids=["opaque", "reduction"])
def test_a_gradient_that_more_than_a_cast_reads_stays(fields):
    layers = Layers(100, 100, casts=1, **fields)
    assert run_later(layers.plan) is layers.plan


@pytest.mark.parametrize("chain", [0, 2])
def test_a_gradient_between_ops_that_share_nothing_stays(chain):
    """A plan that saves the activation does not run it again, so there is no kernel to share."""
    layers = Layers(100, 100, chain=chain)
    whole = Plan.of(layers.graph, build_schedule(layers.graph, layers.graph.backward_needs))
    assert run_later(whole, budget=2 * whole.peak_bytes) is whole


def test_without_fusion_there_is_no_kernel_to_share():
    graph = dataclasses.replace(Layers(100).graph, fuses=False)
    plan = Plan.of(graph, Layers(100).plan.schedule)
    assert run_later(plan) is plan


def with_a_full_moment(layers: Layers) -> Plan:
    """The plan of `layers` where the last layer's activation has a workspace that makes the group of its gradient the peak."""
    (full,) = [layers.gradients[0] + 1]
    ops = list(layers.graph.ops)
    ops[full] = dataclasses.replace(ops[full], workspace_bytes=10_000)
    graph = dataclasses.replace(layers.graph, ops=tuple(ops))
    return Plan.of(graph, layers.plan.schedule)


def test_moves_that_raise_the_peak_are_left_out_one_by_one():
    layers = Layers(100, 100, 100, 100)
    plan = with_a_full_moment(layers)
    found = run_later(plan)
    assert moved(layers, found) == [False, True, True, True]
    assert found.peak_bytes == plan.peak_bytes
    assert moved(layers, run_later(plan, budget=2 * plan.peak_bytes)) == [True, True, True, True]


def test_a_move_that_makes_the_step_longer_is_not_made():
    """What reads a sum that the kernel ends with runs in another pass there, so a large tensor is read twice."""
    build = GraphBuilder()
    large = build.op([build.source(0)], 1000)
    out = build.op([large], 1)
    dx = build.op([build.source(0, Role.TANGENT)], 100, forward=False)
    total = build.op([dx], 1, forward=False, kind=Kind.REDUCTION, ends_pass=True)
    of_weight = build.op([dx], 1, forward=False)
    bound = {"kind": Kind.POINTWISE, "seconds": 4.0, "memory_bound_seconds": 4.0}
    both = [build.op(read, 1000, forward=False, **bound) for read in ([total, large], [large])]
    last = build.op(both, 1, forward=False)
    graph = build.graph(
        forward_outputs=(out,), backward_outputs=(of_weight, last), fuses=True, saving_seconds_per_byte=2 * BYTE,
    )  # fmt: skip
    plan = Plan.of(graph, build_schedule(graph, graph.backward_needs))
    assert run_later(plan, budget=2 * plan.peak_bytes) is plan


def test_only_accepted_plans_count():
    layers = Layers(100, 100)
    first = layers.gradients[0]
    found = run_later(layers.plan, accepts=lambda plan: plan.schedule.own(layers.graph)[1] == first)
    assert moved(layers, found) == [False, True]
    assert run_later(layers.plan, accepts=lambda plan: False) is layers.plan


def test_no_work_no_moves():
    layers = Layers(100)
    assert with_gradients_later(layers.plan, WorkLimit(0.0)) is layers.plan


@st.composite
def layered(draw: st.DrawFn) -> Graph:
    """Graphs of layers, most of whose gradients may move."""
    sizes = draw(st.lists(st.sampled_from([1, 100, 1000]), min_size=1, max_size=5))
    graph = Layers(*sizes, casts=draw(st.integers(0, 2)), chain=draw(st.integers(0, 2))).graph
    return dataclasses.replace(graph, fusion_groups_hold_buffers=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_plan_never_loses_by_it(data):
    """Stays keep to their rules: the check of plans knows them by its own arithmetic."""
    graph = with_forms(data.draw(st.one_of(layered(), graphs(max_ops=30, fuses=True))))
    schedule = build_schedule(graph, close_under_need(graph, data.draw(saved_sets(graph))))
    stays = data.draw(stays_of(graph, schedule))
    plan = Plan.of(graph, Schedule(schedule.forward, schedule.backward, stays))
    budget = data.draw(st.sampled_from([None, 2 * plan.peak_bytes]))
    found = with_gradients_later(plan, WorkLimit(), budget)
    found.check(ignores_recompute=True)
    assert found.peak_bytes <= (plan.peak_bytes if budget is None else budget)
    assert found.cost_seconds <= plan.cost_seconds * (1 + 1e-8)
    assert found.host_bytes <= plan.host_bytes
    assert found.predicted_seconds <= plan.predicted_seconds * (1 + 1e-8)
    assert sorted(found.schedule.backward) == sorted(plan.schedule.backward)
    assert (set(found.saved), found.stored_bytes) == (set(plan.saved), plan.stored_bytes)


def find(graph: Graph, share: float, **keywords: object) -> Plan:
    planner = Planner(graph, **keywords)
    found = planner.find(int(share * planner.baseline.peak_bytes)).plan
    assert found is not None
    return found


def test_the_planner_chooses_the_sequence_of_plans_that_keep_it():
    graph = Layers(100, 100, 100, 100).graph
    found, in_sequence = find(graph, 0.8), find(graph, 0.8, strategies=IN_SEQUENCE)
    assert found.recomputed
    assert not found.schedule.keeps_sequence(graph)
    assert in_sequence.schedule.keeps_sequence(graph)
    assert found.cost_seconds == in_sequence.cost_seconds
    assert found.predicted_seconds < in_sequence.predicted_seconds
    assert find(graph, 1.0).schedule.keeps_sequence(graph)


def test_the_bound_is_that_of_plans_in_sequence():
    graph = Layers(100, 100, 100, 100).graph
    planner = Planner(graph)
    budget = int(0.8 * planner.baseline.peak_bytes)
    expected = Planner(graph, strategies=IN_SEQUENCE).find(budget).lower_bound_seconds
    assert planner.find(budget).lower_bound_seconds == pytest.approx(expected)
    assert expected > 0


def test_a_move_that_a_transfer_then_waits_for_is_not_made():
    """The kernels get shorter, so they hide less of the load: the step takes as long, but more of it is added to its least."""
    layers = Layers(100, 100)
    stored = min(layers.plan.saved)
    host = Form("host", Transfer(Engine.TO_HOST, 0.1), Transfer(Engine.FROM_HOST, 20.0), host_bytes=100)
    values = list(layers.graph.values)
    values[stored] = dataclasses.replace(values[stored], forms=(host,))
    schedule, border = layers.plan.schedule, len(layers.plan.schedule.forward)
    need = next(at for at in range(border, len(schedule.sequence)) if stored in layers.graph.ops[schedule.sequence[at]].inputs)
    stay = Stay(stored, "host", 1, border - 1, border, need)
    plan = Plan.of(dataclasses.replace(layers.graph, values=tuple(values)), dataclasses.replace(schedule, stays=(stay,)))
    found = run_later(plan)
    assert plan.stall_seconds > 0
    assert found.cost_seconds == pytest.approx(plan.cost_seconds)
    assert moved(layers, found) == [False, True]


def test_gradients_move_once_values_have_the_form_that_constraints_demand():
    graph = Layers(100, 100, 100, 100).graph
    stored = min(Planner(graph).baseline.saved)
    host = Form("host", Transfer(Engine.TO_HOST, 0.01), Transfer(Engine.FROM_HOST, 0.01), host_bytes=100)
    values = [dataclasses.replace(v, forms=(host,) if number == stored else ()) for number, v in enumerate(graph.values)]
    graph, bound = dataclasses.replace(graph, values=tuple(values)), frozenset({stored})
    inner, _ = set_aside(graph, bound, None)

    def find(later: WorkLimit | None) -> Plan:
        source = BoundForms(Planner(inner, strategies=EVERY_STRATEGY & ~Strategies.RUN_LATER), graph, bound, None, later)
        found = source.find(int(0.8 * source.baseline.peak_bytes)).plan
        assert found is not None
        return found

    in_sequence, found = find(None), find(WorkLimit(10.0))
    assert {stay.value for stay in found.schedule.stays} == {stay.value for stay in in_sequence.schedule.stays} == {stored}
    assert in_sequence.schedule.keeps_sequence(graph)
    assert not found.schedule.keeps_sequence(graph)
    assert found.predicted_seconds < in_sequence.predicted_seconds
