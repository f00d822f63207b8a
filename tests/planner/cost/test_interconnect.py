"""Interconnects, and the choice between an all-gather and a computation, in the planner, which knows no torch."""

from __future__ import annotations

import pytest
from strategies import GraphBuilder

from autoremat.basics.errors import OptionsError
from autoremat.options.options import Options
from autoremat.planner.cost import (
    DATASHEETS,
    Interconnect,
    Links,
    LinkSource,
    Pattern,
    assumed_interconnect,
    sent_bytes,
    steps_of,
)
from autoremat.planner.cost.interconnect import GPUS_OF_A_NODE
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Trait
from autoremat.planner.search.planner import Planner


def gathering_graph(gather_seconds: float, trait: Trait = Trait.GATHER) -> Graph:
    """Two layers, each with a gathered weight of 100 bytes and an activation of 100 bytes that takes a second to compute."""
    build = GraphBuilder()
    shards = read = build.source(0)
    layers = []
    for _ in range(2):
        weight = build.op([shards], 100, seconds=gather_seconds, traits=trait)
        hidden = build.op([read], 100)
        layers.append((weight, hidden))
        read = build.op([weight, hidden], 1, seconds=10.0)
    last = read
    for layer in reversed(layers):
        last = build.op([*layer, last], 1, seconds=10.0, forward=False)
    gathers = tuple(index for index, op in enumerate(build.ops) if op.traits)
    return build.graph(forward_outputs=(read,), backward_outputs=(last,), must_run=gathers)


@pytest.mark.parametrize(("gather_seconds", "gathers"), [(0.1, True), (5.0, False)])
def test_the_cheaper_of_gather_and_computation_is_repeated(gather_seconds, gathers):
    graph = gathering_graph(gather_seconds)
    plan = Planner(graph).find(320).plan
    plan.check()
    assert plan.peak_bytes <= 320
    assert {bool(graph.ops[index].traits) for index in plan.recomputed} == {gathers}


def test_a_gather_without_agreement_is_never_repeated():
    graph = gathering_graph(0.1, Trait.COLLECTIVE)
    plan = Planner(graph).find(320).plan
    assert {bool(graph.ops[index].traits) for index in plan.recomputed} == {False}


@pytest.mark.parametrize(
    ("pattern", "ranks", "sent"), [(Pattern.GATHER, 1, 0), (Pattern.GATHER, 4, 750), (Pattern.REDUCE, 4, 1500)]
)
def test_bytes_that_each_rank_sends(pattern, ranks, sent):
    assert sent_bytes(pattern, 1000, ranks) == sent
    assert Interconnect(1e3, 2.0).seconds(sent) == 2.0 + sent / 1e3


def test_options_come_before_measurements_and_these_before_data_sheets():
    measured = Interconnect(2e9, 1e-5, LinkSource.MEASURED)
    assert Links(groups={"0": measured}).of("0", 8, "cpu") == measured
    assert Links(groups={"0": measured}).of("1", 8, "cpu") == assumed_interconnect("cpu", 8)
    given = Links(5e9, None, {"0": measured}).of("0", 8, "cpu")
    assert given == Interconnect(5e9, 1e-5, LinkSource.GIVEN)
    assert Links(None, 1e-3).of("0", 8, "cpu").latency_seconds == 1e-3


@pytest.mark.parametrize("name", [*DATASHEETS, "NVIDIA A100 80GB PCIe", "Abacus"])
def test_ranks_of_more_than_a_node_are_no_faster_than_those_of_one(name):
    near, far = (assumed_interconnect(name, ranks) for ranks in (GPUS_OF_A_NODE, 1000))
    assert 0 < far.bytes_per_second <= near.bytes_per_second


def test_steps_and_pieces_under_way_at_once_take_longer():
    link = Interconnect(100.0, 1.0, step_seconds=1.0)
    assert [link.seconds(900.0, steps_of(Pattern.GATHER, 4)), link.seconds(900.0, steps_of(Pattern.REDUCE, 4))] == [13.0, 16.0]
    assert Interconnect(100.0, 1.0, step_seconds=1.0, pipelined=True).seconds(900.0, 3) == 13.0 + 2 * 6.0
    assert Links(100.0, 1.0).of("0", 8, "H100").seconds(900.0, 7) == 10.0  # given figures are complete
    near = Links(None, 1.0).of("0", 8, "H100")
    assert near.seconds(900.0, 7) == 1.0 + 900.0 / near.bytes_per_second


@pytest.mark.parametrize(("ranks", "published"), [(2, 47.7e9), (8, 312.9e9)])
def test_few_cards_use_few_links_of_infinity_fabric(ranks, published):
    link, nbytes = assumed_interconnect("AMD Instinct MI300X", ranks), 4 * 2**30
    sent = sent_bytes(Pattern.REDUCE, nbytes, ranks)
    assert sent / link.seconds(sent, steps_of(Pattern.REDUCE, ranks)) == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_interconnect_is_refused(rate):
    with pytest.raises(ValueError, match="no interconnect"):
        Interconnect(rate, 0.0)


@pytest.mark.parametrize("value", ["fast", "50", 0, True, "50GB/min"])
def test_bandwidths_that_are_refused(value):
    with pytest.raises(OptionsError, match=r"interconnect_bandwidth=.* is not accepted"):
        Options(interconnect_bandwidth=value)
