"""Reports as text and as tables for terminals."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from autoremat.basics.display import PlainTable, named_figures
from autoremat.basics.display import as_text as as_text
from autoremat.basics.errors import binding
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph.device_budget import NAMES
from autoremat.planner.plans.plan import Plan
from autoremat.report.binding import remedy_for
from autoremat.report.data import ReportData
from autoremat.report.decisions import Decision, ForwardValue, Total
from autoremat.report.peak_snapshot import LiveTensor, PeakSnapshot

SAVED_TENSORS_SHOWN, BRIEFLY_SAVED, SORTS_SHOWN = 10, 3, 4

Rows = Iterator[tuple[str, str]]


def brief(report: ReportData) -> Rows:
    """Yields the lines of a printed report: six that every report has, then hints and notes."""
    verdict = "within the budget" if report.budget_bytes is not None else "no budget of memory"
    if not report.within_budget:
        verdict = f"OVER THE BUDGET by {format_bytes(report.peak_bytes - (report.budget_bytes or 0))}"
    elif not report.fits:
        verdict += "; unknown workspaces may exceed it" if report.unknown_workspaces else ", and OVER THE DEVICE"
    yield "verdict", verdict if report.keeps_time else f"{verdict}, and SLOWER than max_slowdown"
    asked = [] if report.budget_bytes is None else [format_bytes(report.budget_bytes)]
    if report.budget_share is not None:
        earlier = ", granted to an earlier graph" if report.granted_bytes == report.budget_bytes else ""
        asked[0] += f" (memory_budget={report.budget_share:g}{earlier})"
    if report.device_ledger is not None:
        asked[0] += (
            f", what {format_bytes(report.device_ledger.total_bytes)} of {report.device_ledger.device or 'memory'} leave"
        )
    asked += [] if report.max_slowdown is None else [f"{report.max_slowdown:.1%} more time"]
    yield "budget", ", ".join(asked) or "none"
    words, other = report.compared
    less = f" ({report.peak_bytes / other - 1:+.0%})" if other else ""
    yield "peak", f"{format_bytes(report.peak_bytes)}; {words} {format_bytes(other)}{less}"
    yield "added time", f"{report.added_share:+.1%} of the step, predicted"
    yield "least possible", least_possible(report)
    saved = (", ".join(filter(None, (format_bytes(one.bytes), one.module))) for one in report.saved[:BRIEFLY_SAVED])
    yield "largest saved tensors", "; ".join(saved) or "none"
    yield from [*(("hint", text) for text in report.hints), *(("note", text) for text in report.notes)]
    if report.others:
        yield "other graphs", f"{len(report.others)}, see `others`"


def least_possible(report: ReportData) -> str:
    """Returns the least peak found, as the most that it is if no search was made for it."""
    is_least = report.minimum_is_searched or report.minimum_peak_bytes <= report.lower_bound_bytes
    return f"{'' if is_least else 'at most '}{format_bytes(report.minimum_peak_bytes)}"


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


def short_source(source: str) -> str:
    """Returns the last three parts of an absolute path. A path within an installed package is relative, and stays whole."""
    return "/".join(source.replace("\\", "/").split("/")[-3:]) if os.path.isabs(source) else source


def figures(report: ReportData) -> list[tuple[str, str]]:
    """Returns the report's figures, each with its name."""
    return [*_budgets(report), *_peaks(report), *_plan(report), *_calls(report), *_changes(report), *_remarks(report)]


def _budgets(report: ReportData) -> Rows:
    """Yields the budgets of memory, time and the device, and the excess over the budget."""
    budget, soft = "none" if report.budget_bytes is None else format_bytes(report.budget_bytes), report.soft_budget_bytes
    if report.budget_bytes is None and soft is not None:
        budget += f" (torch's own partition needs {format_bytes(soft)})"
    elif report.reference_bytes is not None and report.budget_share is not None:
        asked = f"the share of {report.budget_share:g} of the reference peak"
        is_granted = report.granted_bytes == report.budget_bytes
        budget += f": that of an earlier graph of this function, over {asked}" if is_granted else f": {asked}"
    yield "budget", budget
    if report.max_slowdown is not None:
        slowdown, seconds = max(report.slowdown or 0.0, 0.0), format_seconds(report.seconds_without_budget or 0.0)
        idle = "no plan needs less memory" if report.budget_bytes is None else "neither budget binds"
        binds = f"{report.binding_budget} binds" if report.binding_budget else idle
        is_kept = f"allowed {report.max_slowdown:.1%}; {binds}" if report.keeps_time else f"MORE than {report.max_slowdown:.1%}"
        yield "budget of time", f"{slowdown:.1%} over the {seconds} of the plan without a budget, {is_kept}"
    if (ledger := report.device_ledger) is not None:
        peak, total = format_bytes(report.predicted_device_bytes or 0), format_bytes(ledger.total_bytes)
        name = f" ({ledger.device})" if ledger.device else ""
        reserve = f", {format_bytes(ledger.reserve_bytes)} of them kept free" if ledger.reserve_bytes else ""
        part = NAMES[ledger.binding(report.peak_bytes)][1]
        yield "device", f"predicted peak {peak} of {total}{name}{reserve}; it binds in {part}"
    if not report.within_budget:
        yield "over the budget", f"by {format_bytes(report.peak_bytes - (report.budget_bytes or 0))}"


def _peaks(report: ReportData) -> Rows:
    """Yields the peaks of the plan, of its code and of other plans."""
    share = report.predicted_peak_bytes / report.baseline_peak_bytes if report.baseline_peak_bytes else 1.0
    reserved = f", plus {format_bytes(report.code_headroom_bytes)} of code headroom" if report.code_headroom_bytes else ""
    yield "predicted peak", f"{format_bytes(report.predicted_peak_bytes)} ({share:.0%} of the baseline){reserved}"
    if report.compiled_peak_bytes is not None:
        because = f"; memory of the budget stays free, because {report.room_left_because}" if report.room_left_because else ""
        yield "peak of the generated code", format_bytes(report.compiled_peak_bytes) + because
        reserved = ""  # it is in the minimum, which is of code
    if report.reference_bytes is not None:
        yield "reference peak", f"{format_bytes(report.reference_bytes)}, that of {report.reference_source}"
    yield "baseline", f"{format_bytes(report.baseline_peak_bytes)}, without recomputation"
    if report.peak_after is not None:
        yield "peak snapshot", place(report.peak_after)
    if report.parts_after:
        parts, remedy = binding(report.parts_after), remedy_for(report.parts_after[0][0])
        yield "binds the peak", f"{parts}; to lower it, {remedy}" if remedy else parts
    bound = format_bytes(report.lower_bound_bytes)
    yield "minimum peak found", f"{least_possible(report)}{reserved} (proven lower bound {bound})"


def _plan(report: ReportData) -> Rows:
    """Yields what the plan does, what that costs, and how it was found."""
    yield "saved for the backward", f"{format_bytes(report.saved_bytes)} in {len(report.saved)} tensors"
    again = f"{format_seconds(report.recompute_seconds)} estimated ({report.overhead:.1%} of the forward)"
    yield "recomputed", f"{report.recomputed_ops} ops, {again}"
    if report.values:
        counts = Counter(value.decision for value in report.values)
        yield "forward values", ", ".join(f"{counts[one]} {one.value}" for one in Decision if counts[one])
    yield "predicted time", f"{format_seconds(report.predicted_seconds)} for forward and backward, with recomputation"
    yield "optimality gap", "unknown" if report.gap is None else f"at most {report.gap:.1%} of the step's time"
    shares = {"calibrated": report.calibrated_share, "assumed": report.assumed_share}
    sources = f"{report.cost_model}: " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)
    yield "cost model", f"{sources}; communication at {report.interconnect}" if report.interconnect else sources
    end = ", until the work of time_limit was done" if report.time_limited else ""
    if report.ended_by_clock:
        end = (
            ", ENDED BY THE CLOCK at time_limit, before the work was done: another run may find another plan, so raise "
            "time_limit or plan on a faster processor"
        )
    yield "planned", f"{report.ops} ops in {format_seconds(report.planning_seconds)}{end}"
    yield "gradients", f"{format_bytes(report.gradient_bytes)} at the end of the step, whatever is recomputed"


def _calls(report: ReportData) -> Rows:
    """Yields the figures of a step of several calls: open calls, and first and later micro-batches."""
    beside = (report.in_flight - 1) * report.held_bytes + report.resident_bytes
    if report.in_flight > 1:
        others, own = f"{report.in_flight - 1} x {format_bytes(report.held_bytes)}", format_bytes(report.peak_bytes - beside)
        yield "calls in flight", f"{report.in_flight}: {others} saved + {own} peak of a call"
    if report.resident_bytes:
        more, first = format_bytes(report.resident_bytes), format_bytes(report.peak_bytes - report.resident_bytes)
        yield "later micro-batches", f"counted, with {more} of earlier ones' gradients and outputs; the first needs {first}"
    elif report.accumulated_bytes and (report.device_ledger is None or not report.device_ledger.counts_gradients):
        more = format_bytes(report.accumulated_bytes)
        yield "later micro-batches", f"{more} more, if the gradients of earlier ones are kept (option accumulate)"


def _changes(report: ReportData) -> Rows:
    """Yields what the plan changes beside recomputation: chunks, tiles, tensors on the host; and what it cannot."""
    if report.graph_pool_bytes is not None:
        pool = f"{format_bytes(report.graph_pool_bytes)}, kept between steps, part of the peak of the generated code"
        yield "pool of CUDA graphs", pool
    if report.loss_chunks > 1:
        least = report.minimum_unchunked_bytes
        whole = "" if least is None else f"; without chunks the minimum peak found is {format_bytes(least)}"
        yield "chunked loss", f"{report.loss_chunks} chunks, so sums over tokens round differently{whole}"
    if report.tiles > 1:
        stretches = f"{report.tiled_stretches} stretch{'es' if report.tiled_stretches > 1 else ''}"
        yield "tiled", f"{stretches} in {report.tiles} tiles, so sums over rows round differently"
    if report.loss_chunked_by:
        yield "chunked loss", f"by {report.loss_chunked_by}, and not again by autoremat"
    yield from () if report.stored is None else report.stored.figures


def _remarks(report: ReportData) -> Rows:
    for text in report.unused_forms:
        yield "not possible", text
    if report.ranks:
        yield "shared plan", f"of ranks {', '.join(map(str, report.ranks))}"
    if report.unknown_workspaces:
        yield "unknown workspaces", f"{', '.join(report.unknown_workspaces)}: the peak may be higher by these"


def place(moment: PeakSnapshot) -> str:
    """Returns a text with the place of a peak in the step and the shares of its categories."""
    shares = ", ".join(f"{size / moment.bytes:.0%} {sort.value}" for sort, size in moment.by_sort[:SORTS_SHOWN])
    where = f" of {moment.module}" if moment.module else ""
    return f"{moment.half}, at {moment.op}{where}: {shares}"


def value_table(values: Sequence[ForwardValue], limit: int | None) -> PlainTable:
    """Returns a table of the first ``limit`` of ``values``, with their decisions and reasons."""
    shown = values if limit is None else values[:limit]
    title = f"{len(shown)} of {len(values)} values" if len(shown) < len(values) else f"{len(values)} values"
    table = PlainTable(title, ("bytes", "added", "value", "decision", "where, and why"), numbers=2)
    for value in shown:
        added = format_seconds(value.added_seconds) if value.added_seconds else ""
        lines = "\n".join(filter(None, (where(value), value.why)))  # side by side, neither is readable at 80 columns
        table.add_row(format_bytes(value.bytes), added, value.name, value.decision.value, lines)
    return table


def where(thing: ForwardValue | LiveTensor) -> str:
    """Returns the module and line of a tensor, as far as they are known."""
    return ", ".join(filter(None, (thing.module, short_source(thing.source))))


def totals_table(totals: Sequence[Total], by: str) -> PlainTable:
    """Returns a table of sums by module or op."""
    other = [format_bytes(total.stored_bytes) for total in totals] if any(total.stored_bytes for total in totals) else []
    columns = ("saved", *(("in other forms",) if other else ()), "recomputed", "fused", "run", "run again", "values", by)
    table = PlainTable(f"by {by}", columns, numbers=len(columns) - 1)
    for number, total in enumerate(totals):
        table.add_row(
            format_bytes(total.saved_bytes), *other[number : number + 1],
            format_bytes(total.recomputed_bytes), format_bytes(total.fused_bytes),
            format_seconds(total.seconds), format_seconds(total.added_seconds), str(total.values), total.name or "-",
        )  # fmt: skip
    return table


def moment_table(moment: PeakSnapshot, limit: int | None) -> PlainTable:
    """Returns a table of the live tensors at a peak, the largest first."""
    table = PlainTable(
        f"{format_bytes(moment.bytes)} live in the {place(moment)}", ("bytes", "tensor", "kind", "where"), numbers=1
    )
    shown = moment.live if limit is None else moment.live[:limit]
    for tensor in shown:
        table.add_row(format_bytes(tensor.bytes), tensor.name, tensor.sort.value, where(tensor))
    unseen = moment.live[len(shown) :]
    if unseen:
        table.add_row(format_bytes(sum(tensor.bytes for tensor in unseen)), f"{len(unseen)} others", "", "")
    return table


def op_bytes_table(plan: Plan) -> PlainTable:
    """Returns a table of the executions in sequence, with the simulated bytes of the running call."""
    table = PlainTable(f"{len(plan.sequence)} executions", ("simulated", "op", "half", "where"), numbers=1)
    for position, (op, live) in enumerate(zip((plan.graph.ops[i] for i in plan.sequence), plan.timeline.bytes_at, strict=True)):
        in_forward = position < len(plan.schedule.forward)
        half = "forward" if in_forward else "recomputed" if op.forward else "backward"
        table.add_row(format_bytes(int(live) - plan.timeline.beside_bytes), op.name, half, op.module)
    return table
