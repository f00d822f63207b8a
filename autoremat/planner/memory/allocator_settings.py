"""The settings of CUDA's caching allocator that change the bytes it reserves.

Torch reads them from the environment variable ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF``, as in
``expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]``. Torch's "CUDA semantics" notes describe them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autoremat.basics.errors import OptionsError

MIB = 2**20
LARGE_SEGMENT = 20 * MIB
CLASSES = 16
"""Number of classes of sizes with a rounding of their own: from 1 MiB, each twice the one before."""


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings that the replay of the allocator follows."""

    expandable_segments: bool = False
    largest_split_bytes: float = math.inf
    """The setting ``max_split_size_mb``, in bytes."""
    largest_rest_bytes: int = LARGE_SEGMENT
    """The setting ``max_non_split_rounding_mb``, in bytes: the bytes of an oversize block that may be left unused."""
    large_segment_bytes: int = LARGE_SEGMENT
    """The setting ``large_segment_size_mb``, in bytes."""
    roundup_divisions: tuple[int, ...] = (0,) * CLASSES
    """The setting ``roundup_power2_divisions``, for each class of sizes. Below 2, sizes are rounded to 512 bytes alone."""
    ignored: tuple[str, ...] = ()
    """The settings beside these that can change reserved bytes, as text."""

    def divisions(self, size: int) -> int:
        """Returns the number of steps between two powers of 2 to which ``size`` is rounded up."""
        return self.roundup_divisions[min(max(0, size.bit_length() - MIB.bit_length()), CLASSES - 1)]


GROUPS = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)(?:,|$)")
IGNORED = ("garbage_collection_threshold", "backend")
FORMS = "text such as 'expandable_segments:True,max_split_size_mb:512'"


def allocator_settings(text: str) -> AllocatorSettings:
    """Returns the settings that ``text`` makes, in the form of the environment variable.

    Settings that do not change reserved bytes are skipped. Raises ``OptionsError`` for text of another form.
    """
    found, place, text = AllocatorSettings(), 0, text.strip()
    while place < len(text):
        group = GROUPS.match(text, place)
        if group is None:
            raise _refused(text)
        key, value, place = group[1], group[2].strip(), group.end()
        try:
            found = _with(found, key, value)
        except (ValueError, IndexError):
            raise _refused(text) from None
    return found


def _refused(text: str) -> OptionsError:
    return OptionsError(
        f"PYTORCH_CUDA_ALLOC_CONF={text!r} cannot be read. Accepted: {FORMS}, as in torch's CUDA semantics notes"
    )


def _with(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    """Returns ``settings`` with one more. Raises ``ValueError`` for a value that is not accepted."""
    if key in FIELDS:
        field, read = FIELDS[key]
        changed: dict[str, Any] = {field: read(value)}
        return replace(settings, **changed)
    if key in IGNORED and value != "native":
        return replace(settings, ignored=(*settings.ignored, f"{key}:{value}"))
    return settings


def _flag(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(value)
    return value == "True"


def _mebibytes(value: str) -> int:
    if int(value) < 1:
        raise ValueError(value)
    return int(value) * MIB


def _at_least_a_segment(value: str) -> int:
    if _mebibytes(value) < LARGE_SEGMENT:  # torch refuses it, too
        raise ValueError(value)
    return _mebibytes(value)


def _divisions(value: str) -> tuple[int, ...]:
    """Returns the divisions of each class of sizes: one number for all, or a list of pairs of mebibytes and a number."""
    if not value.startswith("["):
        return (_power_of_2(value),) * CLASSES
    found = [0] * CLASSES
    last = None
    for pair in value[1:-1].split(","):
        size, number = (part.strip() for part in pair.split(":"))
        divisions = 0 if number == "0" else _power_of_2(number)
        if size == ">":  # all classes from the last one on
            place = last or 0
            found[place:] = [divisions] * (CLASSES - place)
            continue
        place = min(_power_of_2(size).bit_length() - 1, CLASSES - 1)
        found[0 if last is None else place : place + 1] = [divisions] * (place + 1 if last is None else 1)
        last = place
    return tuple(found)


def _power_of_2(value: str) -> int:
    number = int(value)
    if number < 1 or number & (number - 1):
        raise ValueError(value)
    return number


FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "max_split_size_mb": ("largest_split_bytes", _at_least_a_segment),
    "max_non_split_rounding_mb": ("largest_rest_bytes", _at_least_a_segment),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
}
"""The field and the reader of each setting."""
