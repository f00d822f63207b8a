"""A captured graph priced by one of the cost models.

- ``calibrated`` (the default): by the measured rates of the device (:mod:`autoremat.measure.calibration`).
- ``roofline``: FLOPs and bytes by the rates of data sheets, as captured.
- ``profile``: kernels of their own by their own time (:mod:`autoremat.measure.op_times`), all else as calibrated.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoremat.capture.capture import Capture
from autoremat.measure.calibration import rates_of
from autoremat.measure.op_times import Times, profile, signature, worth_timing
from autoremat.ops.op_traits import stays_in_kernel
from autoremat.ops.work import arithmetic_of, work_of
from autoremat.planner.cost import CostSources, Pricing, Rates
from autoremat.torch_private import compat

ROOFLINE, CALIBRATED, PROFILE = "roofline", "calibrated", "profile"


def priced(captured: Capture, cost_model: str) -> tuple[Capture, Pricing]:
    """``captured`` with the seconds of ``cost_model``, and what they rest on. May measure for some seconds, once."""
    device = compat.device_of(captured.joint)
    rates = rates_of(device) if cost_model != ROOFLINE else None
    if rates is None:
        return captured, Pricing.of(cost_model, ((op.seconds, CostSources.ASSUMED) for op in captured.graph.ops))
    captured, bases = by_rates(captured, rates)
    untimed = 0
    if cost_model == PROFILE:
        candidates = [
            (node, op.seconds) for node, op in zip(captured.op_nodes, captured.graph.ops, strict=True) if worth_timing(node, op)
        ]
        captured, bases, untimed = by_times(captured, bases, profile(candidates, device))
    seconds = (op.seconds for op in captured.graph.ops)
    return captured, Pricing.of(cost_model, zip(seconds, bases, strict=True), untimed)


def by_rates(captured: Capture, rates: Rates) -> tuple[Capture, list[CostSources]]:
    """``captured`` with calibrated seconds, and for each op what they rest on."""
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
    bases = [CostSources.CALIBRATED if work.known else CostSources.ASSUMED for work in works]
    return replace(captured, graph=graph), bases


def by_times(captured: Capture, bases: list[CostSources], times: Times) -> tuple[Capture, list[CostSources], int]:
    """``captured`` with the measured seconds of the ops that have some, what all rest on then, and how many should have
    some and do not."""
    ops, found, untimed = list(captured.graph.ops), list(bases), 0
    for number, node in enumerate(captured.op_nodes):
        if not worth_timing(node, ops[number]):
            continue
        seconds = times.get(signature(node))
        if seconds is None:
            untimed += 1
        else:
            ops[number], found[number] = replace(ops[number], seconds=seconds), CostSources.MEASURED
    return replace(captured, graph=replace(captured.graph, ops=tuple(ops))), found, untimed


def identity(cost_model: str, device: torch.device) -> str:
    """What plans by ``cost_model`` depend on beside the graph: the rates of ``device``, measured if they are not known."""
    rates = rates_of(device) if cost_model != ROOFLINE else None
    return rates.digest if rates is not None else ""
