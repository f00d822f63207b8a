"""Sums of gradients in a graph for Inductor: the late summand goes onto the early one, and the numbers stay the same."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from block_models import Tied
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from trained_steps import measured

import autoremat
from autoremat import passes
from autoremat.passes import accumulate_into_first, run_passes

aten = torch.ops.aten


def computed(b: Tensor) -> Tensor:
    return torch.cumsum(b.cos(), 0)


def a_product_late(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return a @ b + computed(b) @ b


def a_scatter_late(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return a @ b + aten.index_put.default(aten.full.default([4, 4], 0.0), [index], computed(b), True)


def anything_late(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    early = a @ b
    return computed(b) + early


def three_products(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    later = a @ b + computed(b) @ b
    return later + computed(a) @ b


def three_summands(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    early = a @ b
    later = aten.index_put.default(aten.full.default([4, 4], 0.0), [index], computed(b), True) + early
    return computed(a) @ b + later


def overwritten_late(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return a @ b + aten.index_put.default(aten.full.default([4, 4], 0.0), [index], computed(b), False)


def read_twice(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    early = a @ b
    return computed(b) + early + early.sin()


def weighted(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    early = a @ b
    return torch.add(computed(b), early, alpha=2)


def nothing_between(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    prepared = b.cos()
    early = a @ b
    return early + torch.cumsum(prepared, 0)


def of_another_type(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return a @ b + computed(b).double()


def rewritten(function: Callable[..., Tensor]) -> tuple[Counter[object], Tensor, Tensor, int]:
    """The calls of the rewritten graph, its result, the result before, and how many additions were rewritten."""
    inputs = torch.randn(4, 4), torch.randn(4, 4), torch.tensor([0, 2, 2, 3])
    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    (rewrites,) = run_passes(graph, accumulate_into_first)
    calls = Counter(node.target for node in graph.graph.nodes if node.op == "call_function")
    return calls, graph(*inputs), function(*inputs), rewrites


@pytest.mark.parametrize(
    ("function", "there", "gone"),
    [
        (a_product_late, {aten.addmm.default: 1, aten.mm.default: 1}, aten.add.Tensor),
        (a_scatter_late, {aten.index_put.default: 1, aten.mm.default: 1}, aten.full.default),
        (anything_late, {aten.sub.Tensor: 1, aten.neg.default: 1, aten.mm.default: 1}, aten.add.Tensor),
        (overwritten_late, {aten.sub.Tensor: 1, aten.index_put.default: 1, aten.full.default: 1}, aten.add.Tensor),
    ],
)
def test_the_late_summand_goes_onto_the_early_product(function, there, gone):
    calls, result, expected, count = rewritten(function)
    assert count == 1
    assert there.items() <= calls.items()
    assert gone not in calls
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("function", [three_products, three_summands])
def test_every_addition_of_a_chain_goes_onto_the_sum_before_it(function):
    calls, result, expected, count = rewritten(function)
    assert count == 2
    assert aten.add.Tensor not in calls
    assert calls[aten.addmm.default] == calls[aten.mm.default] + (function is three_products)
    torch.testing.assert_close(result, expected)


def test_what_is_only_kept_from_fusing_has_the_same_bits():
    _, result, expected, _ = rewritten(anything_late)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("function", [read_twice, weighted, nothing_between, of_another_type])
def test_other_additions_stay(function):
    calls, result, expected, count = rewritten(function)
    assert count == 0
    assert calls[aten.add.Tensor] > 0
    assert torch.equal(result, expected)


def step(in_order: bool) -> tuple[list[Tensor], autoremat.Report, int]:
    """Gradients, report and measured peak of the tied model without a budget."""
    torch.manual_seed(0)
    model, tokens = Tied(4096, 64), torch.randint(0, 4096, (512,))
    with pytest.MonkeyPatch.context() as patch:
        if not in_order:
            patch.setattr(passes, "accumulate_into_first", lambda joint: 0)
        # An option that changes nothing but the key of Inductor's caches.
        compiled = torch.compile(model, backend="autoremat", options={"max_pointwise_cat_inputs": 8 + in_order})
        (_, *found), peak = measured(compiled, model, tokens)
    torch._dynamo.reset()
    return found, autoremat.reports()[-1], peak


@pytest.mark.slow
def test_a_tied_weights_gradient_does_not_hold_the_logits():
    expected, before, measured_before = step(in_order=False)
    gradients, after, measured = step(in_order=True)
    assert after.compiled_peak_bytes < before.compiled_peak_bytes
    assert measured < measured_before
    assert after.gradient_bytes == sum(g.untyped_storage().nbytes() for g in gradients)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted)
