"""Checks single values that users give. Each check returns the value in its normal form, or raises ``OptionsError``."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import parse_bytes

MOST_BYTES = 2**63 - 1
"""Upper limit for byte counts: the largest signed 64-bit integer."""

MOST_PARTS = 2**16
"""Upper limit for numbers of chunks and of open calls."""

LONGEST_SECONDS = 10**7
"""Upper limit for durations, in seconds: four months."""

LONGEST_SHOWN = 200
"""Characters of a refused value that an error message shows."""


def one_of(accepted: tuple[str, ...], value: object, name: str) -> str:
    """Returns ``value`` if it is one of the ``accepted`` strings."""
    if not isinstance(value, str) or value not in accepted:
        raise refused(name, value, " or ".join(f'"{one}"' for one in accepted))
    return value


def text_to_bytes(text: str, name: str, forms: str) -> int:
    """Returns the bytes that ``text`` denotes, such as "6GiB"."""
    try:
        count = parse_bytes(text)
    except ValueError:
        count = 0
    if not 0 < count <= MOST_BYTES:
        raise refused(name, text, forms)
    return count


def as_int(value: Any) -> int | None:
    """Returns the value of an integer (Python's or NumPy's), or None for anything else, including a bool and any tensor."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, Integral) else None


def as_float(value: Real) -> float:
    """Returns the nearest float, or NaN if the value is beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def refused(name: str, value: object, forms: str) -> OptionsError:
    """Returns the error for a value that is not accepted. ``forms`` lists the accepted ones."""
    try:
        shown = f"an int of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 1 << 256 else repr(value)
        shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
    except Exception:  # the value's own ``__repr__``
        shown = f"a {type(value).__name__}"
    return OptionsError(f"{name}={shown} is not accepted. Accepted: {forms}")


def options_of(options: Mapping[str, object] | None) -> Mapping[str, object]:
    """Returns ``options`` as a mapping, empty for None. Raises ``OptionsError`` for anything else."""
    if not isinstance(options, Mapping | None):
        raise refused("options", options, 'a dict such as {"memory_budget": "6GiB"}, or None')
    return options or {}


def underscored(options: Mapping[str, object]) -> dict[str, object]:
    """Returns ``options`` with underscores in place of the dashes in keys.

    Raises ``OptionsError`` for a key that is not a string, and for two keys that become equal.
    """
    result: dict[str, object] = {}
    for key, value in options.items():
        if not isinstance(key, str):
            raise OptionsError(f"the option name {key!r} is not a string")
        name = key.replace("-", "_")
        if name in result:
            raise OptionsError(f"the option {name!r} is given twice, with dashes and with underscores")
        result[name] = value
    return result


def flag(value: object, name: str) -> bool:
    """Returns ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise refused(name, value, "True or False (in the environment: 1 or 0)")
    return value


def positive_seconds(value: object, name: str) -> float:
    """Returns ``value`` as a float if it is a number above 0 and at most ``LONGEST_SECONDS``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < as_float(value) <= LONGEST_SECONDS:
        raise refused(name, value, f"a finite number of seconds > 0, at most {LONGEST_SECONDS}")
    return as_float(value)


def arguments_of(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a user gives as inputs as positional and keyword arguments: a mapping, a tuple or list, or one argument."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return tuple(given) if isinstance(given, tuple | list) else (given,), {}
