"""Whatever trains under torch.compile trains under a budget: what the sweeps in benchmarks/ found, and unforeseen graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import same_bits

import autoremat
from autoremat.basics.errors import ISSUES
from autoremat.capture import capture

LEAST = {"memory_budget": 1, "compiler": "aot_eager", "on_infeasible": "best_effort"}

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

Function = Callable[[torch.Tensor], torch.Tensor]


def gradient(function: Function, **arguments: object) -> torch.Tensor:
    """Of a positive definite 32x32 matrix, through a fresh compilation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    root = torch.randn(32, 32)
    x = (root @ root.T + torch.eye(32)).requires_grad_()
    torch.compile(lambda x: function(x * 1.0).sin().sin().sin().sin().sin().sum(), fullgraph=True, **arguments)(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.lu_factor(x)[0]])
def test_ops_that_check_their_result(function: Function) -> None:
    expected = gradient(function, backend="aot_eager")
    assert same_bits(gradient(function, backend="autoremat", options=LEAST), expected)
    assert autoremat.reports()[-1].recomputed_ops > 0


def chosen(x: torch.Tensor) -> torch.Tensor:
    places = (x > 0).nonzero()
    return x.sin()[places[:, 0], places[:, 1]].cos()


def test_assertions_about_sizes_stay_in_the_forward() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        expected = gradient(chosen, backend="aot_eager")
        assert same_bits(gradient(chosen, backend="autoremat", options=LEAST), expected)
    assert autoremat.reports()[-1].recomputed_ops > 0


def product(x: torch.Tensor) -> torch.Tensor:
    return x.sin() @ x.cos()


WARNED = LEAST | {"on_planning_error": "fallback"}

STAGES = ("compiler.joint_graph.capture", "compiler.planning.Planner", "compiler.rewriting.apply_plan")
FAILURES = (RuntimeError("as if"), MemoryError("as if"), KeyError("as if"))


def failing(monkeypatch: pytest.MonkeyPatch, stage: str, failure: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(f"autoremat.{stage}", fail)


@pytest.mark.parametrize("stage", STAGES)
def test_no_failure_of_any_stage_reaches_the_user(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    expected = gradient(product, backend="aot_eager")
    failure = FAILURES[STAGES.index(stage)]
    failing(monkeypatch, stage, failure)
    with pytest.warns(autoremat.FallbackWarning) as caught:
        found = gradient(product, backend="autoremat", options=WARNED)
    (warning,) = [w for w in caught if issubclass(w.category, autoremat.FallbackWarning)]
    for part in (f"{type(failure).__name__}: ", "as if", "test_every_model.py:", ISSUES):
        assert part in str(warning.message)
    assert same_bits(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_no_budget_is_lost_to_a_failure(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    failing(monkeypatch, stage, RuntimeError("as if"))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        gradient(product, backend="autoremat", options=LEAST)
    error = caught.value.inner_exception
    assert isinstance(error, autoremat.PlanningError)
    for part in ("memory budget cannot be kept", "RuntimeError: as if", "test_every_model.py:", 'on_planning_error="fallback"'):
        assert part in str(error)


def test_without_a_budget_a_failure_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "compiler.rewriting.apply_plan", RuntimeError("as if"))
    with pytest.warns(autoremat.FallbackWarning, match="as if"):
        gradient(product, backend="autoremat", options={"compiler": "aot_eager"})


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["torch_private.inductor_lowering._lowered_peak", "compiler.records.load"])
def test_no_failure_around_inductor_reaches_the_user(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    expected = gradient(product, backend="inductor")
    failing(monkeypatch, stage, RuntimeError("as if"))
    options = WARNED | {"compiler": "inductor"}
    with pytest.warns(autoremat.FallbackWarning, match=r"test_every_model\.py:.*RuntimeError: as if.*/issues"):
        found = gradient(product, backend="autoremat", options=options)
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="as if"):
        gradient(product, backend="autoremat", options=LEAST | {"compiler": "inductor"})


def test_a_planner_without_time_still_finds_a_plan() -> None:
    expected = gradient(product, backend="aot_eager")
    assert same_bits(gradient(product, backend="autoremat", options=LEAST | {"time_limit": 1e-9}), expected)
    assert autoremat.reports()[-1].time_limited


def test_what_cannot_be_planned_trains_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(node: torch.fx.Node, *arguments: object) -> int:
        if capture.op_traits.packet(node) is torch.ops.aten.mm:
            raise IndexError("no such dimension")
        return 0

    monkeypatch.setattr(capture.op_traits, "flops_of", fail)
    expected = gradient(product, backend="aot_eager")
    before = len(autoremat.reports())
    with pytest.warns(autoremat.FallbackWarning) as caught:
        found = gradient(product, backend="autoremat", options=WARNED)
    (warning,) = [w for w in caught if issubclass(w.category, autoremat.FallbackWarning)]
    assert "aten.mm.default" in str(warning.message)
    torch.testing.assert_close(found, expected)
    assert len(autoremat.reports()) == before


def test_a_failure_half_way_through_the_rewrite_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradient(product, backend="aot_eager")

    def fail(*_: object) -> None:
        raise autoremat.PlanInvalid("as if")

    monkeypatch.setattr("autoremat.passes._check_split", fail)
    with pytest.warns(autoremat.FallbackWarning, match="PlanInvalid: as if"):
        found = gradient(product, backend="autoremat", options=WARNED)
    assert same_bits(found, expected)
