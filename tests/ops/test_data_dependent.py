"""Ops whose results are as large as the data say run once: made anew by other code they might be of another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import same_bits
from torch import Tensor
from trained_steps import trained

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.ops import op_traits
from autoremat.planner.graph.op import Trait
from autoremat.report.decisions import Decision

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")


def over_a_threshold(x: Tensor, w: Tensor) -> Tensor:
    """The rows that score enough, as a router takes them: where they are, only their nonzero entries know."""
    h = (x @ w).sin()
    rows = (h.cos().mean(1) > 0.1).nonzero()[:, 0]
    return (h[rows].sin().sin() @ w).sin().square().mean()


def gradients(**arguments: object) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(64, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(over_a_threshold, fullgraph=True, **arguments)(x, w).backward()
    assert x.grad is not None
    assert w.grad is not None
    return [x.grad, w.grad]


def planned(inner: str) -> list[Tensor]:
    options = {"memory_budget": 1, "compiler": inner, "on_infeasible": "best_effort", "on_planning_error": "raise"}
    found = gradients(backend="autoremat", options=options)
    (report,) = autoremat.reports()
    assert report.recomputed_ops > 0
    decisions = {value.decision for value in report.values if value.op == "aten.nonzero.default"}
    assert Decision.RECOMPUTED not in decisions, report
    return found


@pytest.fixture(autouse=True)
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoremat.report.registry._reports", [])


def test_sizes_that_the_data_decide_are_not_decided_twice():
    expected = gradients(backend="aot_eager")
    for ours, theirs in zip(planned("aot_eager"), expected, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.slow
def test_sizes_that_the_data_decide_are_not_decided_twice_by_generated_code():
    expected = gradients(backend="inductor")
    for ours, theirs in zip(planned("inductor"), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["nonzero", "repeat_interleave.Tensor", "equal"])
def test_ops_whose_results_depend_on_data_have_the_trait(name):
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    assert Trait.DATA_DEPENDENT in op_traits.traits_of_op(op)


def test_what_binds_a_size_has_the_trait_whatever_its_op():
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    assert op_traits.traits_of(node) == Trait.NONE
    node.meta["unbacked_bindings"] = {"u0": ()}
    assert op_traits.traits_of(node) == Trait.DATA_DEPENDENT


def by_mask(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    return (h[x[:, 0] > -9].sin() @ w).sin().square().mean()


def by_nonzero(x: Tensor, w: Tensor) -> Tensor:
    rows = ((x @ w > -99) & (torch.arange(16) < 8)).nonzero()[:, 0]
    torch._check(rows.shape[0] <= 600)
    return ((x @ w).sin()[rows].sin() @ w).sin().square().mean()


def selected(x: Tensor, w: Tensor) -> Tensor:
    return torch.masked_select((x @ w).sin(), x > -9).sin().sin().square().mean()


def repeated(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.repeat_interleave((x @ w).sin(), (x[:, 0] > -9).long() * 100, dim=0)
    return (rows.sin() @ w).sin().square().mean()


def repeated_within(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.repeat_interleave((x @ w).sin(), (x[:, 0] > -9).long() * 100, dim=0)
    torch._check(rows.shape[0] <= 8_000)
    return (rows.sin() @ w).sin().square().mean()


@pytest.mark.parametrize("loss", [by_mask, by_nonzero, selected, repeated_within])
def test_a_budget_holds_up_to_the_bound_of_a_size(loss):
    peak, report = step_of(loss, "16MiB")
    assert peak <= report.peak_bytes
    assert report.assumed_sizes == ()
    assert "upper bounds" in report.notes[-1]


def test_a_size_over_the_assumed_one_is_told_once():
    with pytest.warns(BudgetWarning, match=r"is 6400 .* at most 4096.*torch\._check\(size <= 6400\)") as caught:
        _, report = step_of(repeated, "4MiB")
    assert len(caught) == 1
    assert "assumed to be at most 4096" in report.notes[-1]
    assert autoremat.Report.from_json(report.to_json()).assumed_sizes == report.assumed_sizes


def test_an_infeasible_budget_names_the_assumption_and_the_bound():
    for loss, words in ((repeated, "assumed to be at most 4096"), (by_nonzero, "upper bounds, up to 600:")):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
            step_of(loss, "8KiB")


def step_of(loss: Callable[[Tensor, Tensor], Tensor], budget: str) -> tuple[int, autoremat.Report]:
    x, w = torch.randn(64, 16), torch.randn(16, 16, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        found = trained(loss, [], x, w, memory_budget=budget)
    return found.peak, found.report
