"""Defines candidates: plans with the segmentations that they were scheduled with."""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.planner.graph.schedule import Segments
from autoremat.planner.plans.plan import Plan


@dataclass(frozen=True)
class Segmentation:
    """Segments, and the values on those cuts that the forward saves. Values on other cuts are recomputed once and kept."""

    segments: Segments
    saved_cuts: frozenset[int]
    label: str
    nested: bool = False
    """True if some cuts are not saved."""


@dataclass(frozen=True)
class Candidate:
    """A plan and the segmentation that it was scheduled with."""

    plan: Plan
    segmentation: Segmentation
