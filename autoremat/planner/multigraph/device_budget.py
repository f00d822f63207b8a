"""The device budget: the ledger of a whole device over a training step, and the bytes that forward and backward may take."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import DeviceTooSmall, Occupant
from autoremat.basics.units import format_bytes


class StepPart(enum.Flag):
    """A part of training in which other memory is live than in the parts around it."""

    FIRST_STEP = enum.auto()
    LATER_STEP = enum.auto()
    LATER_MICRO_BATCH = enum.auto()
    FIRST_UPDATE = enum.auto()
    LATER_UPDATE = enum.auto()


COMPILED = StepPart.FIRST_STEP | StepPart.LATER_STEP | StepPart.LATER_MICRO_BATCH
"""The parts in which the plan's peak comes on top of the ledger."""
UPDATES = StepPart.FIRST_UPDATE | StepPart.LATER_UPDATE
AFTER_FIRST = StepPart.LATER_STEP | StepPart.LATER_MICRO_BATCH | UPDATES
ALWAYS = COMPILED | UPDATES

NAMES = {
    StepPart.FIRST_STEP: ("first step", "forward and backward, first step"),
    StepPart.LATER_STEP: ("later steps", "forward and backward, later steps"),
    StepPart.LATER_MICRO_BATCH: ("micro-batches", "forward and backward, later micro-batches"),
    StepPart.FIRST_UPDATE: ("first update", "the optimizer's first step"),
    StepPart.LATER_UPDATE: ("later updates", "the optimizer's later steps"),
}
"""The head of a column for each part, and its name in a text."""

EARLIER_GRADIENTS = "gradients of earlier micro-batches"
INPUTS = "inputs of the graph"

SMALL = 0.05
"""Share of a part's bytes below which a row gets no advice."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Memory that no plan decides."""

    name: str
    bytes: int
    live: StepPart = ALWAYS
    """Parts of the step in which it is live."""
    remedy: str = ""
    """Advice that makes the row smaller."""


@dataclass(frozen=True, repr=False)
class DeviceBudget(Shown):
    """The ledger of a whole device, from :func:`autoremat.device_budget`. Accepted as a ``memory_budget``.

    All figures are in bytes. The plans of forward and backward get the bytes that the ledger leaves.
    """

    total_bytes: int
    """Memory of the device."""
    rows: tuple[LedgerRow, ...]
    reserve_bytes: int = 0
    """Bytes that stay free in every part of the step."""
    device: str = ""
    """The device of the memory: a device of torch, or a card by name."""
    accumulate: int = 1
    """Number of micro-batches in one step of the optimizer."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the figures."""
    step_peak_bytes: int = 0
    """Peak of a step of several graphs that share the budget, above the ledger; 0 for a graph by itself."""

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """The parts of the step that occur, in sequence."""
        return tuple(part for part in StepPart if part is not StepPart.LATER_MICRO_BATCH or self.accumulate > 1)

    def bytes_in(self, part: StepPart, peak_bytes: int = 0) -> int:
        """Returns the bytes that are live in ``part``. A plan's ``peak_bytes`` count where the compiled graph runs."""
        return sum(row.bytes for row in self.rows if part in row.live) + (peak_bytes if part in COMPILED else 0)

    @property
    def counts_gradients(self) -> bool:
        """True if the ledger has the gradients of earlier micro-batches."""
        return any(row.name == EARLIER_GRADIENTS for row in self.rows)

    @property
    def budget_bytes(self) -> int:
        """Bytes that forward and backward may take above the ledger; not positive if the ledger alone fills the device."""
        fullest = max(self.bytes_in(part) for part in self.parts if part in COMPILED)
        return self.total_bytes - self.reserve_bytes - fullest

    @property
    def update_bytes(self) -> int:
        """Peak of the optimizer's own steps, all of the ledger included. No plan changes it."""
        return max(self.bytes_in(part) for part in self.parts if part in UPDATES)

    def binding(self, peak_bytes: int) -> StepPart:
        """Returns the part of the step with the device's peak under a plan of ``peak_bytes``; the latest of equal ones."""
        peak_bytes = max(peak_bytes, self.step_peak_bytes)
        return max(reversed(self.parts), key=lambda part: self.bytes_in(part, peak_bytes))

    def device_bytes(self, peak_bytes: int) -> int:
        """Returns the peak of the whole device under a plan of ``peak_bytes``, without the reserve."""
        return self.bytes_in(self.binding(peak_bytes), max(peak_bytes, self.step_peak_bytes))

    def fits(self, peak_bytes: int = 0) -> bool:
        """Returns True if the device holds every part of the step under a plan of ``peak_bytes``, with the reserve."""
        return self.holds(self.device_bytes(peak_bytes))

    def holds(self, device_bytes: int) -> bool:
        """Returns True if the device holds ``device_bytes`` beside the reserve."""
        return device_bytes + self.reserve_bytes <= self.total_bytes

    def with_rows(self, *rows: LedgerRow) -> DeviceBudget:
        """Returns the ledger with further rows. Rows of no bytes are left out."""
        return replace(self, rows=(*self.rows, *(row for row in rows if row.bytes)))

    def of_graph(self, input_bytes: int, counts_gradients: bool) -> DeviceBudget:
        """Returns the ledger of one compiled graph with inputs of ``input_bytes``.

        ``counts_gradients`` is True if the graph's plans count the gradients of earlier micro-batches themselves.
        """
        kept = tuple(row for row in self.rows if not (counts_gradients and row.name == EARLIER_GRADIENTS))
        return replace(self, rows=kept).with_rows(LedgerRow(INPUTS, input_bytes, remedy="use a smaller batch"))

    def check(self) -> None:
        """Raises ``DeviceTooSmall`` if no plan fits, because the ledger alone exceeds the device."""
        part = self.binding(1)
        needed = self.bytes_in(part, 1) + self.reserve_bytes
        if needed > self.total_bytes:
            raise self.too_small(part, needed)

    def too_small(self, part: StepPart, needed: int) -> DeviceTooSmall:
        """Returns the error for a ledger whose ``part`` needs ``needed`` bytes, the reserve included."""
        rows = [*(row for row in self.rows if part in row.live), LedgerRow("reserve", self.reserve_bytes)]
        return DeviceTooSmall(
            budget_bytes=self.total_bytes,
            minimum_bytes=needed,
            lower_bound_bytes=needed,
            occupants=[Occupant(row.name, row.bytes) for row in rows if row.bytes],
            device=self.device or None,
            remedies=(self.advice(part),),
            part=NAMES[part][1],
        )

    def advice(self, part: StepPart) -> str:
        """Returns the largest row of ``part``, and the advice of all its rows that are not small, the largest first."""
        rows = sorted((row for row in self.rows if part in row.live), key=lambda row: -row.bytes)
        if not rows:
            return ""
        least = SMALL * sum(row.bytes for row in rows)
        helped = [row for row in rows if row.remedy and row.bytes >= least]
        advice = "; ".join(f"{row.name} ({format_bytes(row.bytes)}): {row.remedy}" for row in helped)
        return f"the largest row of the ledger is {rows[0].name}" + (f". {advice}" if advice else "")

    def advice_for(self, excess_bytes: int) -> str:
        """Returns the advice for a plan that needs ``excess_bytes`` more than the ledger leaves: the row that takes so much,
        and a larger device."""
        part = max((part for part in self.parts if part in COMPILED), key=self.bytes_in)
        return (
            f"the ledger of the device takes {format_bytes(self.bytes_in(part))} of {format_bytes(self.total_bytes)} in "
            f"{NAMES[part][1]}, and a device of {format_bytes(self.total_bytes + excess_bytes)} would fit; {self.advice(part)}"
        )

    def line(self) -> str:
        """Returns the one-line representation."""
        left = f"{format_bytes(self.budget_bytes)} for forward and backward" if self.fits(1) else "TOO SMALL"
        return f"{format_bytes(self.total_bytes)}{f' of {self.device}' if self.device else ''}: {left}"

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed tables."""
        return [named_figures(self.figures()), self.table()]

    def figures(self) -> list[tuple[str, str]]:
        """Returns the figures of the budget, each with its name."""
        return [
            ("device", f"{format_bytes(self.total_bytes)}{f', {self.device}' if self.device else ''}"),
            ("reserve", format_bytes(self.reserve_bytes)),
            ("for forward and backward", format_bytes(self.budget_bytes)),
            ("the optimizer's steps", f"{format_bytes(self.update_bytes)}, whatever is recomputed"),
            *(("note", note) for note in self.notes),
        ]

    def table(self, peak_bytes: int | None = None) -> PlainTable:
        """Returns the rows of the ledger by parts of the step, in bytes. A plan's ``peak_bytes`` add a row."""
        parts, name = self.parts, "peak of the plans" if self.step_peak_bytes else "peak of the plan"
        peak_bytes = None if peak_bytes is None else max(peak_bytes, self.step_peak_bytes)
        table = PlainTable("ledger of the device", (*(NAMES[part][0] for part in parts), "memory"), numbers=len(parts))
        plan = () if peak_bytes is None else (LedgerRow(name, peak_bytes, COMPILED),)
        for row in (*self.rows, *plan):
            table.add_row(*(format_bytes(row.bytes) if part in row.live else "" for part in parts), row.name)
        table.add_row(*(format_bytes(self.bytes_in(part, peak_bytes or 0)) for part in parts), "sum")
        return table


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Memory of an optimizer on one device, in bytes above parameters and gradients.

    :func:`autoremat.device_budget` predicts it. Give measured figures for an optimizer that cannot be predicted.
    """

    state_bytes: int
    """State after the first step."""
    first_step_bytes: int | None = None
    """Peak of the first step, state included. None for that of later steps."""
    later_step_bytes: int | None = None
    """Peak of later steps, state included. None for the state alone."""
    existing_bytes: int = 0
    """State that exists already."""
    notes: tuple[str, ...] = ()

    def rows(self, advice: str = "") -> Iterable[LedgerRow]:
        """Yields the rows of the ledger. ``advice`` reduces temporaries."""
        smaller = "an optimizer with less state (Adafactor, 8-bit state) or fewer trained parameters (LoRA) need less"
        state = max(self.state_bytes, self.existing_bytes)
        later = max(state, self.later_step_bytes or 0)
        first = later if self.first_step_bytes is None else max(state, self.first_step_bytes)
        yield LedgerRow("optimizer state", self.existing_bytes, remedy=smaller)
        name = "optimizer state after the first step" if not self.existing_bytes else "optimizer state to come"
        yield LedgerRow(name, state - self.existing_bytes, AFTER_FIRST, smaller)
        yield LedgerRow("temporaries of the optimizer's first step", first - state, StepPart.FIRST_UPDATE, advice)
        yield LedgerRow("temporaries of the optimizer's later steps", later - state, StepPart.LATER_UPDATE, advice)
