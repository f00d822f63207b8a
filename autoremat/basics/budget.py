"""Parses memory budgets as users write them, and converts them to bytes."""

import contextlib
import math
from numbers import Real

from autoremat.basics.checks import MOST_BYTES, as_float, as_int, refused, text_to_bytes
from autoremat.basics.errors import OptionsError
from autoremat.basics.units import BYTE_FORMS, parse_percent, share_bytes

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
        percent = parse_percent(value)
        return text_to_bytes(value, name, forms) if percent is None else _share(percent, value, name, forms)
    count = as_int(value)
    if count is not None:
        if not 0 < count <= MOST_BYTES:
            raise refused(name, value, forms)
        return count
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refused(name, value, forms)
    share = as_float(value)
    if math.isfinite(share) and share > 1:
        raise OptionsError(
            f"{name}={value!r}: a float is a share of the peak that the step needs without autoremat, at most 1. "
            f"{likely_budget(share)}"
            'For bytes give an int or a string with a unit, such as "6GiB". '
            f"Accepted: {forms}"
        )
    return _share(share, value, name, forms)


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


def _share(share: float, value: object, name: str, forms: str) -> float:
    if not LEAST_SHARE <= share <= 1:
        raise refused(name, value, forms)
    return share


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
