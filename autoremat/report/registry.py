"""The reports of this process, and the reasons for an empty list of reports."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from autoremat.report.report import Report

KEPT = 200
"""Most reports that a process keeps, with their plans: a job may compile again and again."""

_reports: deque[Report] = deque(maxlen=KEPT)
_lock = threading.Lock()
_graphs_seen = 0
"""Number of graphs that the backend received, with or without a backward."""

_said: Callable[[], str] = str
"""Returns what explains why graphs did not reach the backend, or "" if nothing does."""


def explain_absence_by(said: Callable[[], str]) -> None:
    """Adds the text of ``said()``, which may be empty, to the reasons for an empty list of reports."""
    global _said
    _said = said


def add_report(report: Report) -> None:
    """Appends a report to those of this process."""
    with _lock:
        _reports.append(report)


def note_graph() -> None:
    """Counts a graph that the backend received."""
    global _graphs_seen
    with _lock:
        _graphs_seen += 1


class Reports(list[Report]):
    """Reports, oldest first: a list that explains why it is empty."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise IndexError(why_no_reports() if not self else f"there are {len(self)} reports") from None

    def __repr__(self) -> str:
        return super().__repr__() if self else f"[] ({why_no_reports()})"


def reports() -> Reports:
    """Returns a report for each graph with a backward that was compiled in this process, oldest first: the latest 200."""
    with _lock:
        return Reports(_reports)


def why_no_reports() -> str:
    """Returns the known reasons for an empty list of reports."""
    lines = ["no graph with a backward was compiled by autoremat in this process."]
    said = _said()
    if _graphs_seen:
        lines.append(
            f"The backend was handed {_graphs_seen} graph{'s' if _graphs_seen > 1 else ''} without a backward: gradient mode "
            "was off, or no parameter or input requires a gradient, or nothing was returned that depends on one, or the "
            "function computes gradients itself, as by torch.func.grad, or the call raised an error."
        )
    elif said:
        lines.append("The backend was handed no graph.")
    else:
        lines.append(
            "The backend was handed no graph. Was a function compiled by it called? Some functions Dynamo leaves alone: those "
            "that call an nn.LSTM, nn.GRU or nn.RNN (unless torch._dynamo.config.allow_rnn is set), and torch's own, such as "
            "the forward of an nn.Sequential inside of DistributedDataParallel: give that a forward of your own. Nothing is "
            "compiled inside of a transform of torch.func, as in torch.func.grad(compiled)."
        )
    return "\n".join(filter(None, [*lines, said]))
