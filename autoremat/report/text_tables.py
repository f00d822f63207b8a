"""Reports as text and as tables for terminals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from autoremat.basics.display import PlainTable, Shown, named_figures, short_source
from autoremat.basics.errors import binding
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.cost.durations import stalls_of
from autoremat.planner.cost.links import PLANNED_SHARE
from autoremat.planner.graph.op import BITS, HOST, SHARDS
from autoremat.planner.multigraph.device_budget import NAMES
from autoremat.report.data import FIGURES, ReportData
from autoremat.report.decisions import ForwardValue
from autoremat.report.peak_snapshot import LiveTensor, PeakSnapshot, remedy_for

SAID = ("hints", "notes", "unknown_workspaces")
"""Attributes that the first lines of a report show."""

PART = "one graph of several: each has the share of its own reference peak, or its minimum. A step over its whole budget warns"
"""Note in the reports of the graphs of a broken function under a share."""

SAVED_TENSORS_SHOWN, BRIEFLY_SAVED, SORTS_SHOWN = 10, 3, 4

PLACES = {HOST: "on the host", BITS: "as bits", SHARDS: "as shards"}
"""Words for forms in texts."""


def brief(report: ReportData) -> Iterator[tuple[str, str]]:
    """Yields the lines of a printed report: six that every report has, then hints and notes."""
    verdict = "within the budget" if report.budget_bytes is not None else "no budget of memory"
    if not report.within_budget:
        over = format_bytes(report.peak_bytes - (report.budget_bytes or 0))
        part = f"{over} over the share of this graph"
        verdict = part if PART in report.notes else f"OVER THE BUDGET by {over}"
    elif not report.fits:
        verdict += "; unknown workspaces may exceed it" if report.unknown_workspaces else ", and OVER THE DEVICE"
    verdict += f", one of {len(report.others) + 1} graphs that train" if report.others else ""
    verdict += ", one graph of several: `reports()` has all" if PART in report.notes else ""
    yield "verdict", verdict if report.keeps_time else f"{verdict}, and SLOWER than max_slowdown"
    asked = [] if report.budget_bytes is None else [format_bytes(report.budget_bytes)]
    if report.budget_share is not None:
        earlier = ", granted to an earlier graph" if report.granted_bytes == report.budget_bytes else ""
        asked[0] += f" (memory_budget={report.budget_share:g}{' of this graph alone' * (PART in report.notes)}{earlier})"
    if (ledger := report.device_ledger) is not None:
        whole = f"{format_bytes(ledger.total_bytes)} of {ledger.device or 'the device'}"
        asked[0] += f", what {whole} leave; it binds in {NAMES[ledger.binding(report.peak_bytes)][1]}"
    asked += [] if report.max_slowdown is None else [f"{report.max_slowdown:.1%} more time"]
    yield "budget", ", ".join(asked) or "none"
    words, other = report.compared
    less = f" ({report.peak_bytes / other - 1:+.0%})" if other else ""
    yield "peak", f"{format_bytes(report.peak_bytes)}; {words} {format_bytes(other)}{less}"
    yield "added time", f"{report.added_share:+.1%} of the step, predicted"
    is_least = report.minimum_is_searched or report.minimum_peak_bytes <= report.lower_bound_bytes
    yield "least possible", f"{format_bytes(report.minimum_peak_bytes)}{'' if is_least else ' or less'}"
    largest = ((one.bytes, one.module) for one in report.saved[:BRIEFLY_SAVED])
    named = ((size, f"module {name}" if name[:1].isdigit() else name) for size, name in largest)  # "7" reads as a number
    saved = (", ".join(filter(None, (format_bytes(size), name))) for size, name in named)
    yield "largest saved tensors", "; ".join(saved) or "none"
    yield from [*(("hint", text) for text in report.hints), *(("note", text) for text in report.notes)]
    if report.ended_by_clock:
        yield "note", "the search ENDED BY THE CLOCK: another run may find another plan, so raise time_limit"
    if report.unknown_workspaces:
        yield "unknown workspaces", ", ".join(report.unknown_workspaces)
    if report.others:
        yield "other graphs", f"{len(report.others)}, see `others`"


def tables(report: ReportData) -> list[PlainTable]:
    """Returns tables of all figures and of the largest saved tensors, a screen of text."""
    shown = [named_figures(figures(report))]
    if report.device_ledger is not None:
        shown.append(report.device_ledger.table(report.peak_bytes))
    if report.saved:
        tensors = PlainTable("largest saved tensors", ("bytes", "op", "module", "source"), numbers=1)
        for tensor in report.saved[:SAVED_TENSORS_SHOWN]:
            op = "" if tensor.producer is None else report.plan.graph.ops[tensor.producer].target
            tensors.add_row(format_bytes(tensor.bytes), op, tensor.module, short_source(tensor.source))
        shown.append(tensors)
    return shown


def figures(report: ReportData) -> list[tuple[str, str]]:
    """Returns what a report has to say by name: its attributes that are set, what binds the peak, and what is stored."""
    given = {one.name: one.default for one in fields(report)}
    names = [name for name in (*FIGURES, *given) if getattr(report, name) not in (given.get(name), 0) and name not in SAID]
    rows = [(name, text) for name in names if (text := figure_text(name, getattr(report, name)))]
    if report.parts_after:
        parts, remedy = binding(report.parts_after), remedy_for(report.parts_after[0][0])
        rows.append(("binds the peak", f"{parts}; to lower it, {remedy}" if remedy else parts))
    plan, totals = report.plan, []
    forms = plan.schedule.forms(plan.graph)
    stays = [(plan.graph.values[value].bytes, form) for value, form in forms.items()]
    for name in {form.name for form in forms.values()}:
        sizes, held = zip(*((size, form.device_bytes) for size, form in stays if form.name == name), strict=True)
        noun, beside = "tensor" if len(sizes) == 1 else "tensors", f" in {format_bytes(sum(held))}" if any(held) else ""
        totals.append((-sum(sizes), f"{len(sizes)} {noun} of {format_bytes(sum(sizes))} {PLACES.get(name, name)}{beside}"))
    if totals:
        rows.append(("other forms", "; ".join(text for _, text in sorted(totals))))
    if moved := sum(form.host_bytes for form in forms.values()):
        at_best = format_seconds(sum(stalls_of(plan.graph, plan.schedule, 1 / PLANNED_SHARE)))
        stalls = f"stalls {at_best} at the link's whole rate, not {PLANNED_SHARE:.0%} of it"
        rows.append(("copies", f"{format_bytes(moved)} to the host and back in a call; {stalls}"))
    return rows


def figure_text(name: str, value: object) -> str:
    """Returns the value of an attribute of a report as text; empty for nothing, and for what has a table of its own."""
    match value:
        case bool():
            return "yes" if value else ""
        case int() | float() if name.endswith("seconds"):
            return format_seconds(value)
        case int():
            return format_bytes(value) if name.endswith("bytes") else str(value)
        case float():
            return f"{value:.1%}"
        case str():
            return value
        case tuple():
            return "; ".join(map(str, value)) if all(isinstance(one, str | int) for one in value) else ""
    return ""


def place(moment: PeakSnapshot) -> str:
    """Returns a text with the place of a peak in the step and the shares of its categories."""
    shares = ", ".join(f"{size / moment.bytes:.0%} {sort.value}" for sort, size in moment.by_sort[:SORTS_SHOWN])
    where = f" of {moment.module}" if moment.module else ""
    return f"{moment.half}, at {moment.op}{where}: {shares}"


def where(thing: ForwardValue | LiveTensor) -> str:
    """Returns the module and line of a tensor, as far as they are known."""
    return ", ".join(filter(None, (thing.module, short_source(thing.source))))


# -- comparison of two reports ---------------------------------------------------------------------------------------------


CHANGES_SHOWN = 20


@dataclass(frozen=True)
class Change:
    """A forward value whose decision or size differs. A side is None if its report lacks the value."""

    name: str
    before: ForwardValue | None
    after: ForwardValue | None

    @property
    def bytes(self) -> int:
        """The larger of its two sizes."""
        return max(value.bytes for value in (self.before, self.after) if value is not None)


@dataclass(frozen=True, repr=False)
class ReportDiff(Shown):
    """Differences of a second report from a first. They print as a screen of text."""

    before: ReportData
    after: ReportData

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changed values, the largest first. They are matched by their names."""
        first, second = ({value.name: value for value in report.values} for report in (self.before, self.after))
        names = dict.fromkeys((*first, *second))
        changes = [Change(n, first.get(n), second.get(n)) for n in names]
        changes = [one for one in changes if len({(v and v.decision, v and v.bytes) for v in (one.before, one.after)}) > 1]
        return tuple(sorted(changes, key=lambda change: -change.bytes))

    @property
    def figures(self) -> tuple[tuple[str, str, str, str], ...]:
        """Rows of (name, before, after, difference), one for each figure that either report has."""
        rows = []
        for name in COMPARED:
            first, second = getattr(self.before, name), getattr(self.after, name)
            if first or second:
                difference = "" if first is None or second is None else _signed(name, second - first)
                rows.append((name, figure_text(name, first) or "-", figure_text(name, second) or "-", difference))
        return tuple(rows)

    def line(self) -> str:
        old, new = self.before.predicted_peak_bytes, self.after.predicted_peak_bytes
        peaks = f"{format_bytes(old)} -> {format_bytes(new)} ({_signed('bytes', new - old)})"
        return f"{len(self.changes)} values with another decision, predicted peak {peaks}"

    def tables(self) -> Sequence[PlainTable]:
        figures = PlainTable("", ("", "before", "after", "change"), numbers=0)
        for row in self.figures:
            figures.add_row(*row)
        title = f"{len(self.changes) or 'no'} values with another decision"
        table = PlainTable(title, ("bytes", "value", "before", "after", "why", "module"), numbers=1)
        for change in self.changes[:CHANGES_SHOWN]:
            sides = ["-" if side is None else side.decision.value for side in (change.before, change.after)]
            known = change.after or change.before
            table.add_row(format_bytes(change.bytes), change.name, *sides, known and known.why, known and known.module)
        return [figures, table]


COMPARED = (
    "budget_bytes", "predicted_peak_bytes", "compiled_peak_bytes", "reference_bytes", "baseline_peak_bytes",
    "minimum_peak_bytes", "saved_bytes", "host_peak_bytes", "recompute_seconds", "stall_seconds", "step_seconds",
)  # fmt: skip


def _signed(name: str, change: float) -> str:
    return f"{'+' if change > 0 else ''}{figure_text(name, change)}" if change else "="
