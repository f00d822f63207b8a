"""A private name of torch: where it is, in which versions, and how the package uses it."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch

MINOR = int(torch.__version__.split(".")[1])
"""The minor version of the torch that runs."""


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch that the package uses."""

    where: str
    """``module:path``, ``module:path(parameter)`` or ``module!text``.

    A path may end with an attribute that only the instances of a class have. Text stands in the source of the module. It is
    for what torch writes without a name of its own: a key, a phrase, an attribute of another object.
    """
    lost: str
    """What the package lacks without the name, in the plural."""
    signature: str = ""
    """The arguments that the package passes, or the parameters of its replacement. Those by keyword end with ``=``.

    Dots at the end mean that torch has further parameters, with defaults. ``()`` means none. Empty text means any.
    """
    first: int | None = None
    """The first minor version of torch that has the name; None if the first supported one has it."""
    last: int | None = None
    """The last minor version of torch that has the name; None if the last supported one has it."""
    is_of_cuda: bool = False
    """True if only builds of torch for CUDA have the name."""

    @property
    def is_required(self) -> bool:
        """True if every supported torch has the name."""
        return self.first is None and self.last is None and not self.is_of_cuda

    @property
    def is_expected(self) -> bool:
        """True if the torch that runs has the name."""
        is_built = not self.is_of_cuda or bool(torch.version.cuda or torch.version.hip)
        return is_built and (self.first or MINOR) <= MINOR <= (self.last or MINOR)

    def look_up(self) -> Any:
        """Returns the object, whatever the range says; the name of a parameter, or of an attribute of instances; the text.

        Raises ``ImportError``, ``AttributeError`` or ``LookupError`` if torch has no such name.
        """
        module, _, text = self.where.partition("!")
        if text:
            source = _source_of(module)
            if source is not None and text not in source:
                raise LookupError(self.where)
            return text
        module, _, path = self.where.partition(":")
        path, _, parameter = path.removesuffix(")").partition("(")
        found: Any = importlib.import_module(module)
        for name in filter(None, path.split(".")):
            is_of_instances = isinstance(found, type) and not hasattr(found, name) and not self.signature
            is_of_instances = is_of_instances and name in _names_in(found)  # code that only calls a function names it too
            found = name if is_of_instances else getattr(found, name)
        if parameter and parameter not in inspect.signature(found).parameters:
            raise LookupError(self.where)
        return parameter or found


@cache
def _source_of(module: str) -> str | None:
    """Returns the source of a module, which is not imported; None for a module that comes without its source."""
    spec: Any = importlib.util.find_spec(module)
    source: str | None = spec.loader.get_source(module)
    return source


@cache
def _names_in(kind: type) -> frozenset[str]:
    """Returns the names that the methods of a class and its annotations contain, those of its bases included."""
    found: set[str] = set()
    for base in kind.__mro__:
        found.update(vars(base).get("__annotations__", ()))
        for method in map(inspect.unwrap, filter(callable, vars(base).values())):
            if isinstance(method, FunctionType):
                found.update(method.__code__.co_names)
    return frozenset(found)
