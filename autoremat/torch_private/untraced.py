"""Keeps Dynamo from what this package has called back within a step.

A step may run with Dynamo on: the user's function called ``backward()`` behind a graph break, and Dynamo looks at each Python
frame. A callback that Dynamo calls under its own lock would then be compiled, and wait for that lock for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node


@torch.compiler.disable(reason="autoremat watches the step")  # type: ignore[no-untyped-call,untyped-decorator]
def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def untraced(function: Callable[..., Any]) -> partial[Any]:
    """Returns ``function`` for torch or Python to call back: Dynamo traces neither it nor what it calls."""
    return partial(_call, function)


def is_untraced(callback: object, function: Callable[..., Any]) -> bool:
    """Returns True if ``callback`` is a result of :func:`untraced` for ``function``."""
    return isinstance(callback, partial) and callback.func is _call and callback.args[0] is function


def around_backward(node: Node, begins: Callable[..., Any] | None = None, ends: Callable[..., Any] | None = None) -> None:
    """Calls ``begins`` with the gradients before the backward of ``node``, and ``ends`` after it."""
    if begins is not None:
        node.register_prehook(untraced(begins))
    if ends is not None:
        node.register_hook(untraced(ends))


def when_dropped(value: object, function: Callable[..., Any], *args: Any) -> None:
    """Calls ``function`` once nothing refers to ``value`` any more, which may be anywhere; not at the end of the process."""
    weakref.finalize(value, untraced(function), *args).atexit = False


def skip_frames_of(function: Any) -> None:
    """Has Dynamo leave alone the frames that run the code of ``function``. It still looks at what they call."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
