"""Prices the ops of a captured graph. The cost models differ in where the rates of the device come from.

- ``roofline`` (the default): data sheets.
- ``calibrated``: measurements of the device (:mod:`autoremat.measure.calibration`).

Under both, collectives have the seconds of their process group's interconnect.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoremat.basics.units import format_bytes
from autoremat.capture.work import arithmetic_of, work_of
from autoremat.measure.calibration import rates_of
from autoremat.ops.collectives import traffic_of_group
from autoremat.ops.op_traits import is_wait, stays_in_kernel
from autoremat.planner.cost.device import Device
from autoremat.planner.cost.links import Interconnect, Links, LinkSource
from autoremat.planner.cost.rates import Pricing, Rate, Rates, Work
from autoremat.planner.graph.graph import Machine
from autoremat.planner.graph.op import Op
from autoremat.torch_private import compilers

ROOFLINE, CALIBRATED = "roofline", "calibrated"

ARITHMETIC_SHARE = 0.1
"""The share of a fused pointwise op's seconds that is arithmetic, where the rate of its arithmetic is unknown."""


@dataclass(frozen=True)
class Prices:
    """Where the seconds of ops come from."""

    cost_model: str = ROOFLINE
    links: Links = field(default_factory=Links)
    """The rates of process groups."""
    others: Rates | None = None
    """The rates of another rank, which take the place of the device's own."""


class Pricer:
    """Prices the ops of one graph, and counts where their seconds come from."""

    def __init__(self, prices: Prices, device: torch.device, sheet: Device, fuses: bool) -> None:
        self.prices, self.sheet, self.fuses = prices, sheet, fuses
        self.measured = prices.others or (None if prices.cost_model == ROOFLINE else rates_of(device))
        self.rates: Rates | Device = self.measured or sheet
        self.total_seconds = self.calibrated_seconds = 0.0
        self.links: set[Interconnect] = set()

    def price(self, node: fx.Node, op: Op) -> Op:
        """Returns ``op`` with its seconds.

        A collective takes at least the seconds of its own memory traffic. A wait that is an op of its own takes none.
        """
        work = work_of(node, op, self.fuses)
        is_calibrated = self.measured is not None and work.known
        seconds, traffic = self._fused(node, work) if self.fuses and stays_in_kernel(node) else (self.rates.seconds(work), 0.0)
        if is_wait(node):
            seconds = 0.0
        elif (call := traffic_of_group(node)) is not None:
            link = self.prices.links.of(call.group, call.ranks, self.sheet.name)
            seconds = max(seconds, link.seconds(call.sent_bytes, call.steps))
            is_calibrated = link.source is not LinkSource.ASSUMED
            self.links.add(link)
        self.total_seconds += seconds
        self.calibrated_seconds += seconds if is_calibrated else 0.0
        return replace(op, seconds=seconds, memory_bound_seconds=traffic)

    def _fused(self, node: fx.Node, work: Work) -> tuple[float, float]:
        """Returns the seconds of an op of a fused kernel, and the part of them for its share of the kernel's traffic."""
        streamed = sum(task.amount for task in work.tasks if task.rate is Rate.STREAM)
        traffic, arithmetic = self.rates.saving_seconds_per_byte / 2 * streamed, self.rates.seconds(arithmetic_of(node))
        return (traffic + arithmetic, traffic) if arithmetic else (traffic, (1 - ARITHMETIC_SHARE) * traffic)

    def machine(self, groups_hold_buffers: bool) -> Machine:
        """Returns the machine on which fused kernels have these rates."""
        sheet, rates = self.sheet, self.rates
        return Machine(
            self.fuses, rates.saving_seconds_per_byte, sheet.write_share, sheet.overlaps_wholly, rates.launch_seconds,
            groups_hold_buffers, compilers.most_reads_inlined(),
        )  # fmt: skip

    def pricing(self) -> Pricing:
        """Returns a summary of the cost sources of all ops."""
        shown = sorted({f"{format_bytes(int(link.bytes_per_second))}/s ({link.source.value})" for link in self.links})
        calibrated = self.calibrated_seconds / self.total_seconds if self.total_seconds else 0.0
        cost_model = ROOFLINE if self.measured is None else self.prices.cost_model
        return Pricing(cost_model, calibrated, 1.0 - calibrated, ", ".join(shown))


def identity(cost_model: str, device: torch.device) -> str:
    """Returns text that identifies the cost model's rates on ``device``; empty for data sheets.

    Plans depend on the graph and on these rates. Under ``calibrated``, unknown rates are measured.
    """
    rates = rates_of(device) if cost_model != ROOFLINE else None
    return rates.digest if rates is not None else ""
