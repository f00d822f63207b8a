"""Constraints by pattern and policy on graphs without torch: what they point at, that plans obey them, what is refused."""

import warnings
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, chain, graphs

from autoremat.basics.errors import ConstraintWarning
from autoremat.planner.constraints.constraints import Constraints
from autoremat.planner.constraints.model_structure import Forward
from autoremat.planner.constraints.policies import Region, matches_op, matches_path
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Role, Scope, Trait
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner


def named(graph: Graph) -> Graph:
    """Every result has its op's name."""
    return replace(graph, ops=tuple(replace(op, tensor_names=(op.name,)) for op in graph.ops))


def quietly(orders: Constraints, graph: Graph):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstraintWarning)
        return orders.apply(graph)


def disobeyed(plan: Plan, save: set[int], recompute: set[int]) -> list[str]:
    """The orders that ``plan`` does not obey, from its sequence alone."""
    graph, ran, wrong = plan.graph, list(plan.schedule.sequence), []
    wrong += [f"{graph.ops[i].name} runs {ran.count(i)} times" for i in save if ran.count(i) > 1]
    fresh: set[int] = set()
    for index in plan.schedule.backward:
        for value in graph.ops[index].inputs:
            producer = graph.values[value].producer
            crosses = value not in fresh and value not in graph.forward_outputs
            if producer in recompute and crosses:
                wrong.append(f"{graph.values[value].name} of {graph.ops[producer].name} is saved")
        fresh.update(graph.ops[index].outputs)
    return wrong


def possible(graph: Graph, index: int) -> bool:
    op = graph.ops[index]
    return op.rematerializable and not (op.outputs and set(op.outputs) <= set(graph.forward_outputs))


class Drawn:
    """A policy of given regions."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions

    def __call__(self, forward: Forward) -> list[Region]:
        return self.regions


@st.composite
def ordered_graphs(draw: st.DrawFn):
    graph = named(draw(graphs(max_ops=30)))
    forward = range(graph.num_forward)
    some = st.sets(st.sampled_from(forward), max_size=6)
    stretches = draw(st.lists(st.tuples(st.sampled_from(forward), st.integers(1, 6), st.booleans()), max_size=3))
    regions = [Region(tuple(range(a, min(a + n, graph.num_forward))), both) for a, n, both in stretches]
    return graph, draw(some), draw(some), regions


@settings(max_examples=60)
@given(ordered_graphs(), st.sampled_from([None, 1.0, 0.8, 0.5, 0.2]))
def test_every_plan_obeys_every_order(drawn, share):
    graph, save, recompute, regions = drawn
    orders = Constraints(
        tuple(f"op{i}" for i in save), tuple(f"op{i}" for i in recompute), Drawn(regions) if regions else None, share is None
    )
    ordered = quietly(orders, graph)
    tagged = {i for i, op in enumerate(graph.ops[: graph.num_forward]) if op.constraint is Constraint.SAVE}
    to_save = save | tagged
    to_recompute = {i for i in recompute - to_save if possible(graph, i)}
    assert all(ordered.graph.ops[i].constraint is Constraint.SAVE for i in to_save)
    assert all(ordered.graph.ops[i].constraint is Constraint.RECOMPUTE for i in to_recompute)
    planner = Planner(ordered.graph, given=() if ordered.candidate is None else (ordered.candidate,))
    baseline = planner.baseline.peak_bytes
    plans = [planner.find(Limits(None if share is None else int(share * baseline))).plan, planner.smallest, planner.lowest]
    plans += [*planner.plans, *planner.found]
    if ordered.candidate is not None and share is None:
        plans.append(planner.judge(ordered.candidate, None).plan)
    for plan in filter(None, plans):
        plan.check()
        assert not disobeyed(plan, to_save, to_recompute), plan.label


@settings(max_examples=40)
@given(ordered_graphs())
def test_a_policy_without_a_budget_is_the_plan(drawn):
    """What it recomputes is not saved, and nothing else runs twice."""
    graph, _, _, regions = drawn
    graph = replace(graph, ops=tuple(replace(op, constraint=Constraint.NONE) for op in graph.ops))
    plan = quietly(Constraints(policy=Drawn(regions), exact=True), graph).candidate
    inside = {i for region in regions for i in region.ops}
    assert {op for op in plan.recomputed} <= inside
    assert not disobeyed(plan, set(range(graph.num_forward)) - inside, set())
    whole = {i for region in regions if region.results_too for i in region.ops if possible(graph, i)}
    assert not disobeyed(plan, set(), whole)


def test_a_region_is_recomputed_when_the_backward_enters_it_and_kept_until_it_leaves():
    """Eight layers of one op: value i is made by op i - 1 and read by op i and by the backward of both."""
    regions = [Region((0, 1, 2)), Region((3, 4, 5))]
    plan = Constraints(policy=Drawn(regions), exact=True).apply(chain(8)).candidate
    # Backward op 8 + i differentiates op 7 - i. The results of the regions, values 3 and 6, are saved; 7 and 8 are kept.
    assert plan.schedule.backward == (8, 9, 3, 4, 10, 11, 12, 0, 1, 13, 14, 15)
    assert set(plan.saved) == {3, 6, 7, 8}


def small() -> Graph:
    build = GraphBuilder()
    x = build.source(4)
    layers = [(Scope("model.layers.0.mlp", "MLP"),), (Scope("model.layers.1.mlp", "MLP"),), (Scope("model.head", "Linear"),)]
    first = build.op([x], 4, scopes=layers[0], decomposed_from="aten.gelu.default", tensor_names=("hidden",))
    mask = build.op([first], 4, scopes=layers[1], traits=Trait.RANDOM)
    last = build.op([first, mask], 4, scopes=layers[2])
    tangent = build.source(4, Role.TANGENT)
    gradient = build.op([tangent, first, mask, last], 4, forward=False)
    return build.graph(forward_outputs=(last,), backward_outputs=(gradient,))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("layers.1.mlp", r"may not run twice \(random\)"), ("model.head", "its result is an output, which the caller holds")],
)
def test_an_order_to_recompute_what_cannot_be_is_refused_with_the_reason(pattern, reason):
    with pytest.warns(ConstraintWarning, match=reason):
        ordered = Constraints(recompute=(pattern,)).apply(small())
    assert all(op.constraint is Constraint.NONE for op in ordered.graph.ops)


@pytest.mark.parametrize(
    ("option", "pattern", "near"),
    [("save", "layers.*.mpl", "'model.layers.*.mlp'"), ("recompute", "zzz", "nothing there is similar")],
)
def test_a_pattern_that_matches_nothing_warns_with_near_matches(option, pattern, near):
    with pytest.warns(ConstraintWarning) as caught:
        Constraints(**{option: (pattern,)}).apply(small())
    message = str(caught[0].message)
    assert message.startswith(f"{option}: {pattern!r} matches nothing in a graph of 3 forward ops; ")
    assert near in message


def test_a_policy_without_effect_warns():
    with pytest.warns(ConstraintWarning, match="each of its 1 regions has only ops whose results others read"):
        Constraints(policy=Drawn([Region((2,))]), exact=True).apply(chain(6))


def test_patterns_match_paths_ops_and_names():
    op = small().ops[0]
    for pattern in ("layers.*.mlp", "model.layers.0.mlp", "model.layers.0", "*.mlp", "mlp", "layers.*", "model", "hidden",
                    "aten.gelu", "aten.gelu.default", "aten.*", "test.op", "h*n"):  # fmt: skip
        assert matches_op(op, pattern), pattern
    for pattern in ("layers.1", "yers.*.mlp", "aten.ge", "test", "hidde", "head"):
        assert not matches_op(op, pattern), pattern
    assert not matches_path("model.layers.0.mlp", "model.layers"), "the end may not be left out"
