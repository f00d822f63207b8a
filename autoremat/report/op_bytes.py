"""Bytes per op: those of the simulation beside those of the generated code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autoremat.basics.display import PlainTable, plain_table
from autoremat.basics.units import format_bytes
from autoremat.planner.memory.allocations import HalfAllocations
from autoremat.planner.plans.plan import Plan


def code_bytes_of(plan: Plan, halves: Mapping[bool, HalfAllocations]) -> tuple[int | None, ...]:
    """Returns the bytes that are live while generated code runs each execution of ``plan``; None for one without a kernel.

    ``halves`` are named by ``is_backward``. Within a half, the kernels of an op follow one another as its executions do. The
    result is empty unless both halves are known.
    """
    if len(halves) < 2:
        return ()
    found: list[int | None] = []
    for is_backward, executions in ((False, plan.schedule.forward), (True, plan.schedule.backward)):
        kernels = defaultdict[str, list[int]](list)
        for name, size in halves[is_backward].kernels:
            kernels[name].append(size)
        own = (kernels[plan.graph.ops[op].name] for op in executions)
        found += [sizes.pop(0) if sizes else None for sizes in own]
    return tuple(found)


def op_bytes_table(plan: Plan, code_bytes: Sequence[int | None]) -> PlainTable:
    """Returns a table of the executions in sequence, with the bytes of the running call by simulation and by replay."""
    replayed = code_bytes or [None] * len(plan.sequence)
    table = plain_table(f"{len(plan.sequence)} executions", ("simulated", "replayed", "op", "half", "where"), numbers=2)
    for position, (op, bytes_) in enumerate(zip((plan.graph.ops[i] for i in plan.sequence), replayed, strict=True)):
        in_forward = position < len(plan.schedule.forward)
        half = "forward" if in_forward else "recomputed" if op.forward else "backward"
        simulated = int(plan.timeline.bytes_at[position]) - plan.timeline.beside_bytes
        table.add_row(format_bytes(simulated), "-" if bytes_ is None else format_bytes(bytes_), op.name, half, op.module)
    return table
