"""Hooks on torch's functions, methods and properties. They act only in the thread that set them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from autoremat.torch_private.untraced import skip_frames_of

Method = Callable[..., Any]
T = TypeVar("T")

_hooks: ContextVar[Mapping[tuple[Any, str], Method]] = ContextVar("autoremat_hooks", default=types.MappingProxyType({}))
"""The active hooks of this thread, by module or class and by name."""


@dataclass
class _Hooked:
    """A function, method or property that some thread hooks, and the number of its active hooks."""

    function: Method
    attribute: Any
    """What held the function."""
    is_inherited: bool
    """True if a base class of the owner has the attribute."""
    active: int = 0


_hooked: dict[tuple[Any, str], _Hooked] = {}
_installing = threading.Lock()


@contextlib.contextmanager
def hooked(owner: Any, name: str, hook: Method) -> Iterator[None]:
    """Hooks a function of a module or class, a method, or a property in this thread while active.

    Its calls become ``hook(function, *arguments)``; reads of a property are calls. Other threads still call the function:
    Inductor may compile there for another user. Torch knows some of these functions by identity, so each is put back once no
    thread hooks it.
    """
    key = owner, name
    with _installing:
        if key not in _hooked:
            _hooked[key] = _install(owner, name)
        _hooked[key].active += 1
        function = _hooked[key].function
    present: Mapping[tuple[Any, str], Method] = _hooks.get()
    present = {**present, key: functools.partial(hook, present.get(key, function))}
    try:
        with held(_hooks, present):
            yield
    finally:
        with _installing:
            found = _hooked[key]
            found.active -= 1
            if not found.active:
                del _hooked[key]
                if found.is_inherited:
                    delattr(owner, name)
                else:
                    setattr(owner, name, found.attribute)


def substituted(owner: Any, name: str, value: Method) -> contextlib.AbstractContextManager[None]:
    """Replaces a function of a module or class, or a property, in this thread while active, as :func:`hooked` does."""
    return hooked(owner, name, lambda _, *args, **kwargs: value(*args, **kwargs))


def _install(owner: Any, name: str) -> _Hooked:
    attribute: Any = inspect.getattr_static(owner, name)
    function: Method = attribute.__get__ if hasattr(attribute, "__set__") else getattr(owner, name)

    @functools.wraps(function)
    def dispatching(*args: Any, **kwargs: Any) -> Any:
        return _hooks.get().get((owner, name), function)(*args, **kwargs)

    skip_frames_of(dispatching)
    installed: Any = dispatching
    if hasattr(attribute, "__set__"):
        installed = property(dispatching, attribute.__set__)
    elif isinstance(attribute, staticmethod | classmethod):
        installed = staticmethod(dispatching)
    found = _Hooked(function, attribute, name not in vars(owner))
    setattr(owner, name, installed)
    return found


@contextlib.contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable another value while active."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def assigned(owner: Any, name: str, value: object) -> Iterator[None]:
    """Gives an attribute another value while active, in all threads."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
