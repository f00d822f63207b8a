"""The last stage of a compilation: registers and logs the report, warns if the budget does not hold, and checks transfers."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any

from autoremat import host_memory
from autoremat.basics.errors import BudgetWarning, TransferError, best_effort_message
from autoremat.basics.progress import finish
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import warn_of_unused_forms
from autoremat.compiler.lowering import Compiled
from autoremat.compiler.overlap_warning import watched
from autoremat.report.registry import add_report
from autoremat.report.report import Report
from autoremat.request.request import AS_A_STEP, Request
from autoremat.torch_private.autograd import backward_node, retraces_backwards
from autoremat.torch_private.compilers import trace_artifact
from autoremat.torch_private.fake_tensors import is_fake
from autoremat.torch_private.hooks import around_backward
from autoremat.torch_private.process_groups import infers_metadata

log = logging.getLogger("autoremat")

PART = (
    "one graph of several, for Dynamo broke the function: each has the share of its own reference peak, or its minimum peak "
    "where that is more. The steps that run are judged as a whole, and a warning tells if they need more than the share"
)
"""Note in the reports of the graphs of a broken function under a share."""

EVALUATION = ". All modules with its parameters are in evaluation mode: torch.no_grad() around evaluation needs no backward"
"""What a warning of an infeasible budget adds in evaluation with gradients on."""

_given = set[str]()
"""Kinds of the hints that this process has logged."""

TORCHS = ("aten.", "prims.", "mkldnn.", "quantized.")
"""Beginnings of the names of torch's own ops, which nobody else declares."""


def published(compiled: Compiled, report: Report | None, request: Request, note: str = "", excuse: str = "") -> Compiled:
    """Registers and logs ``report``, with ``note`` if that is not empty, and returns ``compiled``.

    ``excuse`` ends the warning of a step over its budget.

    The returned callable compares its transfers with the plan. It is watched for other open calls if the graph has a budget of
    its own. Warns with ``BudgetWarning`` if the step exceeds the budget, or if compiled autograd traces its backward anew.
    """
    if report is None:
        return compiled
    more = (PART if request.on_infeasible == AS_A_STEP else "", note)
    # A record may have the ledger of another device.
    report = dataclasses.replace(report, device_ledger=request.limits.ledger, notes=(*report.notes, *filter(None, more)))
    _tell(report, request, excuse)
    trace_artifact("autoremat_report", report.to_json)
    add_report(report)
    if report.host_peak_bytes:
        host_memory.release()  # the buffers of a plan that this one replaces have other sizes
    if report.moved_bytes:
        compiled = TransferCheck(compiled, report.moved_bytes)
    if not request.limits.bounds_peak or request.limits.step_share is not None:
        return compiled
    return watched(compiled, report, request.limits.reference_share is not None)


def _tell(report: Report, request: Request, excuse: str) -> None:
    """Logs the report, and warns of what does not hold."""
    if report.unknown_workspaces and report.budget_bytes is not None:
        own = [name for name in report.unknown_workspaces if not name.startswith(TORCHS)]
        advice = [f"declare_pure(..., workspace_bytes=...) tells those of {', '.join(own)}"] if own else []
        if len(own) < len(report.unknown_workspaces):
            advice.append("lower memory_budget by what torch's own ops take, which track_peak measures")
        names = ", ".join(report.unknown_workspaces)
        log.warning("the budget may be exceeded by the workspaces of %s, which are not known: %s", names, "; ".join(advice))
    if not report.within_budget and report.budget_bytes is not None and request.on_infeasible != AS_A_STEP:
        message = best_effort_message(
            "the step", report.peak_bytes, report.budget_bytes, report.budget_share, report.reference_bytes or 0
        )
        warn_user(message + excuse, BudgetWarning)
    warn_of_unused_forms(report.unused_forms)
    if not report.keeps_time:
        warn_user(
            f"the step is predicted to take {report.slowdown:.1%} longer than without a budget, over its max_slowdown of "
            f"{report.max_slowdown:.1%}: no plan found within memory_budget ({format_bytes(report.budget_bytes or 0)}) is fast "
            f"enough, and within that time the minimum peak found is {format_bytes(report.timed_minimum_bytes or 0)}. "
            'on_infeasible="best_effort" runs the step anyway',
            BudgetWarning,
        )
    for hint in report.hints:
        if (kind := hint.partition(":")[0]) not in _given:
            _given.add(kind)
            log.warning("%s", hint)
    finish(report.summary())
    log.info("%s", report.summary())
    if report.budget_bytes is not None and retraces_backwards():
        warn_user(
            "compiled autograd traces the backward of this graph anew and compiles it without the plan's order and without a "
            f"look at its peak: the budget of {format_bytes(report.budget_bytes)} does not hold. Switch "
            "torch._dynamo.config.compiled_autograd off",
            BudgetWarning,
        )


class _Running(threading.local):
    """The counts of this thread when the backward began that it runs."""

    from_host_bytes = replaced = 0


class TransferCheck:
    """Compares the bytes that each half of a call moves between the device and the host with the ``planned`` ones.

    A compiler pass that drops or repeats a copy would otherwise cost memory, or results, in silence. Each half runs in one
    thread, so calls of other threads, several forwards before a backward, and a second backward of a kept graph change nothing.
    """

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
