"""Points of time against memory: ours, policies' and bounds."""

from __future__ import annotations

from hypothesis import given, settings
from strategies import chain, changed, graphs

from autoremat.planner.plans.limits import Limits, undominated
from autoremat.planner.search.pareto_front import BOUND, OURS, Point, our_points, policy_points
from autoremat.planner.search.planner import Planner

MIB = 1 << 20


def test_our_points_lie_between_the_bound_and_no_recomputation():
    graph = chain(24, size=MIB, seconds=1e-3, forward_outputs=(24,), saving_seconds_per_byte=0.0)
    points = list(our_points(graph, 6, 5.0))
    ours, bounds = ([p for p in points if p.family == family] for family in (OURS, BOUND))
    planner = Planner(graph)
    assert ours[-1].peak_bytes == planner.baseline.peak_bytes
    assert ours[-1].added_seconds == 0.0
    assert ours[0].peak_bytes == planner.find(Limits(1)).smallest.peak_bytes  # the search for the least peak
    assert [p.added_seconds for p in ours] == sorted((p.added_seconds for p in ours), reverse=True)
    for bound in bounds:
        assert all(p.added_seconds >= bound.added_seconds for p in ours if p.peak_bytes <= bound.peak_bytes)


@settings(max_examples=25)
@given(graphs())
def test_no_policy_is_below_the_bound(graph):
    graph = changed(graph, saving_seconds_per_byte=0.0)
    bounds = [p for p in our_points(graph, 4, 5.0) if p.family == BOUND]
    for point in policy_points(graph):
        assert all(point.added_seconds >= b.added_seconds - 1e-9 for b in bounds if point.peak_bytes <= b.peak_bytes)


def test_what_another_one_beats_is_left_out():
    points = [Point("a", "x", 10, 1.0, 2.0), Point("a", "y", 10, 2.0, 2.0), Point("b", "z", 20, 3.0, 2.0)]
    assert [p.label for p in undominated(points, lambda p: (p.peak_bytes, p.added_seconds))] == ["x"]
    assert points[0].overhead == 0.5
