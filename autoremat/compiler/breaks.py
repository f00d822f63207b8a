"""Reports graph breaks, and functions that Dynamo does not trace, to the user.

The backend receives only the graphs that Dynamo captures. Dynamo's own counters and callbacks supply the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial

from torch import fx

from autoremat.basics.errors import BudgetInfeasible, find_cause
from autoremat.options.options import Options
from autoremat.torch_private import dynamo

log = logging.getLogger("autoremat")

SHOWN = 3
"""Number of reasons of graph breaks that a message lists."""

BETWEEN_GRAPHS = "the memory of code between graphs is not counted"

IN_TRANSFORM = "a transform of torch.func"

_told: set[str] = set()
_is_part: ContextVar[bool] = ContextVar("is_part", default=False)
"""True while one of several graphs of a broken function is compiled."""


def what_dynamo_said(before: Counter[str] | None = None) -> str:
    """Returns the reasons of the graph breaks since ``before`` as lines of text.

    The text is empty if Dynamo broke no graph and skipped no function.
    """
    breaks = dynamo.graph_breaks() - (before or Counter())
    lines = [f"  - {dynamo.in_few_words(reason)}" for reason, _ in breaks.most_common(SHOWN)]
    more = [f"  - and {len(breaks) - SHOWN} other reasons"] if len(breaks) > SHOWN else []
    return "\n".join(["Dynamo broke graphs here, or left whole functions alone:", *lines, *more]) if lines else ""


@contextlib.contextmanager
def one_of_several(gm: fx.GraphModule) -> Iterator[None]:
    """Adds advice to a ``BudgetInfeasible`` of the body if ``gm`` is one of several graphs of a function.

    The advice is to share one budget among these graphs with ``autoremat.profile_step``. In the body, :func:`as_part` knows it.
    """
    reason = dynamo.graph_break_around(gm)
    if reason is None and dynamo.is_called_by_a_broken_function():
        reason = ""
    token = _is_part.set(reason is not None)
    try:
        yield
    except Exception as error:
        infeasible = find_cause(error, BudgetInfeasible)
        if reason is not None and infeasible is not None:
            why = f" ({dynamo.in_few_words(reason).partition('. ')[0]})" if reason else ""
            infeasible.advise(
                f"this is one graph of several, for Dynamo broke the function{why}: share one budget among them, by "
                "autoremat.profile_step(function, *inputs, memory_budget=...)"
            )
        raise
    finally:
        _is_part.reset(token)


def as_part(options: Options) -> Options:
    """Returns ``options`` for the present graph as one of several, if it is one (:func:`one_of_several`) under a share.

    The graphs that follow are unknown, and a small one may have nothing to recompute. A graph that does not fit its own share
    therefore takes the minimum peak, and the step as a whole is judged when it runs.
    """
    if not isinstance(options.memory_budget, float) or not _is_part.get():
        return options
    return dataclasses.replace(options, on_infeasible="best_effort", is_part=True)


def note_on(gm: fx.GraphModule) -> str:
    """Returns a note on what the report of ``gm`` does not count, if Dynamo broke the function; else an empty text."""
    reason = dynamo.graph_break_around(gm)
    if reason is None:
        return ""
    where = f"after this graph ({dynamo.in_few_words(reason).partition('. ')[0]})" if reason else "before this graph"
    return f"Dynamo broke the function {where}: {BETWEEN_GRAPHS}"


_frame_began: float | None = None
_mark: Callable[[], None] = lambda: None  # noqa: E731
"""A callback without effect that Dynamo calls around each frame. A reset of torch removes it, which shows the reset."""


def listen() -> None:
    """Registers callbacks that Dynamo calls before and after each frame.

    They log one warning per process if Dynamo does not trace an RNN, or a function that calls one, and one for a function
    inside of a transform of ``torch.func``. They also note the time at which Dynamo begins a frame.
    """
    dynamo.around_each_frame(_before_a_frame, _after_a_frame)


def until_reset() -> Callable[[], bool]:
    """Returns a function that is true while torch has not been reset. A reset drops everything that is compiled from now on."""
    global _mark
    if not dynamo.is_called(_mark):
        _mark = lambda: None  # noqa: E731  # a new object after each reset
        dynamo.around_each_frame(_mark, _mark)
    return partial(dynamo.is_called, _mark)


def seconds_in_dynamo() -> float:
    """Returns the seconds since Dynamo began the present frame; 0 if ``listen`` was not active then."""
    return 0.0 if _frame_began is None else time.monotonic() - _frame_began


def _before_a_frame() -> None:
    global _frame_began
    _frame_began = time.monotonic()
    if dynamo.runs_in_transform() and IN_TRANSFORM not in _told:
        _told.add(IN_TRANSFORM)
        log.warning(
            "Dynamo compiles nothing inside of %s, as in torch.func.grad(compiled): no memory budget holds there. Compile a "
            "function that returns its loss, and call backward() on that",
            IN_TRANSFORM,
        )


def _after_a_frame() -> None:
    """Ends the time of the frame, and warns once if Dynamo left an RNN untraced."""
    global _frame_began
    _frame_began = None
    found = next((reason for reason in dynamo.graph_breaks() if dynamo.WITHOUT_RNN in reason), None)
    if found is not None and dynamo.WITHOUT_RNN not in _told:
        _told.add(dynamo.WITHOUT_RNN)
        log.warning(
            "Dynamo does not trace nn.RNN, nn.GRU and nn.LSTM: no memory budget holds there, nor, in older versions of "
            "torch, in the rest of a function that calls one. torch._dynamo.config.allow_rnn = True lets it trace them; at an "
            "nn.LSTM on a CPU torch may then fail"
        )
