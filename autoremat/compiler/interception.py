"""Lets a step profile receive the graphs of a thread in place of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import fx

from autoremat.torch_private.hooks import held


class Interceptor(Protocol):
    """Receives the graphs of a thread in place of the compiler."""

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
        """Returns a callable that computes ``gm``."""
        ...


_active: ContextVar[Interceptor | None] = ContextVar("autoremat_interceptor", default=None)


def active_interceptor() -> Interceptor | None:
    """Returns the interceptor of this thread, or None."""
    return _active.get()


def intercepted_by(interceptor: Interceptor) -> AbstractContextManager[None]:
    """Hands the graphs of this thread to ``interceptor`` while the body runs.

    The threads in which autograd runs this thread's backwards are included.
    """
    return held(_active, interceptor)
