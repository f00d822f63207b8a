"""Gradient accumulation: the first micro-batch and later ones in the report, in ``max_batch`` and in the watch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError, OptionWarning
from autoremat.measure.peak import track_peak

EAGER = {"compiler": "aot_eager", "cost_model": "roofline"}
WIDTH, LAYERS = 128, 4
GRADIENTS = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)
MIB = 2**20


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH)


def peak_of_step(model: nn.Module, size: int, options: dict[str, object], micro_batches: int) -> int:
    """Measured peak of a step of several micro-batches, after a step that compiles. It begins without gradients."""
    torch._dynamo.reset()
    compiled, inputs = torch.compile(model, backend="autoremat", options=EAGER | options), rows(size)
    for tracked in (False, True):
        model.zero_grad(set_to_none=True)
        with track_peak("cpu") as peak:
            for _ in range(micro_batches if tracked else 1):
                compiled(inputs).backward()
    return peak.bytes


@pytest.mark.slow
def test_max_batch_holds_for_every_micro_batch():
    model, budget = Layers(), 2 * MIB
    first = autoremat.max_batch(rows, model, budget, step=128, options=EAGER)
    every = autoremat.max_batch(rows, model, budget, step=128, options=EAGER, accumulate=True)
    assert every.size < first.size
    assert every.report.resident_bytes == every.report.accumulated_bytes == GRADIENTS
    told = {"memory_budget": budget, "accumulate": True}
    measured = peak_of_step(model, every.size, told, 3)
    assert 0.95 * every.report.peak_bytes <= measured <= budget
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        assert peak_of_step(model, first.size, {"memory_budget": budget}, 3) > budget


def test_reports_tell_first_and_later_micro_batches_apart():
    model, inputs = Layers(), rows(512)
    alone = autoremat.explain(model, inputs, options=EAGER | {"memory_budget": "2MiB"})
    counted = autoremat.explain(model, inputs, options=EAGER | {"memory_budget": "2MiB", "accumulate": True})
    assert alone.accumulated_bytes == counted.accumulated_bytes == counted.resident_bytes == GRADIENTS
    assert "258.00 KiB more, if the gradients of earlier ones are kept" in str(alone)
    assert counted.budget_bytes == alone.budget_bytes
    assert counted.recomputed_ops >= alone.recomputed_ops


def test_the_watch_notices_gradients_that_stay():
    model, inputs = Layers(), rows(512)
    compiled = torch.compile(model, backend="autoremat", options=EAGER | {"memory_budget": "1500KiB"})
    compiled(inputs).backward()
    with pytest.warns(BudgetWarning, match=r"adds to gradients of earlier calls of the step: their 258\.00 KiB"):
        compiled(inputs).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        compiled(inputs).backward()  # once is enough


@pytest.mark.parametrize("change", ["mode", "frozen"])
def test_the_watch_notices_gradients_of_another_graph(change):
    model, inputs = Layers(), rows(512)
    options = EAGER | {"memory_budget": "1500KiB"}
    compiled = torch.compile(model, backend="autoremat", options=options, dynamic=False)
    compiled(inputs).backward()
    if change == "mode":
        model.eval()
    else:
        model.layers[0].requires_grad_(False)
    with pytest.warns(BudgetWarning, match=r"adds to gradients of earlier calls of the step: their 258\.00 KiB") as caught:
        compiled(inputs).backward()
    assert ("Lower memory_budget by the 64.50 KiB" in str(caught[0].message)) == (change == "frozen")


def test_a_step_profile_counts_by_itself():
    with pytest.raises(OptionsError, match="leave out in_flight and accumulate"):
        autoremat.profile_step(Layers(), rows(8), options=EAGER | {"in_flight": 2})
    profile = autoremat.profile_step(Layers(), rows(64), options=EAGER, memory_budget=1.0)
    with pytest.warns(OptionWarning, match="no effect under a profiled step"):
        torch.compile(Layers(), backend="autoremat", options=EAGER | {"memory_budget": profile, "in_flight": 2})(rows(64))


def open_calls_peak(model: nn.Module, calls: int, options: dict[str, object]) -> int:
    """Measured peak of a step whose calls are all open before the first backward, after a step that compiles."""
    torch._dynamo.reset()
    compiled, inputs = torch.compile(model, backend="autoremat", options={"cost_model": "roofline"} | options), rows(512)
    compiled(inputs).backward()
    model.zero_grad(set_to_none=True)
    with track_peak("cpu") as peak:
        for loss in [compiled(inputs) for _ in range(calls)]:
            loss.backward()
    return peak.bytes


@pytest.mark.slow
def test_code_keeps_the_sum_of_its_open_calls_within_the_budget():
    model = Layers()
    measured = open_calls_peak(model, 4, {"memory_budget": 0.6, "in_flight": 4})
    report = autoremat.reports()[-1]
    assert report.compiled_peak_bytes is not None
    assert measured <= report.compiled_peak_bytes <= report.budget_bytes
    assert measured >= 0.85 * report.compiled_peak_bytes
    assert report.in_flight == 4


def test_an_infeasible_budget_names_the_other_calls():
    with pytest.raises(BudgetInfeasible) as caught:
        autoremat.explain(Layers(), rows(512), options=EAGER | {"memory_budget": "300KiB", "in_flight": 4})
    (others,) = (one for one in caught.value.occupants if "3 other calls in flight" in one.name)
    assert others.bytes > 0
    assert sum(one.bytes for one in caught.value.occupants) == caught.value.minimum_bytes
    assert caught.value.budget_bytes == 300 * 1024 < caught.value.lower_bound_bytes <= caught.value.minimum_bytes
