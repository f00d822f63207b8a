"""Prices a captured graph by one of the cost models.

- ``calibrated`` (the default): by the measured rates of the device (:mod:`autoremat.measure.calibration`).
- ``roofline``: FLOPs and bytes by the rates of data sheets, as captured.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoremat.capture.capture import Capture
from autoremat.measure.calibration import rates_of
from autoremat.ops.op_traits import stays_in_kernel
from autoremat.ops.work import arithmetic_of, work_of
from autoremat.planner.cost import CostSource, Pricing, Rates
from autoremat.torch_private import compat

ROOFLINE, CALIBRATED = "roofline", "calibrated"


def priced(captured: Capture, cost_model: str) -> tuple[Capture, Pricing]:
    """Returns ``captured`` with the seconds of ``cost_model``, and a summary of their cost sources.

    The first call for a device may measure for about 30 seconds.
    """
    device = compat.device_of(captured.joint)
    rates = rates_of(device) if cost_model != ROOFLINE else None
    if rates is None:
        return captured, Pricing.of(cost_model, ((op.seconds, CostSource.ASSUMED) for op in captured.graph.ops))
    captured, sources = by_rates(captured, rates)
    seconds = (op.seconds for op in captured.graph.ops)
    return captured, Pricing.of(cost_model, zip(seconds, sources, strict=True))


def by_rates(captured: Capture, rates: Rates) -> tuple[Capture, list[CostSource]]:
    """Returns ``captured`` with calibrated seconds, and the cost source of each op."""
    graph = captured.graph
    works = [work_of(node, op) for node, op in zip(captured.op_nodes, graph.ops, strict=True)]
    seconds = [rates.seconds(work) for work in works]
    streamed = [
        max(0.0, all_of_it - rates.seconds(arithmetic_of(node))) if graph.fuses and stays_in_kernel(node) else 0.0
        for node, all_of_it in zip(captured.op_nodes, seconds, strict=True)
    ]
    ops = tuple(
        replace(op, seconds=all_of_it, memory_bound_seconds=traffic)
        for op, all_of_it, traffic in zip(graph.ops, seconds, streamed, strict=True)
    )
    graph = replace(graph, ops=ops, saving_seconds_per_byte=rates.saving_seconds_per_byte)
    sources = [CostSource.CALIBRATED if work.known else CostSource.ASSUMED for work in works]
    return replace(captured, graph=graph), sources


def identity(cost_model: str, device: torch.device) -> str:
    """Returns text that identifies the cost model's rates on ``device``; empty for data sheets.

    Plans depend on the graph and on these rates. Unknown rates are measured.
    """
    rates = rates_of(device) if cost_model != ROOFLINE else None
    return rates.digest if rates is not None else ""
