"""The processes that tests of several ranks run in: results, errors, and the limit on time."""

from __future__ import annotations

import time

import pytest
from processes import run_ranks, values
from torch import distributed, tensor


def summed(rank: int, factor: int) -> float:
    total = tensor([float(factor * rank)])
    distributed.all_reduce(total)
    return total.item()


def failing_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("this rank fails")
    return rank


def waiting(rank: int) -> None:
    time.sleep(60 * rank)


def test_ranks_return_results() -> None:
    assert values(run_ranks(summed, 2, args=(3,))) == [3.0, 3.0]


@pytest.mark.slow
def test_the_error_of_one_rank_is_its_own() -> None:
    fine, failed = run_ranks(failing_on_one, 2, group=False)
    assert fine.value == 0
    assert fine.error is None
    assert "ValueError: this rank fails" in (failed.error or "")


@pytest.mark.slow
def test_a_rank_that_takes_too_long_is_killed() -> None:
    fine, late = run_ranks(waiting, 2, timeout=4, group=False)
    assert fine.error is None
    assert late.error == "the process was killed after 4 s"
