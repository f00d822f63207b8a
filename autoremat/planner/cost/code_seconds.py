"""Computes the seconds of the kernels that generated code calls, by the same rates as the seconds of a plan.

    seconds of a generated kernel  =  launch  +  its arithmetic, overlapped with the bytes that it reads and writes

The code tells what it computes, reads and writes, where :mod:`autoremat.planner.cost.durations` follows rules. A library kernel
has the seconds of its op. Library kernels that the code generator put in place of ops share the seconds of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoremat.planner.cost.durations import arithmetic_seconds, overlapped
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.allocations import KernelWork


def code_seconds(graph: Graph, executions: Iterable[int], kernels: Sequence[KernelWork]) -> list[float]:
    """Returns the seconds of each of the ``kernels`` of one half. ``executions`` are the ops that the half runs."""
    number = {op.name: index for index, op in enumerate(graph.ops)}
    known = {name for kernel in kernels for name, _ in kernel.ops}
    by_library = {name for kernel in kernels if kernel.is_library for name, _ in kernel.ops}
    unknown = sum(kernel.is_library and not kernel.ops for kernel in kernels)
    ops = (graph.ops[index] for index in executions)
    replaced = sum(op.seconds for op in ops if op.kind is Kind.EXTERN and op.name not in known)

    def seconds_of(kernel: KernelWork) -> float:
        if kernel.is_library:
            return sum(graph.ops[number[name]].seconds for name, _ in kernel.ops) if kernel.ops else replaced / unknown
        own = ((number[name], share) for name, share in kernel.ops if name not in by_library)
        busy = sum(share * _arithmetic(graph, op) for op, share in own)
        return graph.launch_seconds + overlapped(graph, busy, kernel.read_bytes, kernel.written_bytes)

    return list(map(seconds_of, kernels))


def _arithmetic(graph: Graph, index: int) -> float:
    """Returns the seconds of an op beside memory traffic and launch. An extern op has a launch of its own in its seconds."""
    launch = graph.launch_seconds if graph.ops[index].kind is Kind.EXTERN else 0.0
    return max(0.0, arithmetic_seconds(graph)[index] - launch)
