"""Torch's private names for the kernels of generated code: what each of them computes, reads and writes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.allocations import KernelWork
from autoremat.torch_private.origins import OP, Origins
from autoremat.torch_private.symbolic_sizes import most_of_expression, size_hint

OWN_OPS = "autoremat"
"""Namespace of the ops that move saved tensors. The stalls of a plan have their seconds."""


def kernels_of_code(lowering: Any, origins: Origins) -> tuple[KernelWork, ...]:
    """Returns the kernels that the generated code calls, in sequence. Each node of Inductor's scheduler became one."""
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    called = [
        node
        for node in lowering.scheduler.nodes
        if not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)
    ]
    library = {node for node in called if isinstance(node, ExternKernelSchedulerNode) or node.is_template()}
    runs = {node: _runs(node, origins) for node in called if node not in library}
    most: dict[fx.Node, int] = {}
    for origin, count in (pair for found in runs.values() for pair in found.items()):
        most[origin] = max(most.get(origin, 0), count)
    kernels: list[KernelWork] = []
    by_library = set[fx.Node]()
    for node in called:
        moved = _moved_bytes(node, lowering)
        if node not in library:
            kernels.append(KernelWork(_computed(runs[node], most), *moved))
            continue
        last = [nodes[-1] for name in sorted(node.get_buffer_names()) if (nodes := origins.of(name))]
        ops = {one: one.meta[OP].name for one in last if one.meta.get(OP) is not None}
        is_own = any(isinstance(one.target, torch._ops.OpOverload) and one.target.namespace == OWN_OPS for one in last)
        if not is_own and not (ops and by_library.issuperset(ops)):  # else one of several kernels of an op
            kernels.append(KernelWork(tuple((name, 1.0) for name in ops.values()), *moved, is_library=True))
        by_library.update(ops)
    return tuple(kernels)


def _runs(node: Any, origins: Origins) -> dict[fx.Node, int]:
    """Returns the nodes of the graph that a generated kernel computes, each with the iterations of its longest loop.

    A kernel that reads nothing fills a buffer, for the ops that add to it.
    """
    if not node.read_writes.reads:
        return {}
    found = defaultdict[fx.Node, int](int)
    for part in node.get_nodes():
        sizes, reduced = part.get_ranges()
        runs = math.prod(most_of_expression(size, origins.lowering.sizevars) for size in (*sizes, *reduced))
        for origin in {one for name in part.get_buffer_names() for one in origins.of(name)}:
            if origin.meta.get(OP) is not None:
                found[origin] = max(found[origin], runs)
    return found


def _computed(runs: Mapping[fx.Node, int], most: Mapping[fx.Node, int]) -> tuple[tuple[str, float], ...]:
    """Returns the ops of a generated kernel, each with the share of its elements.

    A pointwise op runs in every kernel that it is inlined into. Any other op has one result: the longest loop computes it, and
    the others that name it as their origin finish it or read it.
    """
    found: dict[str, float] = {}
    for node, count in runs.items():
        is_pointwise = node.meta[OP].kind is Kind.POINTWISE
        found[node.meta[OP].name] = min(1.0, count / max(1, _elements(node))) if is_pointwise else float(count == most[node])
    return tuple(sorted(found.items()))


def _elements(node: fx.Node) -> int:
    """Returns the number of elements that ``node`` computes."""
    tensors = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return max((size_hint(one.numel()) for one in tensors if isinstance(one, torch.Tensor)), default=1)


def _moved_bytes(node: Any, lowering: Any) -> tuple[int, int]:
    """Returns the bytes that a kernel reads, and those that it writes, each element of a tensor once.

    What it makes for itself alone is in no memory.
    """
    from torch._inductor.dependencies import WeakDep

    parts = set(node.get_nodes())
    made = {dependency.name for part in parts for dependency in part.read_writes.writes}
    inside = {name for name in made if all(user.node in parts for user in lowering.scheduler.name_to_buf[name].users)}

    def bytes_of(dependencies: Any, left_out: set[str]) -> int:
        elements = defaultdict[str, int](int)
        for dependency in dependencies - {one for one in dependencies if isinstance(one, WeakDep)}:
            if dependency.name not in left_out:
                elements[dependency.name] += _touched(dependency, lowering)
        return sum(_bytes_of(name, count, lowering) for name, count in elements.items())

    return bytes_of(node.read_writes.reads, made), bytes_of(node.read_writes.writes, inside)


def _touched(dependency: Any, lowering: Any) -> int:
    """Returns the number of elements that a dependency reads or writes. Reads by index touch at most one per iteration."""
    from torch._inductor.dependencies import MemoryDep

    if isinstance(dependency, MemoryDep) and dependency.is_indirect():
        return math.prod(most_of_expression(size, lowering.sizevars) for size in dependency.size)
    try:
        return most_of_expression(dependency.get_numel(), lowering.sizevars)
    except NotImplementedError:  # a buffer that stands for several results or for none
        return 0


def _bytes_of(name: str, elements: int, lowering: Any) -> int:
    """Returns the bytes of so many elements of a buffer, at most of all of them."""
    try:
        size, dtype = lowering.get_numel(name), lowering.get_dtype(name)
    except (KeyError, NotImplementedError):
        return 0
    return min(elements, most_of_expression(size, lowering.sizevars)) * int(dtype.itemsize)
