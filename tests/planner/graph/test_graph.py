"""The intermediate representation: what it refuses, what it derives, how it prints."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from strategies import GraphBuilder, chain, graphs

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import NOT_REMATERIALIZABLE, Kind, Op, Role, Trait, Value


def small() -> Graph:
    """x -> a -> b (output), a -> c (backward only); backward: d(tangent, c), e(d, a) -> gradient."""
    build = GraphBuilder()
    x = build.source(8)
    a = build.op([x], 16)
    b = build.op([a], 4)
    c = build.op([a], 32, kind=Kind.POINTWISE)
    tangent = build.source(4, Role.TANGENT)
    d = build.op([tangent, c], 16, forward=False)
    e = build.op([d, a], 8, forward=False, traits=Trait.RANDOM, seconds=2e-3)
    return build.graph(forward_outputs=(b,), backward_outputs=(e,))


def test_derived_facts_of_a_small_graph():
    graph = small()
    assert graph.num_forward == 3
    assert graph.readers == ((0,), (1, 2, 4), (), (3,), (3,), (4,), ())
    assert graph.forward_values == (1, 2, 3)
    assert graph.required_forward == {0, 1}
    assert graph.backward_needs == {1, 3}
    assert graph.forward_seconds == 2.0
    assert graph.producers([0, 3, 4, 5]) == [2, 3]
    assert graph.ancestors([4]) == {0, 2, 3, 4}
    assert graph.ancestors([4], available=frozenset({1})) == {2, 3, 4}


def test_a_forward_value_that_is_a_gradient_is_needed_by_the_backward():
    build = GraphBuilder()
    value = build.op([build.source(1)], 4)
    assert build.graph(backward_outputs=(value,)).backward_needs == {value}


def test_a_pinned_op_and_its_inputs_are_required():
    build = GraphBuilder()
    first = build.op([build.source(1)], 4)
    build.op([first])
    build.op([first], 4)
    assert build.graph(must_run=(1,)).required_forward == {0, 1}


def test_a_forward_op_behind_a_backward_op_is_refused():
    values = (Value("x", 1, None), Value("a", 1, 0), Value("b", 1, 1))
    ops = (Op("p", "t", (0,), (1,), forward=False), Op("q", "t", (0,), (2,), forward=True))
    with pytest.raises(ValueError, match="before the backward ops"):
        Graph(ops, values)


@pytest.mark.parametrize("reader", [0, 1])
def test_reading_what_is_not_yet_made_is_refused(reader):
    values = (Value("a", 1, 0), Value("b", 1, 1))
    inputs = ((1,), ()) if reader == 0 else ((), (1,))
    ops = (Op("p", "t", inputs[0], (0,), True), Op("q", "t", inputs[1], (1,), True))
    with pytest.raises(ValueError, match="reads b before it is computed"):
        Graph(ops, values)


def test_a_value_that_names_another_producer_is_refused():
    with pytest.raises(ValueError, match="v is an output of p but names another producer"):
        Graph((Op("p", "t", (), (0,), True),), (Value("v", 1, None),))


@pytest.mark.parametrize("trait", [t for t in Trait if t & NOT_REMATERIALIZABLE])
def test_an_op_with_any_trait_may_run_only_once(trait):
    assert not Op("p", "t", (), (), True, traits=trait).rematerializable
    assert not Op("p", "t", (), (), True, traits=trait | Trait.RANDOM).rematerializable


def test_every_trait_but_that_of_gathers_forbids_repetition():
    assert {t for t in Trait if t and not t & NOT_REMATERIALIZABLE} == {Trait.GATHER}
    assert Op("p", "t", (), (), True, traits=Trait.GATHER).rematerializable
    assert Op("p", "t", (), (), True).rematerializable


def test_graphs_cannot_be_changed():
    graph = small()
    for thing, name in [(graph, "ops"), (graph.ops[0], "seconds"), (graph.values[0], "bytes")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, None)


def test_dump():
    assert small().dump().splitlines() == [
        "   0 fwd %1:16 B = test.op(%0) 1.00 s extern",
        "   1 fwd %2:4 B = test.op(%1) 1.00 s extern",
        "   2 fwd %3:32 B = test.op(%1) 1.00 s pointwise",
        "   3 bwd %5:16 B = test.op(%4, %3) 1.00 s extern",
        "   4 bwd %6:8 B = test.op(%5, %1) 2.00 ms extern [RANDOM]",
    ]


def test_an_empty_graph_is_a_graph():
    graph = Graph((), ())
    assert (graph.num_forward, graph.readers, graph.forward_seconds, graph.dump()) == (0, (), 0.0, "")


@given(graphs())
def test_ancestors_are_closed_and_nothing_more(graph):
    roots = graph.producers(graph.backward_outputs)
    found = graph.ancestors(roots)
    assert set(roots) <= found
    for op in found:
        assert set(graph.producers(graph.ops[op].inputs)) <= found
        is_read = any(set(graph.ops[other].inputs) & set(graph.ops[op].outputs) for other in found)
        assert op in roots or is_read


@given(graphs())
def test_readers_are_the_inverse_of_inputs(graph):
    assert {(v, r) for v, readers in enumerate(graph.readers) for r in readers} == {
        (v, i) for i, op in enumerate(graph.ops) for v in op.inputs
    }
    assert all(a < b for readers in graph.readers for a, b in pairwise(readers))


def test_chain_helper_has_one_backward_op_per_forward_op():
    graph = chain(5)
    assert (graph.num_forward, len(graph.ops)) == (5, 10)
    assert len(graph.backward_needs) == 5
