"""Budgets under dynamic shapes: kept for every size that a compiled graph accepts, with few compilations."""

from collections.abc import Iterable

import pytest
import torch
from block_models import Chain
from oracles import same_bits
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from trained_steps import measured

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.torch_private.symbolic_sizes import dynamic_sizes, most, planned_for, size_hint

WIDTH = 32
SWEEP = range(128, 1025, 128)


def mlp() -> Chain:
    return Chain(4, WIDTH)


def peak_at(model: nn.Module, step, rows: int) -> int:
    return measured(step, model, torch.randn(rows, WIDTH))[1]


def sweep(options: dict, lengths: Iterable[int], **arguments) -> tuple[list[int], list[autoremat.Report]]:
    """Peaks and the reports of all compilations of a model that is called with so many rows, one after the other."""
    model, before = mlp(), len(autoremat.reports())
    step = torch.compile(model, backend="autoremat", options={"compiler": "aot_eager", **options}, **arguments)
    peaks = [peak_at(model, step, rows) for rows in lengths]
    return peaks, autoremat.reports()[before:]


@pytest.fixture(scope="module")
def possible() -> autoremat.Report:
    """The report of the largest size."""
    torch.compiler.reset()
    _, (report,) = sweep({"memory_budget": 1.0}, [SWEEP[-1]], dynamic=False)
    torch.compiler.reset()
    return report


@pytest.mark.parametrize(
    ("order", "dynamic"),
    [pytest.param(1, None, id="growing", marks=pytest.mark.slow), pytest.param(-1, True, id="shrinking dynamic")],
)
def test_the_budget_holds_for_every_length(possible, order, dynamic):
    budget = possible.minimum_peak_bytes * 21 // 20
    peaks, reports = sweep({"memory_budget": budget}, SWEEP[::order], dynamic=dynamic)
    assert max(peaks) <= budget
    assert len(reports) <= (6 if order > 0 else 2)
    assert max(report.predicted_peak_bytes for report in reports) <= budget
    assert any(report.recomputed_ops for report in reports)


@pytest.mark.slow
def test_the_limit_is_the_size_at_hand_where_no_more_fits(possible):
    budget = possible.minimum_peak_bytes * 7 // 10
    model, before = mlp(), len(autoremat.reports())
    options = {"compiler": "aot_eager", "memory_budget": budget}
    step = torch.compile(model, backend="autoremat", options=options, dynamic=True)
    assert peak_at(model, step, 640) <= budget
    assert peak_at(model, step, 600) <= budget
    assert len(autoremat.reports()) == before + 1
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        step(torch.randn(1024, WIDTH))
    assert isinstance(caught.value.inner_exception, BudgetInfeasible)
    assert caught.value.inner_exception.minimum_bytes <= possible.minimum_peak_bytes


@pytest.mark.filterwarnings("ignore::autoremat.BudgetWarning")
def test_a_size_that_tracing_fixes_is_planned_as_it_is():
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.fractional_max_pool2d(torch.tanh(x)[None, None], 2, output_size=(8, 16)).square().mean()

    options = {"compiler": "aot_eager", "memory_budget": 1, "on_infeasible": "best_effort"}
    step = torch.compile(loss, backend="autoremat", options=options, dynamic=True)
    for rows in (60, 48):
        compiled, eager = (torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).requires_grad_() for _ in range(2))
        for function, x in ((step, compiled), (loss, eager)):
            torch.manual_seed(3)
            function(x).backward()
        assert same_bits(compiled.grad, eager.grad)


def test_a_declared_maximum_is_the_limit(possible):
    model, before = mlp(), len(autoremat.reports())
    budget = (possible.minimum_peak_bytes + possible.baseline_peak_bytes) // 2
    step = torch.compile(model, backend="autoremat", options={"compiler": "aot_eager", "memory_budget": budget})
    first = torch.randn(520, WIDTH)
    torch._dynamo.mark_dynamic(first, 0, min=2, max=1000)
    step(first).backward()
    assert peak_at(model, step, 1000) <= budget
    assert len(autoremat.reports()) == before + 1
    assert 0.9 * budget * 0.8 < autoremat.reports()[-1].predicted_peak_bytes <= budget


LENGTH = 1024


def behind(x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Work on what is left of a buffer behind the input: the less, the longer that is."""
    rest = cache[x.shape[0] :] @ weight
    for _ in range(3):
        rest = torch.tanh(rest @ weight).sin()
    return rest.square().sum() + (x @ weight).square().sum()


def test_the_budget_holds_where_tensors_shrink_as_the_input_grows():
    torch.compiler.reset()
    cache, weight = torch.randn(LENGTH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    budget, before = 8 * LENGTH * WIDTH * 4, len(autoremat.reports())
    options = {"compiler": "aot_eager", "memory_budget": budget}
    step = torch.compile(behind, backend="autoremat", options=options, dynamic=True)
    peaks = [measured(step, [], torch.randn(length, WIDTH), cache, weight)[1] for length in (800, 400, 3)]
    assert max(peaks) <= budget
    assert max(peaks) > budget * 3 // 4
    assert any(report.recomputed_ops for report in autoremat.reports()[before:])


def test_sizes_are_counted_where_they_are_largest():
    rows, _ = dynamic_sizes([FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(100, 7))])
    size = rows.number
    assert rows.least == 2
    with planned_for({rows: 128}):
        assert most(size) == size_hint(size) == 128
        assert (most(200 - size), size_hint(200 - size)) == (198, 72)
        assert most(100 - size) == 98  # though nothing is left at the limit
        assert most(size * (150 - size)) >= 0.99 * 75 * 75  # neither end
        assert most(5) == 5
    assert most(200 - size) == 100


@pytest.mark.slow
def test_the_budget_holds_for_every_length_under_inductor(possible):
    budget = (possible.minimum_peak_bytes + possible.baseline_peak_bytes) // 2
    peaks, reports = sweep({"memory_budget": budget, "compiler": "inductor"}, (300, 512, 700), dynamic=True)
    assert max(peaks) <= budget
    assert len(reports) <= 3  # Inductor has guards of its own
    assert max(peaks) > budget // 4


@pytest.mark.filterwarnings("ignore:Error detected in MatmulBackward0")
def test_nested_tensors_are_refused_a_budget_in_bytes():
    weight = torch.randn(8, 8, requires_grad=True)

    def loss(nested):
        return (nested @ weight).tanh().values().square().mean()

    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Give a share"):
        torch.compile(loss, backend="autoremat", options={"memory_budget": "1MiB", "compiler": "aot_eager"})(rows)
    torch._dynamo.reset()
    shared = torch.compile(loss, backend="autoremat", options={"memory_budget": 0.9, "compiler": "aot_eager"})
    with pytest.warns(autoremat.BudgetWarning, match="memory_budget=0.9 does not hold in `loss`"):
        shared(rows).backward()  # torch itself cannot trace this backward
    assert weight.grad is not None
