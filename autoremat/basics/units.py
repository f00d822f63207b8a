"""Parses and formats bytes and seconds: "6GiB" to an int, an int to "6.00 GiB". Converts shares to bytes."""

import math
import re
from fractions import Fraction

BYTE_FORMS = (
    '"6GiB", "6G", "800MB" or "1.5 GB" (KB, MB, GB, TB: powers of 1000; K, M, G, T and KiB, MiB, GiB, TiB: powers of 1024)'
)

_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*"
_BYTE_TEXT = re.compile(_NUMBER + r"(?:([kmgt])(i?b?)|b)", re.ASCII | re.IGNORECASE)
_PERCENT_TEXT = re.compile(_NUMBER + "%", re.ASCII)


def parse_bytes(text: str) -> int:
    """Returns the bytes that ``text`` denotes, rounded down.

    The case of the unit and a space before it do not matter. A letter alone is a power of 1024, as in most tools.

    Raises ``ValueError`` for anything but a positive number with a unit. A number alone is refused, because "6" hardly means
    bytes.
    """
    match = _BYTE_TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes; accepted: {BYTE_FORMS}")
    number, prefix, rest = match.groups()
    base = 1000 if rest and rest.lower() == "b" else 1024
    power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
    count = int(Fraction(number) * base**power)  # exact: a float would lose bytes above 2**53
    if count == 0:
        raise ValueError(f"{text!r} is less than one byte; accepted: a positive number such as {BYTE_FORMS}")
    return count


def parse_percent(text: str) -> float | None:
    """Returns the share that ``text`` denotes, 0.7 for "70%", or None if it is no number of per cent."""
    match = _PERCENT_TEXT.fullmatch(text.strip())
    return None if match is None else float(Fraction(match[1]) / 100)


def share_bytes(share: float, reference_bytes: int) -> int:
    """Returns the share of ``reference_bytes`` in whole bytes, rounded down."""
    # Exact arithmetic on the decimal as written: 0.7 of 10 bytes is 7, but 0.7 as a binary fraction would give 6.
    return math.floor(Fraction(repr(share)) * reference_bytes)


def least_share(needed_bytes: int, reference_bytes: int) -> float:
    """Returns the least share of ``reference_bytes`` that is enough for ``needed_bytes``, in thousandths."""
    return math.ceil(Fraction(1000 * needed_bytes, max(1, reference_bytes))) / 1000


def share_text(share: float, reference_bytes: int) -> str:
    """Returns a share of a reference peak in words."""
    return f"{100 * share:.4g} % of the {format_bytes(reference_bytes)} that the step needs without autoremat"


def rounded(count: int, multiple: int) -> int:
    """Returns ``count`` rounded up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


def format_bytes(count: int) -> str:
    """Returns ``count`` bytes as text in powers of 1024: "512 B", "1.50 GiB"."""
    scaled = float(abs(count))
    if scaled < 1024:
        return f"{count} B"
    sign = "-" if count < 0 else ""
    for unit in ("KiB", "MiB", "GiB"):
        scaled /= 1024
        if scaled < 1023.995:  # 1023.995 would round to 1024.00, which is 1.00 of the next unit
            return f"{sign}{scaled:.2f} {unit}"
    return f"{sign}{scaled / 1024:.2f} TiB"


def bytes_apart(count: int, other: int) -> tuple[str, str]:
    """Returns both numbers of bytes as text: in full too, where they differ and would look alike."""
    short = format_bytes(count), format_bytes(other)
    return short if count == other or short[0] != short[1] else (f"{short[0]} ({count} bytes)", f"{short[1]} ({other} bytes)")


def format_seconds(seconds: float) -> str:
    """Returns a duration as text: "12.30 us", "1.50 ms", "2.34 s"."""
    if abs(seconds) < 999.995e-6 and seconds != 0:
        return f"{seconds * 1e6:.2f} us"
    if abs(seconds) < 999.995e-3 and seconds != 0:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"
