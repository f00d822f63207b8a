"""Reports graph breaks, and functions that Dynamo does not trace, to the user.

The backend receives only the graphs that Dynamo captures. Dynamo's own counters and callbacks supply the rest.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from torch import fx

from autoremat.torch_private import dynamo

log = logging.getLogger("autoremat")

SHOWN = 3
"""Number of reasons of graph breaks that a message lists."""

BETWEEN_GRAPHS = "the memory of code between graphs is not counted"

IN_TRANSFORM = "a transform of torch.func"

_told: set[str] = set()


def what_dynamo_said(before: Counter[str] | None = None) -> str:
    """Returns the reasons of the graph breaks since ``before`` as lines of text.

    The text is empty if Dynamo broke no graph and skipped no function.
    """
    breaks = dynamo.graph_breaks() - (before or Counter())
    lines = [f"  - {dynamo.in_few_words(reason)}" for reason, _ in breaks.most_common(SHOWN)]
    more = [f"  - and {len(breaks) - SHOWN} other reasons"] if len(breaks) > SHOWN else []
    return "\n".join(["Dynamo broke graphs here, or left whole functions alone:", *lines, *more]) if lines else ""


def note_on(gm: fx.GraphModule) -> str:
    """Returns a note on what the report of ``gm`` does not count, if Dynamo broke the function; else an empty text."""
    reason = dynamo.graph_break_around(gm)
    if reason is None:
        return ""
    where = f"after this graph ({dynamo.in_few_words(reason).partition('. ')[0]})" if reason else "before this graph"
    return f"Dynamo broke the function {where}: {BETWEEN_GRAPHS}"


_frame_began: float | None = None


def listen() -> None:
    """Registers callbacks that Dynamo calls before and after each frame.

    They log one warning per process if Dynamo does not trace an RNN, or a function that calls one, and one for a function
    inside of a transform of ``torch.func``. They also note the time at which Dynamo begins a frame.
    """
    dynamo.around_each_frame(_before_a_frame, _after_a_frame)


def seconds_in_dynamo() -> float:
    """Returns the seconds since Dynamo began the present frame; 0 if ``listen`` was not active then."""
    return 0.0 if _frame_began is None else time.monotonic() - _frame_began


def _before_a_frame(*_: object) -> None:
    global _frame_began
    _frame_began = time.monotonic()
    if dynamo.runs_in_transform() and IN_TRANSFORM not in _told:
        _told.add(IN_TRANSFORM)
        log.warning(
            "Dynamo compiles nothing inside of %s, as in torch.func.grad(compiled): no memory budget holds there. Compile a "
            "function that returns its loss, and call backward() on that",
            IN_TRANSFORM,
        )


def _after_a_frame(*_: object) -> None:
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
