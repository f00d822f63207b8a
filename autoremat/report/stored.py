"""Figures of the saved tensors that a plan keeps in other forms than on the device: what is held, moved and waited for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.cost.links import PLANNED_SHARE
from autoremat.planner.cost.stalls import stalls_of
from autoremat.planner.graph.op import BITS, HOST, SHARDS
from autoremat.planner.plans.plan import Plan

PLACES = {HOST: "on the host", BITS: "as bits", SHARDS: "as shards"}
"""Words for forms in texts."""


@dataclass(frozen=True)
class FormTotal:
    """Sums over the saved tensors that are kept in one form."""

    form: str
    tensors: int
    bytes: int
    """Bytes of the tensors as they are."""
    device_bytes: int
    """Bytes on the device while they are stored."""
    host_bytes: int
    """Bytes on the host while they are stored."""

    @property
    def text(self) -> str:
        """The sums as text."""
        held = f" in {format_bytes(self.device_bytes)}" if self.device_bytes else ""
        noun = "tensor" if self.tensors == 1 else "tensors"
        return f"{self.tensors} {noun} of {format_bytes(self.bytes)} {PLACES.get(self.form, self.form)}{held}"


@dataclass(frozen=True)
class StoredTensors:
    """Figures of all stays of a plan. Seconds are estimates of the cost model."""

    plan: Plan

    @cached_property
    def totals(self) -> tuple[FormTotal, ...]:
        """Sums by form, the most bytes first."""
        sizes: dict[str, list[tuple[int, int, int]]] = {}
        for stay in self.plan.schedule.stays:
            value = self.plan.graph.values[stay.value]
            form = value.form(stay.form)
            sizes.setdefault(stay.form, []).append((value.bytes, form.device_bytes, form.host_bytes))
        totals = (FormTotal(name, len(rows), *map(sum, zip(*rows, strict=True))) for name, rows in sizes.items())
        return tuple(sorted(totals, key=lambda total: -total.bytes))

    @property
    def moved_bytes(self) -> int:
        """Bytes that one call copies to the host, and as many back."""
        return sum(total.host_bytes for total in self.totals)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the step waits, at the rate of the link for which it is planned."""
        return self.plan.stall_seconds

    @cached_property
    def stall_seconds_at_best(self) -> float:
        """The same at the whole rate of the link."""
        return stalls_of(self.plan.graph, self.plan.schedule, 1 / PLANNED_SHARE).seconds

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The rows of a report beside its attributes, each with its name."""
        rows, stalls = [("other forms", "; ".join(total.text for total in self.totals))], self.plan.stalls
        if self.moved_bytes:
            at_best = f"{format_seconds(self.stall_seconds_at_best)} at the link's whole rate, not {PLANNED_SHARE:.0%} of it"
            rows.append(("copies", f"{format_bytes(self.moved_bytes)} to the host and back in a call; stalls {at_best}"))
        if stalls.both_ways_seconds:
            share = min(self.plan.graph.values[stay.value].form(stay.form).load.both_ways for stay in self.plan.schedule.stays)
            at_once, slower = format_seconds(stalls.both_ways_seconds), f"{share:.0%} of their rates then"
            text = f"copies run in both at once for {at_once}; they have {slower}, which is not counted"
            rows.append(("both directions", text))
        return rows
