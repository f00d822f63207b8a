"""Host links of devices by name, and the form that keeps a value on the host."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoremat.planner.cost.devices import DATASHEETS, GB
from autoremat.planner.cost.host_link import PLANNED_SHARE, HostLink, assumed_host_link, host_form
from autoremat.planner.cost.stalls import stalls_of
from autoremat.planner.graph.forms import Engine
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule, Stay


@pytest.mark.parametrize(
    ("device", "to_host", "from_host"),
    [
        ("Tesla V100-SXM2-32GB", 11, 11),
        ("NVIDIA A100-SXM4-80GB", 25, 25),
        ("NVIDIA H100 80GB HBM3", 55, 55),
        ("AMD Instinct MI300X", 55, 55),
        ("NVIDIA GH200 480GB", 170, 342),
        ("NVIDIA GB200", 182, 169),
        ("a card of tomorrow", 25, 25),
    ],
)
def test_the_link_of_a_device_follows_from_its_name(device, to_host, from_host):
    link = assumed_host_link(device)
    assert link is not None
    assert (link.to_host, link.from_host) == (to_host * GB, from_host * GB)


@pytest.mark.parametrize("device", ["cpu", "mps", "NVIDIA GB10", "Orin", "NVIDIA Thor", "AMD Instinct MI300A"])
def test_a_device_that_shares_the_memory_of_its_host_has_no_link(device):
    assert assumed_host_link(device) is None


def test_every_card_has_a_link_that_is_slower_than_its_memory():
    for name, sheet in DATASHEETS.items():
        link = assumed_host_link(name)
        assert link is not None
        assert 0 < max(link.to_host, link.from_host) < sheet.bandwidth / 4


@pytest.mark.parametrize(
    "impossible", [{"to_host": 0.0}, {"from_host": math.inf}, {"latency_seconds": -1e-6}, {"both_ways": 1.5}]
)
def test_an_impossible_link_is_refused(impossible):
    with pytest.raises(ValueError, match="is no host link"):
        replace(HostLink(1e9, 1e9), **impossible)


def test_a_value_on_the_host_has_the_seconds_of_the_planned_share_of_the_rates():
    form = host_form(1000, HostLink(to_host=100.0, from_host=200.0, latency_seconds=2.0, both_ways=0.5))
    assert form.store.both_ways == form.load.both_ways == 0.5
    assert (form.name, form.host_bytes, form.device_bytes, form.ranks) == ("host", 1000, 0, ())
    assert (form.store.engine, form.load.engine) == (Engine.TO_HOST, Engine.FROM_HOST)
    assert (form.store.seconds, form.load.seconds) == pytest.approx((12.0 / 0.8, 7.0 / 0.8))


def test_the_measured_speed_gives_the_seconds_of_the_link_itself():
    graph = Graph.from_dag([1.0] * 4, [1000] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)], outputs=(3,), num_forward=2)
    form = host_form(1000, HostLink(to_host=100.0, from_host=200.0, latency_seconds=2.0))
    stored = replace(graph.values[0], forms=(form,))
    graph = replace(graph, values=(stored, *graph.values[1:]))
    found = stalls_of(graph, Schedule((0, 1), (2, 3), (Stay(0, "host", 0, 1, 2, 3),)), speed=1 / PLANNED_SHARE)
    assert (found.busy_seconds[Engine.TO_HOST], found.busy_seconds[Engine.FROM_HOST]) == pytest.approx((12.0, 7.0))
    assert found.waits == pytest.approx((0.0, 11.0, 0.0, 6.0))
