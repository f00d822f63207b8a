"""Reports as text and as tables for terminals."""

from __future__ import annotations

import os
from collections.abc import Sequence

from autoremat.basics.display import PlainTable, named_figures
from autoremat.basics.display import as_text as as_text
from autoremat.basics.errors import binding
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph.device_budget import NAMES, DeviceBudget
from autoremat.planner.plans.plan import Plan
from autoremat.report.data import ReportData, Total
from autoremat.report.decisions import Decision, ForwardValue
from autoremat.report.peak_snapshot import LiveTensor, PeakSnapshot

SAVED_TENSORS_SHOWN, SORTS_SHOWN = 10, 4


def tables(report: ReportData) -> list[PlainTable]:
    """Returns tables of the figures and of the largest saved tensors, a screen of text."""
    found = [named_figures(figures(report))]
    if report.device_ledger is not None:
        found.append(report.device_ledger.table(report.peak_bytes))
    if report.saved:
        tensors = PlainTable("largest saved tensors", ("bytes", "op", "module", "source"), numbers=1)
        for tensor in report.saved[:SAVED_TENSORS_SHOWN]:
            tensors.add_row(format_bytes(tensor.bytes), tensor.op, tensor.module, short_source(tensor.source))
        found.append(tensors)
    return found


def short_source(source: str) -> str:
    """Returns the last three parts of an absolute path. A path within an installed package is relative, and stays whole."""
    return "/".join(source.replace("\\", "/").split("/")[-3:]) if os.path.isabs(source) else source


def figures(report: ReportData) -> list[tuple[str, str]]:
    """Returns the report's figures, each with its name."""
    share = report.predicted_peak_bytes / report.baseline_peak_bytes if report.baseline_peak_bytes else 1.0
    reserved = f", plus {format_bytes(report.code_headroom_bytes)} of code headroom" if report.code_headroom_bytes else ""
    least_reserve = reserved if report.compiled_peak_bytes is None else ""  # else it is in the figure, which is of code
    is_least = report.minimum_is_searched or report.minimum_peak_bytes <= report.lower_bound_bytes
    at_most, unsearched = ("", "") if is_least else ("at most ", "; less was not searched for")
    rows = [
        ("budget", _budget_text(report)),
        ("predicted peak", f"{format_bytes(report.predicted_peak_bytes)} ({share:.0%} of the baseline){reserved}"),
        ("baseline", f"{format_bytes(report.baseline_peak_bytes)}, without recomputation"),
        ("minimum peak found", f"{at_most}{format_bytes(report.minimum_peak_bytes)}{least_reserve} (proven lower "
                           f"bound {format_bytes(report.lower_bound_bytes)}{unsearched})"),
        ("saved for the backward", f"{format_bytes(report.saved_bytes)} in {len(report.saved)} tensors"),
        ("recomputed", f"{report.recomputed_ops} ops, {format_seconds(report.recompute_seconds)} estimated "
                       f"({report.overhead:.1%} of the forward)"),
        ("predicted time", f"{format_seconds(report.predicted_seconds)} for forward and backward, with recomputation"),
        ("optimality gap", "unknown" if report.gap is None else f"at most {report.gap:.1%} of the step's time"),
        ("cost model", _sources(report)),
        ("planned", f"{report.ops} ops in {format_seconds(report.planning_seconds)}{_end(report)}"),
        ("gradients", f"{format_bytes(report.gradient_bytes)} at the end of the step, whatever is recomputed"),
        *micro_batches(report),
    ]  # fmt: skip
    if report.reference_bytes is not None:
        rows.insert(2, ("reference peak", f"{format_bytes(report.reference_bytes)}, that of {report.reference_source}"))
    if report.values:
        counts = {decision: sum(value.decision is decision for value in report.values) for decision in Decision}
        texts = (f"{count} {decision.value}" for decision, count in counts.items() if count)
        rows.insert(6, ("forward values", ", ".join(texts)))
    if report.peak_after is not None:
        rows[3:3] = [("peak snapshot", place(report.peak_after)), *_binding(report)]
    if report.compiled_peak_bytes is not None:
        because = f"; memory of the budget stays free, because {report.room_left_because}" if report.room_left_because else ""
        rows.insert(2, ("peak of the generated code", format_bytes(report.compiled_peak_bytes) + because))
    if report.graph_pool_bytes is not None:
        pool = f"{format_bytes(report.graph_pool_bytes)}, kept between steps, part of the peak of the generated code"
        rows.append(("pool of CUDA graphs", pool))
    rows[1:1] = _budgets(report)
    rows += _chunks(report) + ([] if report.stored is None else report.stored.figures(report.host_memory_bytes))
    rows += [("not possible", text) for text in report.unused_forms]
    if report.ranks:
        rows.append(("shared plan", f"of ranks {', '.join(map(str, report.ranks))}"))
    if report.unknown_workspaces:
        rows.append(("unknown workspaces", f"{', '.join(report.unknown_workspaces)}: the peak may be higher by these"))
    rows += [("note", note) for note in report.notes]
    if report.others:
        rows.append(("other graphs", f"{len(report.others)}, see `others`"))
    return rows


def _budget_text(report: ReportData) -> str:
    """Returns the budget of memory, and what it was asked for as; without one, what torch's own partition needs."""
    if report.budget_bytes is None:
        soft = report.soft_budget_bytes
        return "none" if soft is None else f"none (torch's own partition needs {format_bytes(soft)})"
    budget = format_bytes(report.budget_bytes)
    if report.budget_share is None or report.reference_bytes is None:
        return budget
    asked = f"share of {report.budget_share:g} of the reference peak"
    is_granted = report.granted_bytes == report.budget_bytes
    return f"{budget}: that of an earlier graph of this function, over the {asked}" if is_granted else f"{budget}: the {asked}"


def _binding(report: ReportData) -> list[tuple[str, str]]:
    """Returns what binds the peak of the plan, and the remedy for the largest kind of its bytes, if there is one."""
    if not report.parts_after:
        return []
    remedy = report.parts_after[0].remedy
    parts = binding([(part.name, part.bytes) for part in report.parts_after])
    return [("binds the peak", f"{parts}; to lower it, {remedy}" if remedy else parts)]


def _end(report: ReportData) -> str:
    if report.ended_by_clock:
        return (
            ", ENDED BY THE CLOCK at time_limit, before the work was done: another run may find another plan, so raise "
            "time_limit or plan on a faster processor"
        )
    return ", until the work of time_limit was done" if report.time_limited else ""


def _budgets(report: ReportData) -> list[tuple[str, str]]:
    """Returns the figures of the budget of time and of the device, each with its name, and the excess over the budget."""
    rows = []
    if report.max_slowdown is not None:
        rows.append(("budget of time", time_text(report)))
    if report.device_ledger is not None:
        rows.append(("device", _device_text(report, report.device_ledger)))
    if not report.within_budget:
        rows.append(("over the budget", f"by {format_bytes(report.peak_bytes - (report.budget_bytes or 0))}"))
    return rows


def _chunks(report: ReportData) -> list[tuple[str, str]]:
    rows = []
    if report.loss_chunks > 1:
        least = report.minimum_unchunked_bytes
        whole = "" if least is None else f"; without chunks the minimum peak found is {format_bytes(least)}"
        rows.append(("chunked loss", f"{report.loss_chunks} chunks, so sums over tokens round differently{whole}"))
    if report.tiles > 1:
        stretches = f"{report.tiled_stretches} stretch{'es' if report.tiled_stretches > 1 else ''}"
        rows.append(("tiled", f"{stretches} in {report.tiles} tiles, so sums over rows round differently"))
    if report.loss_chunked_by:
        rows.append(("chunked loss", f"by {report.loss_chunked_by}, and not again by autoremat"))
    return rows


def _device_text(report: ReportData, ledger: DeviceBudget) -> str:
    """Returns the predicted peak of the whole device, and the part of the step that has it."""
    peak, total = format_bytes(report.predicted_device_bytes or 0), format_bytes(ledger.total_bytes)
    reserve = f", {format_bytes(ledger.reserve_bytes)} of them kept free" if ledger.reserve_bytes else ""
    name = f" ({ledger.device})" if ledger.device else ""
    return f"predicted peak {peak} of {total}{name}{reserve}; it binds in {NAMES[ledger.binding(report.peak_bytes)]}"


def time_text(report: ReportData) -> str:
    """Returns the predicted slow-down beside the allowed one, and the budget that binds."""
    slowdown, seconds = max(report.slowdown or 0.0, 0.0), format_seconds(report.seconds_without_budget or 0.0)
    over = f"{slowdown:.1%} over the {seconds} of the plan without a budget"
    if not report.keeps_time:
        return f"{over}, MORE than the allowed {report.max_slowdown:.1%}"
    idle = "no plan needs less memory" if report.budget_bytes is None else "neither budget binds"
    return f"{over}, allowed {report.max_slowdown:.1%}; {f'{report.binding_budget} binds' if report.binding_budget else idle}"


def micro_batches(report: ReportData) -> list[tuple[str, str]]:
    """Returns the figures of a step of several calls, each with its name: open calls, and first and later micro-batches."""
    rows = []
    beside = (report.in_flight - 1) * report.held_bytes + report.resident_bytes
    if report.in_flight > 1:
        others, own = f"{report.in_flight - 1} x {format_bytes(report.held_bytes)}", format_bytes(report.peak_bytes - beside)
        rows.append(("calls in flight", f"{report.in_flight}: {others} saved + {own} peak of a call"))
    if report.resident_bytes:
        more, first = format_bytes(report.resident_bytes), format_bytes(report.peak_bytes - report.resident_bytes)
        text = f"counted, with {more} of earlier ones' gradients and outputs; the first needs {first}"
        rows.append(("later micro-batches", text))
    elif report.accumulated_bytes and (report.device_ledger is None or not report.device_ledger.counts_gradients):
        more = format_bytes(report.accumulated_bytes)
        rows.append(("later micro-batches", f"{more} more, if the gradients of earlier ones are kept (option accumulate)"))
    return rows


def place(moment: PeakSnapshot) -> str:
    """Returns a text with the place of a peak in the step and the shares of its categories."""
    percents = whole_percents([size for _, size in moment.by_sort])
    parts = list(zip(moment.by_sort, percents, strict=True))[:SORTS_SHOWN]
    shares = ", ".join(f"{percent}% {sort.value}" for (sort, _), percent in parts)
    where = f" of {moment.module}" if moment.module else ""
    return f"{moment.half}, at {moment.op}{where}: {shares}"


def whole_percents(sizes: Sequence[int]) -> list[int]:
    """Returns the shares of ``sizes`` in whole percents that sum to 100. The largest remainders are rounded up."""
    total = sum(sizes)
    if not total:
        return [0 for _ in sizes]
    percents = [100 * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda number: -(100 * sizes[number] % total))
    for number in by_remainder[: 100 - sum(percents)]:
        percents[number] += 1
    return percents


def _sources(report: ReportData) -> str:
    shares = {"calibrated": report.calibrated_share, "assumed": report.assumed_share}
    text = f"{report.cost_model}: " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)
    return f"{text}; communication at {report.interconnect}" if report.interconnect else text


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
    count, size = len(unseen) + moment.others, sum(tensor.bytes for tensor in unseen) + moment.others_bytes
    if count:
        table.add_row(format_bytes(size), f"{count} others", "", "")
    return table


def op_bytes_table(plan: Plan) -> PlainTable:
    """Returns a table of the executions in sequence, with the simulated bytes of the running call."""
    table = PlainTable(f"{len(plan.sequence)} executions", ("simulated", "op", "half", "where"), numbers=1)
    for position, (op, live) in enumerate(zip((plan.graph.ops[i] for i in plan.sequence), plan.timeline.bytes_at, strict=True)):
        in_forward = position < len(plan.schedule.forward)
        half = "forward" if in_forward else "recomputed" if op.forward else "backward"
        table.add_row(format_bytes(int(live) - plan.timeline.beside_bytes), op.name, half, op.module)
    return table
