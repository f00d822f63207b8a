"""Hooks on torch's private methods, and substitutes for its functions. Both act only in the thread that set them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from autoremat.torch_private.untraced import skip_frames_of

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
            skip_frames_of(dispatching)
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            setattr(owner, name, staticmethod(dispatching) if is_static else dispatching)
            present = dispatching
        found: Method = vars(present)["without_hooks"]
        return found


@contextlib.contextmanager
def substituted(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a module or class, or a property of a class, in this thread while active.

    Other threads still call the function itself. Torch knows some of these functions by identity, so the function is put back
    once no thread replaces it.
    """
    with _installing:
        _substitute(owner, name)
    token = _substitutes.set({**_substitutes.get(), (owner, name): value})
    try:
        yield
    finally:
        _substitutes.reset(token)
        with _installing:
            _put_back(owner, name)


@contextlib.contextmanager
def assigned(owner: Any, name: str, value: object) -> Iterator[None]:
    """Gives an attribute another value while active, in all threads."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def unsubstituted(owner: Any, name: str) -> Any:
    """Returns the function of a module or class, or that of a property, as it is while no thread replaces it."""
    with _installing:
        found = _replaced.get((owner, name))
        return _function(owner, name) if found is None else found.function


def _function(owner: Any, name: str) -> Any:
    """Returns the function of that name; for a property, the function that reads it."""
    attribute: Any = inspect.getattr_static(owner, name)
    return attribute.__get__ if hasattr(attribute, "__set__") else getattr(owner, name)


@dataclass
class _Replaced:
    """A function that some thread replaces, and the number of replacements that are active."""

    function: Callable[..., Any]
    attribute: Any
    """What held the function."""
    is_inherited: bool
    """True if a base class of the owner has the attribute."""
    active: int = 0


_replaced: dict[tuple[Any, str], _Replaced] = {}
_substitutes: ContextVar[Mapping[tuple[Any, str], Method]] = ContextVar(
    "autoremat_substitutes", default=types.MappingProxyType({})
)
"""The active substitutes of this thread, by module or class and by name."""


def _substitute(owner: Any, name: str) -> None:
    key = (owner, name)
    if key not in _replaced:
        function: Callable[..., Any] = _function(owner, name)
        attribute: Any = inspect.getattr_static(owner, name)

        def dispatching(*args: Any, **kwargs: Any) -> Any:
            return _substitutes.get().get(key, function)(*args, **kwargs)

        skip_frames_of(dispatching)
        _replaced[key] = _Replaced(function, attribute, name not in vars(owner))
        if hasattr(attribute, "__set__"):
            setattr(owner, name, property(dispatching, attribute.__set__))
        else:
            setattr(owner, name, staticmethod(dispatching) if isinstance(owner, type) else dispatching)
    _replaced[key].active += 1


def _put_back(owner: Any, name: str) -> None:
    found = _replaced[owner, name]
    found.active -= 1
    if not found.active:
        if found.is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, found.attribute)
        del _replaced[owner, name]
