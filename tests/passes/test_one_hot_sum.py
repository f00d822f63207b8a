"""Sums of rows with one entry: the same bits without the sum, and everything else is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autoremat
from autoremat.passes import before_capture, simplify_one_hot_sum
from autoremat.passes.inductor_workarounds.one_hot_sum import OPERATIONS
from autoremat.passes.pipeline import run_passes
from autoremat.torch_private.compilers import largest_expression

aten, prims = torch.ops.aten, torch.ops.prims

ROWS, COLUMNS = 6, 5


def count(columns: int = COLUMNS, start: int = 0) -> Tensor:
    return prims.iota.default(columns, start=start, step=1, dtype=torch.int64, device="cpu", requires_grad=False)


def scalar(number: float) -> Tensor:
    return aten.scalar_tensor.default(number, dtype=torch.float32)


def of_a_loss(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target.expand(ROWS, COLUMNS), count().view(1, COLUMNS))
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1, keepdim=True)


def without_the_dimension(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(count(), target)
    return (gradient * torch.where(equal, aten.full.default([], 0.37), aten.full.default([], 0.0))).sum(-1)


def of_images(target: Tensor, gradient: Tensor) -> Tensor:
    targets, gradients = target.view(2, 1, 3), gradient.view(2, 1, 3)
    equal = aten.eq.Tensor(targets.expand(2, COLUMNS, 3), count().view(1, COLUMNS, 1))
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradients).sum(1, keepdim=True)


def weighted(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count())
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient.expand(ROWS, COLUMNS).cos()).sum(1)


def counted_from_one(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count(start=1))
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1)


def of_ones_elsewhere(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count())
    return (torch.where(equal, scalar(-1.0), scalar(1.0)) * gradient).sum(1)


def over_rows(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count())
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(0)


def in_doubles(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count())
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1, dtype=torch.float64)


def of_one_column(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count(1))
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1)


def between_counts(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target + 0.5, count())
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1)


def of_narrow_integers(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target.to(torch.int8), count(256))
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1)


def of_more_rows_than_the_entries(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target[:1], count())
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient).sum(1)


def of_less_rows_than_the_entries(target: Tensor, gradient: Tensor) -> Tensor:
    equal = aten.eq.Tensor(target, count())
    return (torch.where(equal, scalar(-1.0), scalar(0)) * gradient[:1].expand(ROWS, COLUMNS)).sum(1)


def of_integers(target: Tensor, gradient: Tensor) -> Tensor:
    one, zero = (aten.scalar_tensor.default(number, dtype=torch.int64) for number in (1, 0))
    return (torch.where(aten.eq.Tensor(target, count()), one, zero) * target).sum(1).float()


def of_numbers(target: Tensor, gradient: Tensor) -> Tensor:
    return (gradient.sum() * gradient.max()).sum(0)


GRADIENTS = torch.tensor([0.3, -0.0, 0.0, torch.inf, torch.nan, -2.5]).view(ROWS, 1)


def rewritten(function: Callable[..., Tensor], target: Tensor) -> tuple[int, Tensor, Tensor]:
    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(target, GRADIENTS)
    (run,) = run_passes(graph, simplify_one_hot_sum)
    number = run.rewrites
    assert number == sum(node.target is aten.logical_and.default for node in graph.graph.nodes)
    return number, graph(target, GRADIENTS), function(target, GRADIENTS)


def bits(tensor: Tensor) -> Tensor:
    """All that is not a number is the same."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor).view(torch.int32)


@pytest.mark.parametrize("function", [of_a_loss, without_the_dimension, of_images])
@pytest.mark.parametrize("targets", [(0, 1, 2, 3, 4, 0), (4, 4, 4, 4, 4, 4), (-1, 5, -100, 9, 2, 7)])
def test_the_sum_goes_and_the_bits_stay(function, targets):
    number, found, expected = rewritten(function, torch.tensor(targets).view(ROWS, 1))
    assert number == 1
    assert found.shape == expected.shape
    assert torch.equal(bits(found), bits(expected))


OTHERS = [
    weighted, counted_from_one, of_ones_elsewhere, over_rows, in_doubles, of_one_column, between_counts, of_narrow_integers,
    of_more_rows_than_the_entries, of_less_rows_than_the_entries, of_integers, of_numbers,
]  # fmt: skip


@pytest.mark.parametrize("function", OTHERS)
def test_other_sums_are_left_alone(function):
    number, found, expected = rewritten(function, torch.tensor([0, 1, 2, 3, 4, 0]).view(ROWS, 1))
    assert number == 0
    assert torch.equal(bits(found.float()), bits(expected.float()))


def test_products_with_sizes_that_are_not_known_are_looked_at():
    seen = []

    def backend(graph: fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        traced = make_fx(graph, tracing_mode="symbolic")(*inputs)
        seen.extend(run.rewrites for run in run_passes(traced, simplify_one_hot_sum))
        return graph

    torch.compile(lambda x: (x.sin() * x.shape[0]).sum(1), backend=backend, dynamic=True)(torch.ones(4, 3))
    assert seen == [0]


@pytest.mark.parametrize(("runs_on", "limit", "sums"), [("cpu", 50, 0), ("cpu", 30, 1), ("cuda", 50, 1)])
def test_the_sum_stays_where_the_gradient_would_be_cut_in_two(runs_on, limit, sums):
    graph = make_fx(of_a_loss, tracing_mode="fake")(torch.zeros(ROWS, 1, dtype=torch.int64), GRADIENTS)
    with inductor_config.patch(realize_opcount_threshold=limit):
        before_capture(graph, runs_on)
    assert sum(node.target is aten.sum.dim_IntList for node in graph.graph.nodes) == sums


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


@pytest.mark.slow
@pytest.mark.skipif(largest_expression("cpu") < OPERATIONS, reason="this torch cuts the gradient of the logits in two")
def test_under_inductor_a_cross_entropy_sums_no_row_of_its_gradient():
    logits, targets = torch.randn(64, 300, requires_grad=True), torch.randint(0, 300, (64,))
    targets[3] = -100
    (expected,) = torch.autograd.grad(torch.compile(loss)(logits, targets), logits)
    torch._dynamo.reset()
    planned = torch.compile(loss, backend="autoremat")
    (found,) = torch.autograd.grad(planned(logits, targets), logits)
    assert torch.equal(found, expected)
    plan = autoremat.reports()[-1].plan
    assert plan is not None
    backward = plan.graph.ops[plan.graph.num_forward :]
    assert not [op.name for op in backward if "sum" in op.target]
