"""The number of parts for early gradients: which numbers are planned, and which one is taken."""

from __future__ import annotations

import pytest

from autoremat.compiler.agreed_profile import AgreedStep
from autoremat.compiler.number_of_parts import MOST, Candidate, best_trial, candidates, note_of
from autoremat.planner.multigraph.ledger import Moment, PlanPoint
from autoremat.planner.multigraph.step_profile import Step, StepGraph

GRADIENTS, SAVED, SECONDS = 1600, 800, 10.0


def divided(number: int, crossing_bytes: int = 0) -> Candidate:
    return Candidate(number, number, GRADIENTS // number, crossing_bytes * (number - 1), crossing_bytes)


def step_of(number: int, per_byte: float = 0.0, lost_at_a_cut: float = 0.0) -> Step:
    """Returns a step of equal parts, each of which may save everything, or a tenth of it for a share of a second."""
    whole, lean = SAVED // number, SAVED // (10 * number)
    front = (PlanPoint(0.0, whole, whole, whole), PlanPoint(1.0 / number, lean, lean, whole))
    seconds = (SECONDS + lost_at_a_cut * (number - 1)) / number
    graphs = tuple(
        StepGraph(str(g), "", 1, front, front[0], predicted_seconds=seconds, seconds_per_border_byte=per_byte)
        for g in range(number)
    )
    moments = (Moment(GRADIENTS // number, tuple(range(g)), g, backward=True) for g in range(number))
    return Step(graphs, tuple(moments), (), "cpu")


def tried(
    budget: int, crossing_bytes: int = 0, per_byte: float = 0.0, lost_at_a_cut: float = 0.0
) -> tuple[list[int], int, str]:
    """Returns the numbers that are planned in sequence, the one that is taken, and the note."""
    planned: list[int] = []

    def plan(candidate: Candidate) -> AgreedStep:
        planned.append(candidate.number)
        return AgreedStep(step_of(candidate.number, per_byte, lost_at_a_cut), budget)

    found = candidates(lambda number: divided(number, crossing_bytes), frees=True, least=1)
    chosen = best_trial(found, plan, hooks_bytes=0)
    assert chosen is not None
    return planned, chosen[0].candidate.number, note_of(*chosen)


def test_four_parts_that_recompute_nothing_are_planned_alone():
    assert tried(1200)[:2] == ([4], 4)


def test_more_parts_are_planned_if_they_save_more_recomputation_than_fusion():
    assert tried(1000, crossing_bytes=1, per_byte=0.01)[:2] == ([4, 8], 8)
    assert tried(1000, crossing_bytes=1, per_byte=0.1)[:2] == ([4], 4)  # predicted to lose more at the cuts


def test_the_least_predicted_seconds_count_although_a_number_was_predicted_to_be_better():
    assert tried(1000, lost_at_a_cut=0.001)[:2] == ([4, 8], 8)
    assert tried(1000, lost_at_a_cut=0.3)[:2] == ([4, 8], 4)


def test_fewer_parts_are_planned_if_the_cuts_lose_much_and_the_budget_leaves_room():
    planned, taken, _ = tried(2400, crossing_bytes=1, per_byte=0.1, lost_at_a_cut=0.2)
    assert (planned, taken) == ([4, 1], 1)  # the whole graph needs all of the budget
    assert tried(2399, crossing_bytes=1, per_byte=0.1, lost_at_a_cut=0.2)[1] == 2


def test_a_budget_that_four_parts_exceed_takes_more():
    assert tried(500, crossing_bytes=1, per_byte=0.1)[:2] == ([4, 8], 8)


def test_if_none_fits_the_note_says_which_numbers_were_tried_and_what_each_needs():
    planned, taken, note = tried(50)
    assert (planned, taken) == ([4, 16], 16)
    assert note == (
        "numbers of parts that were tried: 4 (minimum 660 B), 16 (minimum 225 B). None fits, and 16 need the least. "
        "early_gradients=... sets the number"
    )


@pytest.mark.parametrize(
    ("frees", "most_places", "least", "expected"),
    [
        (True, 100, 1, [4, 8, MOST, 2, 1]),
        (True, 8, 2, [4, 8, 2]),
        (True, 3, 1, [4, 2, 1]),  # which has three parts
        (False, 100, 1, [4, 2, 1]),
    ],
)
def test_the_candidates_are_as_many_as_places_to_cut_allow_and_help(frees, most_places, least, expected):
    def divide(number: int) -> Candidate:
        return Candidate(number, min(number, most_places), GRADIENTS // number if frees else 0, 0, 0)

    assert [one.number for one in candidates(divide, frees, least)] == expected


def test_more_parts_of_which_one_keeps_most_gradients_or_whose_cuts_are_wider_are_no_candidates():
    assert [one.number for one in candidates(lambda n: Candidate(n, n, max(GRADIENTS // n, 390), 0, 0), True, 2)] == [4, 2]
    assert [one.number for one in candidates(lambda n: Candidate(n, n, GRADIENTS // n, n, 1 + n // 16), True, 2)] == [4, 8, 2]
