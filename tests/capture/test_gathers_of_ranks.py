"""Gathers of several processes: what an agreement repeats, and the interconnect that they measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gathering_steps import EAGER, IGNORED_WARNINGS, again, inputs, measured_peaks, planned_calls, run, sharded_step
from oracles import same_bits
from processes import run_ranks, values
from torch import Tensor

import autoremat

pytestmark = IGNORED_WARNINGS


def one_rank(rank: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[str], list[str], list[int], int]:
    """Gradients, those of plain eager graphs, the collectives that ran, those that the plan repeats, peaks and the budget."""
    tensors = inputs(2, layers=24, seed=rank)
    expected, _ = run(sharded_step, tensors, backend="aot_eager")
    gradients, names = run(sharded_step, tensors, backend="autoremat", options=options)
    report = autoremat.reports()[-1]
    assert names == planned_calls(report)
    peaks = measured_peaks(torch.compile(sharded_step, backend="autoremat", options=options), tensors, 4)
    return gradients, expected, names, again(report), peaks, report.budget_bytes or 0


AGREEMENTS = ("auto", "off")


def with_agreements(rank: int) -> dict[str, Any]:
    options = EAGER | {"memory_budget": 0.85, "on_infeasible": "best_effort"}
    return {agreement: one_rank(rank, options | {"agreement": agreement}) for agreement in AGREEMENTS}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """The results of two processes, by their agreement."""
    return values(run_ranks(with_agreements, 2, timeout=300))


@pytest.mark.slow
@pytest.mark.parametrize("agreement", AGREEMENTS)
def test_two_ranks_repeat_the_same_gathers_under_an_agreement_and_none_without(two_ranks, agreement):
    ranks = [rank[agreement] for rank in two_ranks]
    for gradients, expected, _, repeated, peaks, budget in ranks:
        assert all(map(same_bits, gradients, expected))
        assert bool(repeated) == (agreement == "auto")
        assert agreement == "off" or min(peaks) <= budget  # gloo's threads may hold a tensor for a moment longer
    assert ranks[0][2] == ranks[1][2]


def measuring_rank(rank: int) -> tuple[str, tuple[int, ...], str]:
    """The interconnect of the report, the ranks that share the plan, and the schedule."""
    options = {"compiler": "aot_eager", "cost_model": "calibrated", "memory_budget": 0.9, "on_infeasible": "best_effort"}
    run(sharded_step, inputs(2, seed=rank), backend="autoremat", options=options)
    report = autoremat.reports()[-1]
    return report.interconnect, report.ranks, str(report.plan.schedule)


@pytest.mark.slow
def test_ranks_measure_their_interconnect_together():
    first, second = values(run_ranks(measuring_rank, 2))
    assert first == second
    assert first[0].endswith("/s (measured)")
    assert first[1] == (0, 1)
