"""Options on their way through `torch.compile`: errors, precedence, infeasible budgets."""

from __future__ import annotations

import pickle

import pytest
import torch
from test_dynamo_backend import LEAST, Mlp, compile_
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat import BudgetInfeasible, BudgetWarning, OptionsError, OptionWarning
from autoremat.options.options import ENVIRONMENT_VARIABLE

GENEROUS, MORE, MOST = 10 * 2**20, 20 * 2**20, 30 * 2**20


def failure(**options: object) -> BaseException:
    """What the backend raised, as `torch.compile` hands it on."""
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(Mlp(), backend="autoremat", options={"compiler": "aot_eager", **options})(torch.randn(8, 64))
    return caught.value.inner_exception


@pytest.mark.parametrize("options", [{"memory_budget": "6 pounds"}, {"max_autotun": True}, {"custom_partitioner_fn": None}])
def test_bad_options_are_refused_when_the_model_is_first_called(options):
    error = failure(**options)
    assert isinstance(error, OptionsError)
    assert next(iter(options)) in str(error)


def test_an_infeasible_budget_says_what_is_possible():
    error = failure(memory_budget=1000)
    assert isinstance(error, BudgetInfeasible)
    assert error.budget_bytes == 1000
    assert 1000 < error.lower_bound_bytes <= error.minimum_bytes
    assert error.occupants
    assert "test_dynamo_backend.py" in str(error)  # where the occupants come from
    assert pickle.loads(pickle.dumps(error)).minimum_bytes == error.minimum_bytes


def test_the_minimum_named_by_the_error_is_feasible():
    minimum = failure(memory_budget=1000).minimum_bytes
    compile_(Mlp(), {"compiler": "aot_eager", "memory_budget": minimum})(torch.randn(8, 64)).backward()
    assert autoremat.reports()[-1].fits
    torch._dynamo.reset()
    assert isinstance(failure(memory_budget=minimum - 1), BudgetInfeasible)


def test_best_effort_warns_and_runs():
    model = Mlp()
    with pytest.warns(BudgetWarning, match="over its budget of 1 B: nothing smaller"):
        compile_(model, LEAST)(torch.randn(8, 64)).backward()
    report = autoremat.reports()[-1]
    assert not report.fits
    assert report.predicted_peak_bytes == report.minimum_peak_bytes
    assert all(p.grad is not None for p in model.parameters())


def budget_used(**options: object) -> int | None:
    torch._dynamo.reset()
    arguments = {"options": options} if options else {}
    torch.compile(Mlp(), backend="autoremat", **arguments)(torch.randn(8, 64)).backward()
    return autoremat.reports()[-1].budget_bytes


@pytest.mark.slow
def test_options_win_over_configure_and_configure_over_the_environment(monkeypatch):
    autoremat.configure(compiler="aot_eager")
    assert budget_used() is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "10MiB")
    assert budget_used() == GENEROUS
    with pytest.warns(OptionWarning, match=r"configure\(memory_budget=...\) comes too late"):
        autoremat.configure(memory_budget="20MiB")
    assert budget_used() == MORE
    assert budget_used(memory_budget="30MiB") == MOST
    assert budget_used(memory_budget=None) is None
    autoremat.configure(memory_budget=None)  # after a reset of torch
    assert budget_used() is None


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_a_share_is_of_the_peak_without_recomputation(share):
    compile_(Mlp(), {**LEAST, "memory_budget": share})(torch.randn(256, 64)).backward()
    report = autoremat.reports()[-1]
    assert report.budget_bytes == int(share * report.baseline_peak_bytes)
    assert report.fits
