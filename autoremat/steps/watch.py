"""Notices when calls of several compiled graphs are open at once and together need more than their budget.

Each graph was planned as if it were alone. Calls are watched until a step has ended in which every graph was known; then a
watched graph costs no more than one more Python call, until another graph is compiled.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from autoremat.errors import BudgetWarning
from autoremat.report import Report
from autoremat.torch_steps import backward_node
from autoremat.units import format_bytes


class _Call:
    """One call of a graph, open for as long as autograd keeps this object or until its backward has run."""

    def __init__(self, saved_bytes: int) -> None:
        self.saved_bytes = saved_bytes

    def __call__(self, watch: Watch, *_: Any) -> None:
        """A hook after the backward."""
        watch.close(id(self))


class Watch:
    """The open calls of this process."""

    def __init__(self) -> None:
        self.active = False
        self.open: dict[int, int] = {}
        """Saved bytes of each open call."""

    def call(self, compiled: Callable[..., Any], report: Report, args: tuple[Any, ...]) -> Any:
        """Call ``compiled``, whose report is ``report``."""
        self.judge(report)
        outputs = compiled(*args)
        node = backward_node(outputs)
        if node is not None:
            call = _Call(report.saved_bytes)
            self.open[id(call)] = call.saved_bytes
            weakref.finalize(call, self.close, id(call)).atexit = False
            node.register_hook(partial(call, self))
        return outputs

    def close(self, call: int) -> None:
        """The call of that identity holds nothing any more."""
        if self.open.pop(call, None) is not None and not self.open:
            self.active = False  # the step is over

    def judge(self, report: Report) -> None:
        """Warn if the graph of ``report``, called now, brings the step over its budget.

        Backwards run in the order opposite to that of forwards: what is open now is open again in this call's backward.
        """
        held, budget = sum(self.open.values()), report.budget_bytes
        peak = report.predicted_peak_bytes if report.compiled_peak_bytes is None else report.compiled_peak_bytes
        if budget is None or not held or held + peak <= budget:
            return
        calls = "one earlier call" if len(self.open) == 1 else f"{len(self.open)} earlier calls"
        self.active = False
        self.open.clear()
        warnings.warn(
            f"several compiled graphs are alive in one step and need {format_bytes(held + peak)} or more together, over the "
            f"budget of {format_bytes(budget)} that each of them keeps by itself: {calls} hold {format_bytes(held)} for the "
            f"backward while this graph needs {format_bytes(peak)}. autoremat.survey(...) shares one budget among them",
            BudgetWarning,
            stacklevel=2,
        )


_watch = Watch()


def watched(compiled: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """``compiled``, under the eyes of this process's watch."""
    _watch.active = True
    report = replace(report, plan=None, values=())  # lives as long as the compiled graph

    def call(*args: Any) -> Any:
        return _watch.call(compiled, report, args) if _watch.active else compiled(*args)

    return call
