"""Interconnects, and the choice between an all-gather and a computation; the names of devices as vendors spell them."""

import pytest
from strategies import GraphBuilder

from autoremat.planner.cost.datasheets import DATASHEETS, datasheet, device_memory
from autoremat.planner.cost.device import cuda_device
from autoremat.planner.cost.links import (
    GPUS_OF_A_NODE,
    Interconnect,
    Links,
    Pattern,
    assumed_interconnect,
    sent_bytes,
    steps_of,
)
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Trait
from autoremat.planner.plans.limits import Limits
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
    plan = Planner(graph).find(Limits(320)).plan
    plan.check()
    assert plan.peak_bytes <= 320
    assert {bool(graph.ops[index].traits) for index in plan.recomputed} == {gathers}


def test_a_gather_without_agreement_is_never_repeated():
    graph = gathering_graph(0.1, Trait.COLLECTIVE)
    plan = Planner(graph).find(Limits(320)).plan
    assert {bool(graph.ops[index].traits) for index in plan.recomputed} == {False}


@pytest.mark.parametrize(
    ("pattern", "ranks", "sent"), [(Pattern.GATHER, 1, 0), (Pattern.GATHER, 4, 750), (Pattern.REDUCE, 4, 1500)]
)
def test_bytes_that_each_rank_sends(pattern, ranks, sent):
    assert sent_bytes(pattern, 1000, ranks) == sent
    assert Interconnect(1e3, 2.0).seconds(sent) == 2.0 + sent / 1e3


def test_options_come_before_data_sheets():
    assumed = assumed_interconnect("cpu", 8)
    assert Links().of(8, "cpu") == assumed
    assert Links(5e9).of(8, "cpu") == Interconnect(5e9, assumed.latency_seconds, is_given=True)
    assert Links(None, 1e-3).of(8, "cpu").latency_seconds == 1e-3


@pytest.mark.parametrize("name", [*DATASHEETS, "NVIDIA A100 80GB PCIe", "Abacus"])
def test_ranks_of_more_than_a_node_are_no_faster_than_those_of_one(name):
    near, far = (assumed_interconnect(name, ranks) for ranks in (GPUS_OF_A_NODE, 1000))
    assert 0 < far.bytes_per_second <= near.bytes_per_second


def test_steps_and_pieces_under_way_at_once_take_longer():
    link = Interconnect(100.0, 1.0, step_seconds=1.0)
    assert [link.seconds(900.0, steps_of(Pattern.GATHER, 4)), link.seconds(900.0, steps_of(Pattern.REDUCE, 4))] == [13.0, 16.0]
    assert Interconnect(100.0, 1.0, step_seconds=1.0, pipelined=True).seconds(900.0, 3) == 13.0 + 2 * 6.0
    assert Links(100.0, 1.0).of(8, "H100").seconds(900.0, 7) == 10.0  # given figures are complete
    near = Links(None, 1.0).of(8, "H100")
    assert near.seconds(900.0, 7) == 1.0 + 900.0 / near.bytes_per_second


@pytest.mark.parametrize(("ranks", "published"), [(2, 47.7e9), (8, 312.9e9)])
def test_few_cards_use_few_links_of_infinity_fabric(ranks, published):
    link, nbytes = assumed_interconnect("AMD Instinct MI300X", ranks), 4 * 2**30
    sent = sent_bytes(Pattern.REDUCE, nbytes, ranks)
    assert sent / link.seconds(sent, steps_of(Pattern.REDUCE, ranks)) == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100-80GB", "H100"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"), ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"), ("NVIDIA A800 40GB Active", "A800 40GB"), ("NVIDIA H20-3e", "H20 3e"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"), ("Tesla V100S-PCIE-32GB", "V100S"), ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Instinct MI300X VF", "MI300X"), ("mi325x", "MI325X"),
    ],
)  # fmt: skip
def test_names(name, key):
    assert datasheet(name) == DATASHEETS[key]


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [
        ("V100", 31.74), ("NVIDIA A100-SXM4-80GB", 79.15), ("NVIDIA H100 80GB HBM3", 79.19),
        ("NVIDIA GH200 144G HBM3e", 142.5), ("NVIDIA B200", 178.35), ("AMD Instinct MI300X", 191.69),
        ("NVIDIA GeForce RTX 4090", 23.52), ("Tesla T4", 14.75),
    ],
)  # fmt: skip
def test_memory_is_at_most_what_torch_reports_and_hardly_less(name, gibibytes):
    """Capacities are those of torch's messages about lack of memory in public issues."""
    found = device_memory(name)
    assert found is not None
    assert 0.975 < found / 2**30 / gibibytes <= 1


def test_memory_beside_a_card_is_not_its_own():
    assert device_memory("NVIDIA GH200 480GB") == device_memory("GH200")  # the CPU has the 480
    assert device_memory("A100-40G") == device_memory("A100 40GiB") == device_memory("A100-SXM4-40GB")
    assert device_memory("Abacus") is None


@pytest.mark.parametrize(
    "name",
    [
        "H1000", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "RTX 4080SUPER",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    ],
)  # fmt: skip
def test_another_number_is_another_card(name):
    assert datasheet(name) is None


@pytest.mark.parametrize("name", [*DATASHEETS, "Abacus"])
def test_float32_is_never_faster_than_what_it_is_rounded_to(name):
    half, tf32, single = (cuda_device(name).of_type(dtype).flops_per_second for dtype in ("float16", "tf32", "float32"))
    assert half > tf32 >= single


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [("MI300X", "bfloat16", 668e12), ("MI355X", "bfloat16", 1565e12), ("MI300X", "float8_e4m3fnuz", 1273e12)],
)
def test_cards_of_amd_have_the_published_rates_of_large_products(name, dtype, published):
    assert cuda_device(name).of_type(dtype).flops_per_second == pytest.approx(published, rel=0.08)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("V100", 7.8e12), ("T4", 0.25e12), ("RTX 4090", 1.29e12), ("H20", 1.0e12), ("B200", 40e12), ("B300", 1.2e12)],
)
def test_float64_products_have_the_rate_of_the_data_sheet(name, peak):
    single, double = (cuda_device(name).of_type(dtype).flops_per_second for dtype in ("float32", "float64"))
    assert double / single == pytest.approx(peak / DATASHEETS[name].single_flops, rel=0.35)
