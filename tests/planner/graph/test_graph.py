"""The intermediate representation: what it refuses, what it derives, how it prints."""

from __future__ import annotations

import pytest
from strategies import GraphBuilder

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


def test_every_trait_but_that_of_gathers_forbids_repetition():
    assert {t for t in Trait if t and not t & NOT_REMATERIALIZABLE} == {Trait.GATHER}
    assert Op("p", "t", (), (), True, traits=Trait.GATHER).rematerializable
    assert Op("p", "t", (), (), True).rematerializable
