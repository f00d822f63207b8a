"""Names the families of candidates of a search."""

from __future__ import annotations

import enum


class Strategies(enum.Flag):
    """Families of candidates of a search. The plan that saves everything is always a candidate."""

    CURVE = enum.auto()
    """Minimum cuts at all prices."""
    SEGMENTS = enum.auto()
    """Segmentations of the forward. Without this flag the forward is one segment."""
    FILL = enum.auto()
    """Greedy fill of free memory."""
    RECREATE = enum.auto()
    """Ruin and recreate, from the best filled candidate. With ``LOWER``, also of schedules near the least peak."""
    STORE = enum.auto()
    """Stays, if values have forms."""
    LOWER = enum.auto()
    """The search for the least peak, if nothing else fits."""


EVERY_STRATEGY = ~Strategies(0)
