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
    REORDER = enum.auto()
    """That search once more, with gradients that nothing reads computed as soon as they can be."""
    RUN_LATER = enum.auto()
    """Such gradients later in the plan that is chosen, where the ops around them then share a fused kernel."""


IN_SEQUENCE = (
    Strategies.CURVE | Strategies.SEGMENTS | Strategies.FILL | Strategies.RECREATE | Strategies.STORE | Strategies.LOWER
)
"""Every strategy that keeps the sequence of the backward's own ops."""

EVERY_STRATEGY = IN_SEQUENCE | Strategies.REORDER | Strategies.RUN_LATER
