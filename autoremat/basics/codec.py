"""Converts dataclasses to JSON data and back, by the types of their fields.

Nothing is executed or trusted: the reader checks all types and numbers, and raises ``ValueError`` for other data.
"""

import contextlib
import dataclasses
import enum
import functools
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

SCALARS = {str: "text", bool: "truth value", int: "whole number", float: "number"}


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


def printable(text: str) -> str:
    """Returns ``text`` with control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Codec:
    """Reads JSON data as values of given types: scalars, enums, tuples, dicts, dataclasses and unions of these and None."""

    signed: bool = False
    """True if numbers may be negative or infinite."""

    def readers(self, kind: type, names: Iterable[str]) -> dict[str, Callable[[Any], Any]]:
        """Returns the readers of the fields ``names`` of a dataclass. Raises ``ValueError`` for the name of no field."""
        hints, names = _hints(kind), tuple(names)
        if unknown := sorted(set(names) - hints.keys()):
            raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
        return {name: functools.partial(self.read, hints[name]) for name in names}

    def read(self, kind: Any, data: Any) -> Any:
        """Returns ``data`` as a value of type ``kind``. Raises ``ValueError`` for data of another form."""
        if kind in SCALARS:
            return self._scalar(kind, data)
        if hasattr(kind, "from_data"):
            return kind.from_data(data)
        origin, kinds = get_origin(kind), get_args(kind)
        if origin is tuple:
            parts = _list(data)
            kinds = (kinds[0],) * len(parts) if kinds[-1] is Ellipsis else kinds
            return tuple(self.read(one, part) for one, part in zip(kinds, parts, strict=True))
        if origin in (types.UnionType, Union):
            return self._union(kinds, data)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if isinstance(data, list) and len(data) <= len(_hints(kind)):
                data = dict(zip(_hints(kind), data, strict=False))
            if not isinstance(data, dict):
                raise ValueError(f"{data!r} is no {kind.__name__}")
            return kind(**{name: read(data[name]) for name, read in self.readers(kind, data).items()})
        if isinstance(kind, type) and issubclass(kind, enum.Flag):
            return functools.reduce(operator.or_, [kind[name] for name in _list(data)], kind(0))
        return kind(data)

    def _scalar(self, kind: type, data: Any) -> Any:
        fits = isinstance(data, int | float if kind is float else kind) and (kind is bool or not isinstance(data, bool))
        if fits and kind in (int, float):
            most = 2**63 if kind is int else math.inf  # what numpy holds
            fits = (-math.inf if self.signed else 0) <= data and (self.signed or data < most)
        if not fits:
            limits = "" if self.signed or kind in (str, bool) else ", or too large, or below 0"
            raise ValueError(f"{data!r} is no {SCALARS[kind]}{limits}")
        return printable(data) if kind is str else data

    def _union(self, kinds: tuple[Any, ...], data: Any) -> Any:
        """Returns a value of the first type that fits. Of None and a single type, the error is that of the type."""
        if data is None and types.NoneType in kinds:
            return None
        *others, last = (kind for kind in kinds if kind is not types.NoneType)
        for kind in others:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return self.read(kind, data)
        return self.read(last, data)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Self": kind})


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{data!r} is no list")
    return data
