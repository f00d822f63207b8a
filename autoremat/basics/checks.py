"""Checks single values that users give. Each check returns the value in its normal form, or raises ``OptionsError``."""

import contextlib
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import BYTE_FORMS, parse_bytes, parse_percent, share_bytes

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


def bytes_given(value: object, name: str, forms: str, least: int = 0) -> int:
    """Returns the bytes that an int or a text denotes, if they are at least so many."""
    return text_to_bytes(value, name, forms) if isinstance(value, str) else count_given(value, name, forms, least, MOST_BYTES)


def count_given(value: object, name: str, forms: str, least: int = 1, most: int = MOST_PARTS) -> int:
    """Returns ``value`` if it is an int from ``least`` to ``most``."""
    count = as_int(value)
    if count is None or not least <= count <= most:
        raise refused(name, value, forms)
    return count


def as_number(value: object) -> float:
    """Returns a real number as the nearest float, or NaN for anything else, including a bool and a number beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
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
    if not 0 < (seconds := as_number(value)) <= LONGEST_SECONDS:
        raise refused(name, value, f"a finite number of seconds > 0, at most {LONGEST_SECONDS}")
    return seconds


def arguments_of(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a user gives as inputs as positional and keyword arguments: a mapping, a tuple or list, or one argument."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return tuple(given) if isinstance(given, tuple | list) else (given,), {}


# -- memory budgets as users write them --------------------------------------------------------------------------------------


FORMS_ANYWHERE = (
    f'an int > 0 (bytes); a string such as {BYTE_FORMS}; a float in [0.001, 1] or text such as "70%" (that share of the '
    "peak that the step needs without autoremat); None (no bound)"
)
"""Error text: the forms of a budget that need neither a device nor a step profile."""

LEAST_SHARE = 0.001
"""Least share of a peak that counts as meant."""

MOST_GIB = 32
"""Largest number without a unit that is taken for GiB. A larger one, up to 100, is taken for per cent."""


def parse_budget(value: object, name: str, forms: str = FORMS_ANYWHERE) -> int | float | None:
    """Returns the budget as bytes (an int), a share of a reference peak (a float in [0.001, 1]) or None for no bound.

    ``name`` and ``forms`` appear in the error. Raises ``OptionsError`` for a value that is not accepted.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    if isinstance(value, str):
        if (number := _number(value)) is not None:
            refuse_likely_percent(number, name, forms)
            return parse_budget(number, name, forms)
        if (percent := parse_percent(value)) is None:
            return text_to_bytes(value, name, forms)
        share = percent
    elif as_int(value) is not None:
        return count_given(value, name, forms, most=MOST_BYTES)
    elif 1 < (share := as_number(value)) < math.inf:
        raise OptionsError(
            f"{name}={value!r}: a float is a share of the peak that the step needs without autoremat, at most 1. "
            f'{likely_budget(share)}For bytes give an int or a string with a unit, such as "6GiB". Accepted: {forms}'
        )
    if not LEAST_SHARE <= share <= 1:
        raise refused(name, value, forms)
    return share


def _number(text: str) -> int | float | None:
    """Returns the number that is the whole text, as environments and configuration files pass it; None if it is none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def refuse_likely_percent(value: object, name: str, forms: str) -> None:
    """Raises ``OptionsError`` for a budget of 2 to 100 that a user gives without a unit.

    No training step fits into so few bytes, so the error asks whether GiB or per cent are meant. A single byte asks for the
    least memory possible.
    """
    count = as_int(value)
    if count is not None and (question := likely_budget(count)):
        raise OptionsError(
            f"{name}={value!r} is {count} bytes, and no training step is that small. {question}"
            f'For bytes write "{count}B". Accepted: {forms}'
        )


def likely_share(number: float) -> str:
    """Returns the question whether a number above 1 and at most 100 is meant as per cent, or ""."""
    return f"Did you mean {number / 100!r} ({number:g} %)? " if 1 < number <= 100 else ""


def likely_budget(number: float) -> str:
    """Returns the question whether a number above 1 and at most 100 is meant as GiB or as per cent, or ""."""
    return f'Did you mean "{number:g}GiB"? ' if 1 < number <= MOST_GIB else likely_share(number)


def budget_bytes(budget: int | float | None, reference_bytes: int) -> int | None:
    """Returns the budget in bytes, or None for no bound. A float is a share of ``reference_bytes``."""
    if isinstance(budget, float):
        return share_bytes(budget, reference_bytes)
    return budget
