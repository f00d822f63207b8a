"""Graphs that go elsewhere than to the compiler: the profile of a step records them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from torch import fx


class Interceptor(Protocol):
    """Takes the graphs of a thread in the place of the compiler."""

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
        """Returns a callable that computes ``gm``."""
        ...


_active: ContextVar[Interceptor | None] = ContextVar("autoremat_interceptor", default=None)


def active_interceptor() -> Interceptor | None:
    """Returns the interceptor of this thread, if there is one."""
    return _active.get()


@contextlib.contextmanager
def intercepted_by(interceptor: Interceptor) -> Iterator[None]:
    """Hands ``interceptor`` the graphs of this thread, and of the threads in which autograd runs its backwards."""
    token = _active.set(interceptor)
    try:
        yield
    finally:
        _active.reset(token)
