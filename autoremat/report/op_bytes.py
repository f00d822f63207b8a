"""Bytes per op: those of the simulation beside those of the code, by replay and as measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autoremat.basics.display import PlainTable
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.memory.allocations import Kernel
from autoremat.planner.memory.code_places import start_of
from autoremat.planner.plans.plan import Plan


def kernels_of_executions(plan: Plan, halves: Mapping[bool, Sequence[Kernel]]) -> tuple[Kernel | None, ...]:
    """Returns the kernel of each execution of ``plan``; None for one without a kernel.

    ``halves`` are named by ``is_backward``. Within a half, the kernels of an op follow one another as its executions do. The
    result is empty unless both halves are known.
    """
    if len(halves) < 2:
        return ()
    found: list[Kernel | None] = []
    for is_backward, executions in ((False, plan.schedule.forward), (True, plan.schedule.backward)):
        kernels = defaultdict[str, list[Kernel]](list)
        for kernel in halves[is_backward]:
            kernels[kernel.name].append(kernel)
        own = (kernels[plan.graph.ops[op].name] for op in executions)
        found += [of_op.pop(0) if of_op else None for of_op in own]
    return tuple(found)


def op_bytes_table(plan: Plan, kernels: Sequence[Kernel | None], measured: Mapping[str, int] | None = None) -> PlainTable:
    """Returns a table of the executions in sequence, with the bytes of the running call by simulation and by replay.

    The seconds of a generated kernel stand beside the last op that it computes. ``measured`` adds the bytes that were live at
    places of the code. Raises ``ValueError`` if it has none of the forward's.
    """
    simulated = [int(size) - plan.timeline.beside_bytes for size in plan.timeline.bytes_at]
    replayed = [None if kernel is None else kernel.bytes for kernel in kernels] or [None] * len(plan.sequence)
    columns: dict[str, Sequence[int | None]] = {"simulated": simulated, "replayed": replayed}
    if measured is not None:
        columns["measured"] = _measured(plan, kernels, measured)
    seconds = [None if kernel is None else kernel.seconds for kernel in kernels] or [None] * len(plan.sequence)
    has_seconds = any(lasts is not None for lasts in seconds)
    names = (*columns, *(["seconds"] if has_seconds else []))
    table = PlainTable(f"{len(plan.sequence)} executions", (*names, "op", "half", "where"), numbers=len(names))
    for position, (op, *sizes) in enumerate(zip((plan.graph.ops[i] for i in plan.sequence), *columns.values(), strict=True)):
        in_forward = position < len(plan.schedule.forward)
        half = "forward" if in_forward else "recomputed" if op.forward else "backward"
        cells = ["-" if size is None else format_bytes(size) for size in sizes]
        lasts = seconds[position]
        cells += ["-" if lasts is None else format_seconds(lasts)] if has_seconds else []
        table.add_row(*cells, op.name, half, op.module)
    return table


def _measured(plan: Plan, kernels: Sequence[Kernel | None], measured: Mapping[str, int]) -> list[int | None]:
    """Returns the measured bytes of each execution, above those that were live when the forward began."""
    places = [None if kernel is None else kernel.place for kernel in kernels]
    start = next((start_of(place) for place in places[: len(plan.schedule.forward)] if place is not None), None)
    if start is None or start not in measured:
        raise ValueError(
            "the measured step did not run the code of this report. Compile it by a step before the block of "
            "track_peak(ops=True), run it in that process, and without CUDA graphs or a wrapper in C++"
        )
    found = [None if place is None else measured.get(place) for place in places]
    return [None if size is None else size - measured[start] for size in found]
