"""What users are told of graph breaks and of functions that Dynamo left alone, of which the backend hears nothing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from torch import fx

from autoremat.basics.errors import BudgetInfeasible, causes
from autoremat.torch_private import dynamo

log = logging.getLogger("autoremat")

SHOWN = 3
"""So many reasons of graph breaks are listed."""

_told: set[str] = set()


def what_dynamo_said(before: Counter[str] | None = None) -> str:
    """Why Dynamo broke or left functions (since ``before``), as lines of text; empty if it did not."""
    breaks = dynamo.graph_breaks() - (before or Counter())
    lines = [f"  - {dynamo.in_few_words(reason)}" for reason, _ in breaks.most_common(SHOWN)]
    more = [f"  - and {len(breaks) - SHOWN} other reasons"] if len(breaks) > SHOWN else []
    return "\n".join(["Dynamo broke graphs here, or left whole functions alone:", *lines, *more]) if lines else ""


@contextlib.contextmanager
def one_of_several(gm: fx.GraphModule) -> Iterator[None]:
    """An error of the body that no plan fits says so, if ``gm`` is a part of a function that Dynamo broke."""
    try:
        yield
    except Exception as error:
        reason = dynamo.graph_break_around(gm)
        infeasible = next((cause for cause in causes(error) if isinstance(cause, BudgetInfeasible)), None)
        if reason is not None and infeasible is not None:
            why = f" ({dynamo.in_few_words(reason).partition('. ')[0]})" if reason else ""
            infeasible.advise(
                f"this is one graph of several, for Dynamo broke the function{why}: share one budget among them, by "
                "autoremat.profile_step(function, *inputs, memory_budget=...)"
            )
        raise


_frame_began: float | None = None
_mark: Callable[[], None] = lambda: None  # noqa: E731
"""Called around each frame, and does nothing, as long as torch is not reset."""


def listen() -> None:
    """From now on, say once if Dynamo does not trace an RNN, or a function that calls one: the backend never sees these. And
    note since when a caller has been waiting."""
    dynamo.around_each_frame(_before_a_frame, _after_a_frame)


def until_reset() -> Callable[[], bool]:
    """Tells if what is compiled from now on is still there: torch was not reset since."""
    global _mark
    if not dynamo.is_called(_mark):
        _mark = lambda: None  # noqa: E731  # of its own after each reset
        dynamo.around_each_frame(_mark, _mark)
    return partial(dynamo.is_called, _mark)


def seconds_in_dynamo() -> float:
    """How long Dynamo has been at the present frame; 0 if nobody listened as it began."""
    return 0.0 if _frame_began is None else time.monotonic() - _frame_began


def _before_a_frame() -> None:
    global _frame_began
    _frame_began = time.monotonic()


def _after_a_frame() -> None:
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
