"""Places in the code of a half: text that names the code and a line of it, in a report as in the code that runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

START = 0
"""The line at which a half begins."""


def places_in(source: str) -> Callable[[int], str]:
    """Returns a function from a line of ``source`` to its place."""
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    return lambda line: f"{key}:{line}"


def start_of(place: str) -> str:
    """Returns the place at which the half that has ``place`` begins."""
    return f"{place.partition(':')[0]}:{START}"


class PlaceBytes:
    """The most bytes that are live from each place to the next one, in the last call of each half."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._place: str | None = None

    def reach(self, place: str, live_bytes: int) -> None:
        """Notes that the code reaches ``place``."""
        if place == start_of(place):
            self.found = {other: size for other, size in self.found.items() if start_of(other) != place}
        self._place = place
        self.see(live_bytes)

    def see(self, live_bytes: int) -> None:
        """Notes that so many bytes are live behind the last place."""
        if self._place is not None:
            self.found[self._place] = max(self.found.get(self._place, live_bytes), live_bytes)
