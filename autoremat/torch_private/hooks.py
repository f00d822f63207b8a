"""Hooks on torch's functions, methods and properties, which act only in the thread that set them; and callbacks in a step.

A step may run with Dynamo on: the user's function called ``backward()`` behind a graph break, and Dynamo looks at each Python
frame. A callback that Dynamo calls under its own lock would then be compiled, and wait for that lock for ever. So Dynamo is
kept from what this package has called back.
"""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import Node

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


def present_hooks() -> tuple[ContextVar[Any], Mapping[tuple[Any, str], Method]]:
    """Returns the hooks that are active in this thread, for :func:`held`."""
    return _hooks, _hooks.get()


def substituted(owner: Any, name: str, value: Method) -> contextlib.AbstractContextManager[None]:
    """Replaces a function of a module or class, or a property, in this thread while active, as :func:`hooked` does."""
    return hooked(owner, name, lambda _, *args, **kwargs: value(*args, **kwargs))


def _install(owner: Any, name: str) -> _Hooked:
    from torch._dynamo.eval_frame import skip_code

    attribute: Any = inspect.getattr_static(owner, name)
    function: Method = attribute.__get__ if hasattr(attribute, "__set__") else getattr(owner, name)

    @functools.wraps(function)
    def dispatching(*args: Any, **kwargs: Any) -> Any:
        return _hooks.get().get((owner, name), function)(*args, **kwargs)

    installed: Any = dispatching
    skip_code(installed.__code__)  # Dynamo still looks at what it calls
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


# -- callbacks ---------------------------------------------------------------------------------------------------------------


@torch.compiler.disable(reason="autoremat watches the step")  # type: ignore[no-untyped-call,untyped-decorator]
def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def untraced(function: Callable[..., Any]) -> functools.partial[Any]:
    """Returns ``function`` for torch or Python to call back: Dynamo traces neither it nor what it calls."""
    return functools.partial(_call, function)


def is_untraced(callback: object, function: Callable[..., Any]) -> bool:
    """Returns True if ``callback`` is a result of :func:`untraced` for ``function``."""
    return isinstance(callback, functools.partial) and callback.func is _call and callback.args[0] is function


def around_backward(node: Node, begins: Callable[..., Any] | None = None, ends: Callable[..., Any] | None = None) -> None:
    """Calls ``begins`` with the gradients before the backward of ``node``, and ``ends`` after it."""
    if begins is not None:
        node.register_prehook(untraced(begins))
    if ends is not None:
        node.register_hook(untraced(ends))


def when_dropped(value: object, function: Callable[..., Any], *args: Any) -> None:
    """Calls ``function`` once nothing refers to ``value`` any more, which may be anywhere; not at the end of the process."""
    weakref.finalize(value, untraced(function), *args).atexit = False
