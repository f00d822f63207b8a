"""Converts dataclasses to JSON data and back, by the types of their fields.

Nothing is executed or trusted: the reader checks all types and numbers, and raises ``ValueError`` for other data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from autoremat.basics.display import printable

Reader = Callable[[Any], Any]
"""A function from JSON data to the value of a field."""


def plain(value: Any, as_rows: bool = False) -> Any:
    """Returns ``value`` as JSON data; :class:`Codec` returns the inverse.

    A dataclass becomes a dict. With ``as_rows``, it becomes the list of its fields' values. A class with a form of its own has
    ``to_data()`` and the class method ``from_data(data)``.
    """
    if hasattr(value, "to_data"):
        return value.to_data()
    if isinstance(value, enum.Flag):
        return [flag.name for flag in type(value) if flag in value and flag.value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: plain(one, as_rows) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one, as_rows) for one in value]
    if dataclasses.is_dataclass(value):
        fields = {one.name: plain(getattr(value, one.name), as_rows) for one in dataclasses.fields(value)}
        return list(fields.values()) if as_rows else fields
    return value


@dataclass(frozen=True)
class Codec:
    """Reads JSON data as values of given types: scalars, enums, tuples, dicts, dataclasses and unions of these and None."""

    signed: bool = False
    """True if numbers may be negative or infinite."""
    _readers: dict[Any, Reader] = field(default_factory=dict, compare=False, repr=False)

    def read(self, kind: Any, data: Any) -> Any:
        """Returns ``data`` as a value of type ``kind``. Raises ``ValueError`` for data of another form."""
        return self.reader(kind)(data)

    def reader(self, kind: Any) -> Reader:
        """Returns the function that reads JSON data as values of type ``kind``."""
        if kind not in self._readers:
            self._readers[kind] = self._make_reader(kind)
        return self._readers[kind]

    def readers(self, kind: type, names: Iterable[str]) -> dict[str, Reader]:
        """Returns the readers of the fields ``names`` of a dataclass. Raises ``ValueError`` for the name of no field."""
        hints, names = _hints(kind), tuple(names)
        if unknown := sorted(set(names) - hints.keys()):
            raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
        return {name: self.reader(hints[name]) for name in names}

    def _make_reader(self, kind: Any) -> Reader:
        if kind in (str, bool, int, float):
            return self._scalar(kind)
        if hasattr(kind, "from_data"):
            return lambda data: kind.from_data(data)
        if get_origin(kind) is tuple:
            return self._tuple(*get_args(kind))
        if get_origin(kind) in (types.UnionType, Union):
            return self._union(*get_args(kind))
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._dataclass(kind)
        if isinstance(kind, type) and issubclass(kind, enum.Flag):
            return lambda names: functools.reduce(operator.or_, [kind[name] for name in _list(names)], kind(0))
        return lambda data: kind(data)

    def _scalar(self, kind: type) -> Reader:
        what = {str: "text", bool: "truth value", int: "whole number", float: "number"}[kind]
        accepted: Any = int | float if kind is float else kind
        least = -math.inf if self.signed else 0
        if kind in (int, float) and not self.signed:
            what = f"finite {what} >= 0" if kind is float else f"{what} >= 0"

        def read(data: Any) -> Any:
            fits = isinstance(data, accepted) and (kind is bool or not isinstance(data, bool))
            if fits and isinstance(data, int | float):
                fits = least <= data and (self.signed or data < math.inf)
            if not fits:
                raise ValueError(f"{data!r} is no {what}")
            return printable(data) if kind is str else data

        return read

    def _union(self, *kinds: Any) -> Reader:
        """Returns the reader of the first type that fits. Of None and a single type, the error is that of the type."""
        *others, last = (self.reader(kind) for kind in kinds if kind is not types.NoneType)

        def read(data: Any) -> Any:
            if data is None and types.NoneType in kinds:
                return None
            for read_one in others:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    return read_one(data)
            return last(data)

        return read

    def _tuple(self, *kinds: Any) -> Reader:
        if kinds[-1] is not Ellipsis:
            readers = [self.reader(kind) for kind in kinds]
            return lambda data: tuple(read(one) for read, one in zip(readers, _list(data), strict=True))
        read_one = self.reader(kinds[0])
        return lambda data: tuple(read_one(one) for one in _list(data))

    def _dataclass(self, kind: type) -> Reader:
        hints = _hints(kind)

        def read(data: Any) -> Any:
            if isinstance(data, list) and len(data) <= len(hints):
                data = dict(zip(hints, data, strict=False))
            if not isinstance(data, dict):
                raise ValueError(f"{data!r} is no {kind.__name__}")
            readers = self.readers(kind, data)
            return kind(**{name: readers[name](one) for name, one in data.items()})

        return read


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Self": kind})


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{data!r} is no list")
    return data
