"""Hooks on methods of torch's private classes. A hook acts only in the thread that set it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

Method = Callable[..., Any]

_hooks: ContextVar[Mapping[tuple[type, str], Method]] = ContextVar("autoremat_hooks", default=types.MappingProxyType({}))
"""The active hooks of this thread, by class and method name."""
_installing = threading.Lock()


@contextlib.contextmanager
def hooked(owner: type, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of ``owner`` in this thread while active: its calls become ``hook(method, self, ...)``.

    Other threads still call the method itself: Inductor may compile there for another user, outside of Dynamo's lock.
    """
    method = _hooks.get().get((owner, name), _dispatching(owner, name))
    token = _hooks.set({**_hooks.get(), (owner, name): functools.partial(hook, method)})
    try:
        yield
    finally:
        _hooks.reset(token)


def _dispatching(owner: type, name: str) -> Method:
    """Returns the original method of ``owner`` after installing a dispatcher in its place.

    The dispatcher calls this thread's hook if there is one. It stays installed: threads that each restored the method they
    found would undo each other's changes.
    """
    with _installing:
        present: Method = getattr(owner, name)
        if not hasattr(present, "without_hooks"):
            method = present

            @functools.wraps(method)
            def dispatching(*args: Any, **kwargs: Any) -> Any:
                return _hooks.get().get((owner, name), method)(*args, **kwargs)

            vars(dispatching)["without_hooks"] = method
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            setattr(owner, name, staticmethod(dispatching) if is_static else dispatching)
            present = dispatching
        found: Method = vars(present)["without_hooks"]
        return found


@contextlib.contextmanager
def substituted(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a module or class while active, in all threads."""
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
