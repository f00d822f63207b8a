"""Torch's private names for what Dynamo did beside the graphs that it handed over: graph breaks, and frames it left alone.

As in ``torch_compat``, each function says what it stands for and nothing here decides anything about plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo.utils import counters

RESUMED = "torch_dynamo_resume_in"
"""In the name of a function that goes on after a graph break."""

WITHOUT_RNN = "RNN, GRU, or LSTM"
"""In the reason of a graph break at a module that Dynamo does not trace unless ``allow_rnn`` is set."""


def graph_breaks() -> Counter[str]:
    """The reasons of all graph breaks in this process, each with how often it came."""
    return Counter(counters["graph_break"])


def in_few_words(reason: str) -> str:
    """The first line of a graph break's reason, its explanation and its first hint."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    said = [line.partition(": ")[2] for kind in ("Explanation: ", "Hint: ") for line in lines if line.startswith(kind)][:2]
    return ". ".join(text.rstrip(".") for text in (lines[0], *said) if text)


def graph_break_around(gm: fx.GraphModule) -> str | None:
    """Why Dynamo broke the function that ``gm`` is a part of; None if it is the whole, empty if another part knows why."""
    ended: Any = getattr(gm, "compile_subgraph_reason", None)
    if getattr(ended, "graph_break", False):
        return str(ended.reason)
    resumed = any(RESUMED in (node.meta.get("stack_trace") or "") for node in gm.graph.nodes)
    return "" if resumed else None


def around_each_frame(begins: Callable[[], None], ended: Callable[[], None]) -> None:
    """Call ``begins`` before Dynamo looks at a frame and ``ended`` after it, until torch is reset. Twice is as good as once."""
    from torch._dynamo.callback import callback_handler

    for callbacks, listener in ((callback_handler.start_callbacks, begins), (callback_handler.end_callbacks, ended)):
        if not any(getattr(callback, "listener", None) is listener for callback in callbacks):
            callbacks.append(_Callback(listener))


def is_called(begins: Callable[[], None]) -> bool:
    """Whether ``begins`` is called before a frame: torch was not reset since :func:`around_each_frame`."""
    from torch._dynamo.callback import callback_handler

    return any(getattr(callback, "listener", None) is begins for callback in callback_handler.start_callbacks)


class _Callback:
    """Calls a listener without what Dynamo has to say."""

    def __init__(self, listener: Callable[[], None]) -> None:
        self.listener = listener

    def __call__(self, _: Any) -> None:
        self.listener()
