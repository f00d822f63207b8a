"""Compares the bytes that each half of a call moves between the device and the host with those of its plan.

A compiler pass that drops or repeats a copy would otherwise cost memory, or results, in silence. Each half runs in one thread,
so calls of other threads, several forwards before a backward, and a second backward of a kept graph change nothing.
"""

from __future__ import annotations

import threading
from typing import Any

from autoremat import host_memory
from autoremat.basics.errors import TransferError
from autoremat.compiler.lowering import Compiled
from autoremat.report.report import Report
from autoremat.torch_private.autograd import backward_node
from autoremat.torch_private.fake_tensors import is_fake
from autoremat.torch_private.pipelining import infers_metadata
from autoremat.torch_private.untraced import around_backward


class _Running(threading.local):
    """The counts of this thread when the backward began that it runs."""

    from_host_bytes = replaced = 0


class TransferCheck:
    """The comparison for one graph, whose plan moves ``planned`` bytes to the host in the forward, and back in the backward."""

    def __init__(self, compiled: Compiled, planned: int) -> None:
        self.compiled, self.planned = compiled, planned
        self._running = _Running()

    def __call__(self, *args: Any) -> Any:
        """Returns the outputs of the graph. Raises ``TransferError`` if the forward moves other bytes than planned."""
        before = host_memory.moved.to_host_bytes
        outputs = self.compiled(*args)
        done = host_memory.moved.to_host_bytes - before
        if done != self.planned and (infers_metadata() or any(map(is_fake, outputs))):
            return outputs  # no part of a step: the call only shows shapes, to a pipeline or to DDP's buckets
        self._compare("forward", "to", done)
        node = backward_node(outputs, args)
        if node is not None:
            around_backward(node, self._begin_backward, self._end_backward)
        return outputs

    def _begin_backward(self, *_: Any) -> None:
        self._running.from_host_bytes, self._running.replaced = host_memory.moved.from_host_bytes, host_memory.moved.replaced

    def _end_backward(self, *_: Any) -> None:
        if host_memory.moved.replaced == self._running.replaced:
            self._compare("backward", "from", host_memory.moved.from_host_bytes - self._running.from_host_bytes)

    def _compare(self, half: str, direction: str, done: int) -> None:
        if done != self.planned:
            raise TransferError(
                f"the {half} of a compiled graph has moved {done} bytes {direction} the host, and its plan moves "
                f"{self.planned}: a pass of the compiler has dropped or repeated copies. Compile without host_memory, and "
                "report this"
            )


def checked_transfers(compiled: Compiled, report: Report) -> Compiled:
    """Returns ``compiled`` with its transfers compared with the plan of ``report``, if that moves any."""
    planned = 0 if report.stored is None else report.stored.moved_bytes
    return TransferCheck(compiled, planned) if planned else compiled
