"""Defines candidates: plans with the segmentations that they were scheduled with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from autoremat.planner.graph.schedule import Segments
from autoremat.planner.plans.plan import Plan

T = TypeVar("T")


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


def pareto_front(found: Iterable[T], plan_of: Callable[[T], Plan]) -> list[T]:
    """Returns those of ``found`` whose plans no other one beats in both peak and cost, the cheapest first."""
    front: list[T] = []
    for one in sorted(found, key=lambda one: (plan_of(one).cost_seconds, plan_of(one).peak_bytes)):
        if not front or plan_of(one).peak_bytes < plan_of(front[-1]).peak_bytes:
            front.append(one)
    return front
