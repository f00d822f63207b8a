"""Lets Inductor keep a buffer for a later one of its size wherever the peak of the code stays the same.

A kept buffer is still in the caches of a CPU, and a new one is not. But it stays live until the later buffer takes it over.
Inductor compares with a peak that it estimates from its scheduler. Here the live bytes are those of the lines of the code: with
results that are written in place, without buffers that fusion removes, and with the workspaces of library kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private.code_buffers import layout_bytes, received, results
from autoremat.torch_private.hooks import Method, hooked
from autoremat.torch_private.origins import Origins


@contextlib.contextmanager
def keeping_peaks(lowering: Any, known: ReplayContext) -> Iterator[None]:
    """Makes Inductor reuse buffers of ``lowering`` where that does not raise the peak, while active.

    ``known`` has the facts about the tensors that a backward receives.
    """
    from torch._inductor.codegen.wrapper import AllocateLine

    found: list[LiveBytes] = []

    def reuses(decide: Method, line: Any, free_line: Any, size: int) -> bool:
        if not found:  # the first decision falls when all lines are written
            found.append(LiveBytes(line.wrapper.lines, lowering, known))
        first, last = free_line.scheduler_node_index + 1, line.scheduler_node_index
        return found[0].takes(first, last, layout_bytes(line.node))  # ``size`` is not that of the largest shape

    with hooked(AllocateLine, "should_reuse_buffer", reuses):
        yield


class LiveBytes:
    """The bytes of a code's buffers that are live at each node of the scheduler, with the workspace of the node."""

    def __init__(self, lines: list[Any], lowering: Any, known: ReplayContext) -> None:
        self.lowering, self.nodes = lowering, lowering.scheduler.nodes
        self.received, self.held = received(lowering, known)
        self.allocated_by_kernels = self._allocated_by_kernels()
        self.bytes = np.zeros(len(self.nodes) + 1, dtype=np.int64)
        self.is_known = not self._has_parts() and not self.allocated_by_kernels.keys() & lowering.removed_buffers
        """False if buffers may be live that are not counted: those of nested graphs, and results that nothing reads."""
        if self.is_known:
            self._add_buffers(lines)
            self._add_workspaces()
        self.peak_bytes = int(self.bytes.max())

    def takes(self, first: int, last: int, size: int) -> bool:
        """Returns True if a buffer may stay live from node ``first`` up to, not including, node ``last``; it does so then."""
        if not self.is_known or (first < last and int(self.bytes[first:last].max()) + size > self.peak_bytes):
            return False
        self.bytes[first:last] += size
        return True

    def _has_parts(self) -> bool:
        """Returns True if the code calls nested graphs, or is one."""
        from torch._inductor import ir
        from torch._inductor.graph import SubgraphLowering

        buffers = (self.lowering.try_get_buffer(name) for node in self.nodes for name in node.get_buffer_names())
        calls = any(isinstance(buffer, (ir.InvokeSubgraph, ir.Conditional, ir.WhileLoop)) for buffer in buffers)
        return calls or isinstance(self.lowering, SubgraphLowering)

    def _add_buffers(self, lines: list[Any]) -> None:
        """Adds the bytes of each buffer from its first node to its last one. A fusion group frees what it reads at its end."""
        from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine, FreeLine, ReuseLine

        start, end, root, latest = dict.fromkeys(self.received, 0), dict[str, int](), dict[str, str](), 0
        for line in lines:
            if isinstance(line, (AllocateLine, FreeIfNotReusedLine)):
                latest = max(latest, line.scheduler_node_index)
            if isinstance(line, AllocateLine):
                start[line.node.get_name()] = line.scheduler_node_index
            elif isinstance(line, FreeIfNotReusedLine):
                name = line.node.get_name()
                end[root.get(name, name)] = line.scheduler_node_index
            elif isinstance(line, FreeLine):
                end[line.node.get_name()] = latest
            elif isinstance(line, ReuseLine):  # a result that is written in place
                name = line.node.get_name()
                root[line.reused_as.get_name()] = root.get(name, name)
                end.pop(root.get(name, name), None)
        for name, index in self.allocated_by_kernels.items():
            start.setdefault(name, index)
        end |= dict.fromkeys(self.held, len(self.nodes))
        for name in start.keys() - self.lowering.removed_buffers:
            size = self.received.get(name) or layout_bytes(self.lowering.try_get_buffer(name))
            self.bytes[start[name] : end.get(name, len(self.nodes)) + 1] += size

    def _allocated_by_kernels(self) -> dict[str, int]:
        """Returns the buffers that library kernels allocate themselves, with the numbers of their nodes."""
        from torch._inductor import ir

        found = dict[str, int]()
        for index, node in enumerate(self.nodes):
            for buffer in map(self.lowering.try_get_buffer, node.get_buffer_names()):
                if isinstance(buffer, ir.ExternKernelAlloc) and not buffer.should_allocate():
                    found |= dict.fromkeys((buffer.get_name(), *results(buffer)), index)
        return found

    def _add_workspaces(self) -> None:
        origins = Origins(self.lowering)
        for index, node in enumerate(self.nodes):
            self.bytes[index] += max((origins.workspace(name) or 0 for name in node.get_buffer_names()), default=0)
