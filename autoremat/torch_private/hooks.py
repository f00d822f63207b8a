"""Hooks on methods of torch's private classes, each for the thread alone that set it."""

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
"""What stands for which method of Inductor's, for the thread at hand alone."""
_installing = threading.Lock()


@contextlib.contextmanager
def hooked(owner: type, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """While active, ``hook(method, self, ...)`` runs where this thread calls the method of ``owner``.

    Other threads call the method itself meanwhile: Inductor may compile there for somebody else, around Dynamo's lock.
    """
    method = _hooks.get().get((owner, name), _dispatching(owner, name))
    token = _hooks.set({**_hooks.get(), (owner, name): functools.partial(hook, method)})
    try:
        yield
    finally:
        _hooks.reset(token)


def _dispatching(owner: type, name: str) -> Method:
    """The method of ``owner``, in whose place stands from now on what looks for a hook first. That stays: threads that each put
    back what they found would put back each other's."""
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
