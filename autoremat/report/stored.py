"""Figures of the saved tensors that a plan keeps in other forms than on the device: what is held, moved and waited for."""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.cost.host_link import PLANNED_SHARE
from autoremat.planner.cost.stalls import stalls_of
from autoremat.planner.graph.forms import BITS, HOST, SHARDS, Engine
from autoremat.planner.plans.plan import Plan

PLACES = {HOST: "on the host", BITS: "as bits", SHARDS: "as shards"}
"""Words for forms in texts."""

ENGINES = {
    Engine.COMPUTE: "the compute stream",
    Engine.TO_HOST: "the copies to the host",
    Engine.FROM_HOST: "the copies from the host",
    Engine.NETWORK: "the network",
}


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

    totals: tuple[FormTotal, ...]
    """The most bytes first."""
    host_peak_bytes: int
    """Bytes on the host of all open calls together."""
    stall_seconds: float
    """Seconds that the step waits, at the rate of the link for which it is planned."""
    stall_seconds_at_best: float
    """The same at the whole rate of the link."""
    busiest_engine: str
    """The engine whose transfers take the most seconds."""
    busiest_seconds: float
    both_ways_seconds: float = 0.0
    """Seconds during which copies run to the host and from it at once."""
    both_ways: float = 1.0
    """The share of their rates that both directions have then. Stalls leave that out."""

    @classmethod
    def of(cls, plan: Plan) -> StoredTensors | None:
        """Returns the figures of ``plan``; None if it keeps all saved tensors on the device."""
        graph, stays = plan.graph, plan.schedule.stays
        if not stays:
            return None
        found: dict[str, list[tuple[int, int, int]]] = {}
        for stay in stays:
            value, form = graph.values[stay.value], graph.values[stay.value].form(stay.form)
            found.setdefault(stay.form, []).append((value.bytes, form.device_bytes, form.host_bytes))
        totals = [FormTotal(name, len(sizes), *map(sum, zip(*sizes, strict=True))) for name, sizes in found.items()]
        engine, busy = max(plan.stalls.busy_seconds.items(), key=lambda pair: pair[1])
        return cls(
            tuple(sorted(totals, key=lambda total: -total.bytes)),
            plan.timeline.host_bytes,
            plan.stall_seconds,
            stalls_of(graph, plan.schedule, 1 / PLANNED_SHARE).seconds,
            engine.value,
            busy,
            plan.stalls.both_ways_seconds,
            min(graph.values[stay.value].form(stay.form).load.both_ways for stay in stays),
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that one call copies to the host, and as many back."""
        return sum(total.host_bytes for total in self.totals)

    def figures(self, host_memory_bytes: int | None) -> list[tuple[str, str]]:
        """Returns the rows of a report, each with its name."""
        rows = [("other forms", "; ".join(total.text for total in self.totals))]
        if self.moved_bytes:
            bound = "" if host_memory_bytes is None else f" of {format_bytes(host_memory_bytes)} (host_memory)"
            moved = f"{format_bytes(self.moved_bytes)} to the host and back in a call"
            rows.append(("host peak", f"{format_bytes(self.host_peak_bytes)}{bound}; {moved}"))
        waits = format_seconds(self.stall_seconds)
        if self.moved_bytes:
            waits += f" at {PLANNED_SHARE:.0%} of the link's rate, for which the plan is made, and "
            waits += f"{format_seconds(self.stall_seconds_at_best)} at the whole rate"
        busiest = f"{ENGINES[Engine(self.busiest_engine)]}, {format_seconds(self.busiest_seconds)}"
        rows.append(("stalls", f"{waits if self.stall_seconds else 'none'}; busiest engine: {busiest}"))
        if self.both_ways_seconds:
            at_once, slower = format_seconds(self.both_ways_seconds), f"{self.both_ways:.0%} of their rates then"
            rows.append(
                ("both directions", f"copies run in both at once for {at_once}; they have {slower}, which is not counted")
            )
        return rows
