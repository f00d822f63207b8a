"""Checks of single values that users give: each returns the value as the package takes it, or raises ``OptionsError``."""

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import parse_bytes

MOST_BYTES = 2**63 - 1
"""More than any memory has, and still a number of 64 bits."""

LONGEST_SHOWN = 200
"""So many characters of a refused value are shown at most."""


def one_of(accepted: tuple[str, ...], value: object, name: str) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise refused(name, value, " or ".join(f'"{one}"' for one in accepted))
    return value


def text_to_bytes(text: str, name: str, forms: str) -> int:
    try:
        count = parse_bytes(text)
    except ValueError:
        count = 0
    if not 0 < count <= MOST_BYTES:
        raise refused(name, text, forms)
    return count


def as_int(value: Any) -> int | None:
    """The int behind an int or an int-like (NumPy's), None for anything else; a bool is no number here."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Real) -> float:
    """The nearest float; not a number for what is beyond all of them."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def refused(name: str, value: object, forms: str) -> OptionsError:
    shown = f"an int of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 1 << 256 else repr(value)
    shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
    return OptionsError(f"{name}={shown} is not accepted. Accepted: {forms}")


def options_of(options: Mapping[str, object] | None) -> Mapping[str, object]:
    """`options` as a mapping. Raises OptionsError for anything else."""
    if not isinstance(options, Mapping | None):
        raise refused("options", options, 'a dict such as {"memory_budget": "6GiB"}, or None')
    return options or {}


def underscored(options: Mapping[str, object]) -> dict[str, object]:
    """`options` with dashes in keys replaced; raises OptionsError for keys that are no strings or then coincide."""
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
    if not isinstance(value, bool):
        raise refused(name, value, "True or False (in the environment: 1 or 0)")
    return value


def positive_seconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < as_float(value) < math.inf:
        raise refused(name, value, "a finite number of seconds > 0")
    return as_float(value)
