"""Prices a captured graph by one of the cost models.

- ``roofline`` (the default): FLOPs and bytes by the rates of data sheets, as captured.
- ``calibrated``: by the measured rates of the device (:mod:`autoremat.measure.calibration`).

Under both, collectives have the seconds of their process group's interconnect.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoremat.basics.units import format_bytes
from autoremat.capture.capture import Capture
from autoremat.measure.calibration import rates_of
from autoremat.ops.collectives import traffic_of_group
from autoremat.ops.op_traits import is_wait, stays_in_kernel
from autoremat.ops.work import arithmetic_of, work_of
from autoremat.planner.cost import CostSource, Interconnect, Links, LinkSource, Pricing, Rate, Rates
from autoremat.torch_private import joint_graphs

ROOFLINE, CALIBRATED = "roofline", "calibrated"


NO_LINKS = Links()


def priced(captured: Capture, cost_model: str, links: Links = NO_LINKS, others: Rates | None = None) -> tuple[Capture, Pricing]:
    """Returns ``captured`` with the seconds of ``cost_model``, and a summary of their cost sources.

    ``links`` has the rates of process groups. ``others`` are the rates of another rank, which take the place of the device's
    own. The first call for a device under ``calibrated`` measures.
    """
    device = joint_graphs.device_of(captured.joint)
    rates = others or (rates_of(device) if cost_model != ROOFLINE else None)
    sources = [CostSource.ASSUMED] * len(captured.graph.ops)
    if rates is not None:
        captured, sources = by_rates(captured, rates)
    captured, used = _with_communication(captured, links)
    for index, link in used.items():
        sources[index] = CostSource.ASSUMED if link.source is LinkSource.ASSUMED else CostSource.CALIBRATED
    seconds = (op.seconds for op in captured.graph.ops)
    shown = ", ".join(sorted({f"{format_bytes(int(link.bytes_per_second))}/s ({link.source.value})" for link in used.values()}))
    model = ROOFLINE if rates is None else cost_model
    return captured, Pricing.of(model, zip(seconds, sources, strict=True), shown)


def _with_communication(captured: Capture, links: Links) -> tuple[Capture, dict[int, Interconnect]]:
    """Returns ``captured`` with the seconds of its collectives, and the interconnect of each.

    A collective takes at least the seconds of its own memory traffic. A wait that is an op of its own takes none.
    """
    ops, used = list(captured.graph.ops), dict[int, Interconnect]()
    for index, (node, op) in enumerate(zip(captured.op_nodes, ops, strict=True)):
        call = traffic_of_group(node)
        if is_wait(node):
            ops[index] = replace(op, seconds=0.0)
        elif call is not None:
            used[index] = link = links.of(call.group, call.ranks, captured.device.name)
            ops[index] = replace(op, seconds=max(op.seconds, link.seconds(call.sent_bytes, call.steps)))
    return (replace(captured, graph=replace(captured.graph, ops=tuple(ops))) if used else captured), used


def by_rates(captured: Capture, rates: Rates) -> tuple[Capture, list[CostSource]]:
    """Returns ``captured`` with calibrated seconds, and the cost source of each op."""
    graph = captured.graph
    works = [work_of(node, op, graph.machine.fuses) for node, op in zip(captured.op_nodes, graph.ops, strict=True)]
    ops, per_byte = [], rates.saving_seconds_per_byte / 2
    for node, op, work in zip(captured.op_nodes, graph.ops, works, strict=True):
        if graph.machine.fuses and stays_in_kernel(node):
            traffic = per_byte * sum(task.amount for task in work.tasks if task.rate is Rate.STREAM)
            seconds = traffic + rates.seconds(arithmetic_of(node))
            ops.append(replace(op, seconds=seconds, memory_bound_seconds=traffic))
        else:
            ops.append(replace(op, seconds=rates.seconds(work), memory_bound_seconds=0.0))
    machine = replace(graph.machine, saving_seconds_per_byte=rates.saving_seconds_per_byte, launch_seconds=rates.launch_seconds)
    graph = replace(graph, ops=tuple(ops), machine=machine)
    sources = [CostSource.CALIBRATED if work.known else CostSource.ASSUMED for work in works]
    return replace(captured, graph=graph), sources


def identity(cost_model: str, device: torch.device) -> str:
    """Returns text that identifies the cost model's rates on ``device``; empty for data sheets.

    Plans depend on the graph and on these rates. Under ``calibrated``, unknown rates are measured.
    """
    rates = rates_of(device) if cost_model != ROOFLINE else None
    return rates.digest if rates is not None else ""
