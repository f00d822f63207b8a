"""Memory that depends on data, that results keep, or that eager loops hold: the predicted peak covers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_formulas import formula, measured
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from trained_steps import trained

from autoremat.workspaces import measurement
from autoremat.workspaces.formulas import CPU, EXACT_RESULTS

aten = torch.ops.aten
WORDS = torch.randint(0, 100, (256, 20))


def bags(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.embedding_bag(WORDS, x[:, :width], mode="max").square().mean()


def held_folds(x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for _ in range(3):
        image = F.fold(x, (32, 32), 3, padding=1)
        total = total + (image @ image.mT).square().mean()
        x = F.unfold(image, 3, padding=1)
    return total


def scanned(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, row: ((c @ row).tanh(), (c + row).sin()), torch.zeros_like(x[0]), x, dim=0)[1].square().mean()


def mapped(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.map import map as torch_map

    return torch_map(lambda row, weight: (row @ weight).tanh().exp() * row, x, torch.ones(64, 64)).square().mean()


STEPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "maxima of bags": (bags(64), (100, 64)),
    "maxima of bags of single numbers": (bags(1), (100, 1)),
    "folds": (held_folds, (2, 36, 1024)),
    "scan": (scanned, (4, 64, 64)),
    "map": (mapped, (2, 64, 64)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_predicted_peak_covers_a_step(name: str) -> None:
    function, shape = STEPS[name]
    x = torch.randn(shape, requires_grad=True)
    found = trained(function, [], x, memory_budget=1.0)
    assert found.report.fits
    assert 0.6 * found.report.predicted_peak_bytes < found.peak <= found.report.predicted_peak_bytes


def test_a_loop_that_is_not_measured_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoremat.capture.call_cost.MOST_FLOPS", -1)
    for name in ("scan", "map"):
        test_the_predicted_peak_covers_a_step(name)


EXPERTS = torch.randn(64, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()

CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "distinct numbers": (lambda x: aten._unique2(x, True, True, True), (torch.arange(400),)),
    "positions of what is not zero": (aten.nonzero, (torch.arange(400),)),
    "sums by position": (lambda x, i: x.index_add(0, i, x), (torch.randn(64, 8), torch.arange(64))),
    "groups of rows": (aten._grouped_mm, (*EXPERTS, torch.full((4,), 64, dtype=torch.int32))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_is_planned_at_its_dearest_data(name: str) -> None:
    call, arguments = CALLS[name]
    assert measured(call, *arguments) <= formula(call, *arguments)


@pytest.mark.parametrize("sides", [(64, 16, 8), (1024, 128, 256)])
def test_each_thread_of_a_packed_product_has_a_block(sides: tuple[int, int, int]) -> None:
    rows, inner, columns = sides
    arguments = torch.randn(rows, inner).bfloat16(), torch.randn(2, inner, columns).bfloat16()
    ends, threads = torch.full((2,), rows, dtype=torch.int32), torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            assert measured(aten._grouped_mm, *arguments, ends) <= formula(aten._grouped_mm, *arguments, ends)
    finally:
        torch.set_num_threads(threads)


def exact_calls() -> dict[Any, tuple[torch.Tensor, ...]]:
    heads, rows, stack = torch.randn(1, 2, 64, 16), torch.randn(16, 16), torch.randn(2, 16, 16)
    result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    return {
        aten.mm: (rows, rows), aten.bmm: (stack, stack), aten.addmm: (rows, rows, rows), aten.baddbmm: (stack, stack, stack),
        aten._grouped_mm: (rows.bfloat16(), stack.bfloat16(), torch.tensor([8, 16], dtype=torch.int32)),
        aten._scaled_dot_product_flash_attention_for_cpu: (heads, heads, heads),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            heads, heads, heads, heads, result, logsumexp, 0.0, False,  # type: ignore[dict-item]
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", [op for op in CPU if op in EXACT_RESULTS], ids=str)
def test_only_ops_without_excess_are_taken_to_have_exact_results(op: Any) -> None:
    graph = make_fx(lambda: op(*exact_calls()[op]), tracing_mode="fake")().graph
    node = next(n for n in reversed(graph.nodes) if getattr(n.target, "overloadpacket", None) is op)
    args = tuple(n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in node.args)
    found = measurement.measured(node, args, {}, node.meta["val"])
    assert found is not None
    assert not any(found.excess)


def test_each_result_has_the_memory_that_its_own_buffer_takes() -> None:
    def call() -> Any:
        words, starts = torch.zeros(12, dtype=torch.long), torch.zeros(4, dtype=torch.long)
        return torch.ops.aten._embedding_bag(torch.ones(12, 8), words, starts, False, 2)

    node = next(n for n in reversed(make_fx(call, tracing_mode="fake")().graph.nodes) if isinstance(n.meta.get("val"), tuple))
    args = tuple(n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in node.args)
    found = measurement.measured(node, args, {}, node.meta["val"])
    assert found is not None
    assert [tensor.untyped_storage().nbytes() - tensor.nbytes for tensor in call()] == list(found.excess)
    assert any(found.excess[1:])
