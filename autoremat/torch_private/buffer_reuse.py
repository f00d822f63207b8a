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
        return found[0].takes(first, last, size)

    with hooked(AllocateLine, "should_reuse_buffer", reuses):
        yield


class LiveBytes:
    """The bytes of a code's buffers that are live at each node of the scheduler, with the workspace of the node."""

    def __init__(self, lines: list[Any], lowering: Any, known: ReplayContext) -> None:
        from torch._inductor.codegen.wrapper import EnterSubgraphLine

        self.lowering, self.count = lowering, len(lowering.scheduler.nodes)
        self.received, self.held = received(lowering, known)
        self.has_parts = any(isinstance(line, EnterSubgraphLine) for line in lines)
        self.bytes = np.zeros(self.count + 1, dtype=np.int64)
        if not self.has_parts:
            self._add_buffers(lines)
            self._add_workspaces()
        self.peak_bytes = int(self.bytes.max())

    def takes(self, first: int, last: int, size: int) -> bool:
        """Returns True if a buffer may stay live from node ``first`` up to, not including, node ``last``; it does so then."""
        if self.has_parts:  # their nodes have numbers of their own
            return False
        if first < last and int(self.bytes[first:last].max()) + size > self.peak_bytes:
            return False
        self.bytes[first:last] += size
        return True

    def _add_buffers(self, lines: list[Any]) -> None:
        from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine, ReuseLine

        start, end, root = dict.fromkeys(self.received, 0), self._last_reads(), dict[str, str]()
        for line in lines:
            if isinstance(line, AllocateLine):
                start[line.node.get_name()] = line.scheduler_node_index
            elif isinstance(line, FreeIfNotReusedLine):
                name = line.node.get_name()
                end[root.get(name, name)] = line.scheduler_node_index
            elif isinstance(line, ReuseLine):  # a result that is written in place
                name = line.node.get_name()
                root[line.reused_as.get_name()] = root.get(name, name)
                end.pop(root.get(name, name), None)
        for name, index in self._allocated_by_kernels().items():
            start.setdefault(name, index)
        end |= dict.fromkeys(self.held, self.count)
        for name in start.keys() - self.lowering.removed_buffers:
            size = self.received.get(name) or layout_bytes(self.lowering.try_get_buffer(name))
            self.bytes[start[name] : end.get(name, self.count) + 1] += size

    def _last_reads(self) -> dict[str, int]:
        """Returns the numbers of the last nodes that read the received tensors."""
        found = dict.fromkeys(self.received, 0)
        for index, node in enumerate(self.lowering.scheduler.nodes):
            found.update(dict.fromkeys(node.used_buffer_names() & found.keys(), index))
        return found

    def _allocated_by_kernels(self) -> dict[str, int]:
        """Returns the buffers that library kernels allocate themselves, with the numbers of their nodes."""
        from torch._inductor import ir

        found = dict[str, int]()
        for index, node in enumerate(self.lowering.scheduler.nodes):
            for buffer in map(self.lowering.try_get_buffer, node.get_buffer_names()):
                if isinstance(buffer, ir.ExternKernelAlloc) and not buffer.should_allocate():
                    found |= dict.fromkeys((buffer.get_name(), *results(buffer)), index)
        return found

    def _add_workspaces(self) -> None:
        origins = Origins(self.lowering)
        for index, node in enumerate(self.lowering.scheduler.nodes):
            self.bytes[index] += max((origins.workspace(name) or 0 for name in node.get_buffer_names()), default=0)
