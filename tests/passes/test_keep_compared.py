"""Passes around what Inductor does: values that are compared are kept, strides preserved, shared results made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from trained_steps import compiled, gradients

import autoremat
from autoremat.ops.op_traits import COMPARED, MATERIALIZED
from autoremat.passes import preserve_strides, run_passes
from autoremat.passes.inductor_workarounds.accumulate_gradients import accumulate_into_first
from autoremat.passes.inductor_workarounds.keep_compared import keep_compared
from autoremat.passes.inductor_workarounds.layouts import materialize_shared
from autoremat.report.decisions import Decision, Reason
from autoremat.torch_private import MINOR

ROWS, GROUPS, CLASSES = 64, 8, 5
"""Five classes: vectorised loops end in scalar code."""

Head = Callable[[Tensor], Tensor]


def largest_of_groups(z: Tensor) -> Tensor:
    groups = torch.arange(ROWS * GROUPS) % 50
    rows = z.reshape(-1, CLASSES)
    return rows.new_zeros(50, CLASSES).scatter_reduce(0, groups[:, None].expand_as(rows), rows, "amax", include_self=False)


COMPARING: dict[str, Head] = {
    "amax": lambda z: z.amax(-1),
    "amin": lambda z: z.amin(-1),
    "max()": lambda z: z.max(),
    "aminmax": lambda z: torch.aminmax(z, dim=-1).max,
    "infinity norm": lambda z: torch.linalg.vector_norm(z, float("inf"), -1),
    "median()": lambda z: z.median(),
    "scatter_reduce": largest_of_groups,
    "mask": lambda z: torch.where(z == z.amax(-1, keepdim=True), z, 0.0),
    "mask by a difference": lambda z: z * ((z - z.amax(-1, keepdim=True)) == 0),
    "mask by neighbours": lambda z: z * (z == torch.maximum(z, z.flip(-1))),
    "clamp": lambda z: z.clamp(max=z.amax(-1, keepdim=True)),
    "steps of the largest": lambda z: z * (z / (z.abs().amax(-1, keepdim=True) / 7)).floor(),
}
OTHERS: dict[str, Head] = {
    "max(dim)": lambda z: z.max(-1).values, "relu": lambda z: z.relu() * z.clamp(-0.5, 0.5),
    "logsumexp": lambda z: z.logsumexp(-1), "softmax": lambda z: z.softmax(-1).square(),
    "maximum": lambda z: torch.maximum(z, z.flip(-1)), "mean": lambda z: z * (z > z.mean(-1, keepdim=True)),
}  # fmt: skip
ACTIVATIONS: tuple[Head, ...] = (
    torch.tanh,
    lambda z: torch.atan2(z, z.roll(1, 0)),
    nn.functional.gelu,
    lambda z: torch.sin(z) * z,
    torch.sigmoid,
)


def marked(head: Head) -> list[str]:
    """The ops whose results are marked in the graph of a head's gradient."""

    def gradient(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(head(torch.tanh(x).view(-1, GROUPS, CLASSES)).float().square().sum(), x)
        return found

    module = make_fx(gradient)(torch.randn(ROWS, GROUPS * CLASSES, requires_grad=True))
    run_passes(module, keep_compared)
    return [node.name for node in module.graph.nodes if COMPARED in node.meta]


@pytest.mark.parametrize("name", COMPARING)
def test_what_is_compared_with_numbers_chosen_from_it_is_marked(name):
    if name == "aminmax" and MINOR < 12:
        pytest.skip("this torch has no derivative of it")
    assert marked(COMPARING[name]) == ["tanh"]


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_marked(name):
    assert marked(OTHERS[name]) == []


class Heads(nn.Module):
    def __init__(self, heads: dict[str, Head]) -> None:
        super().__init__()
        self.heads = tuple(heads.values())
        self.layers = nn.ModuleList(nn.Linear(16, GROUPS * CLASSES) for _ in heads)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for number, (head, layer) in enumerate(zip(self.heads, self.layers, strict=True)):
            z = ACTIVATIONS[number % len(ACTIVATIONS)](layer(x)).view(-1, GROUPS, CLASSES)
            total = total + head(z).float().square().mean()
        return total


def compare(heads: dict[str, Head], **options: Any) -> None:
    """Fails if a gradient differs from that of eager code by more than rounding."""
    model, x = Heads(heads).bfloat16(), torch.randn(ROWS, 16, dtype=torch.bfloat16)
    weights = [layer.weight for layer in model.layers]
    _, *expected = gradients(model, weights, x)
    _, *found = gradients(compiled(model, **options), weights, x)
    assert all(gradient.isfinite().all() for gradient in found)
    wrong = {
        name: float((a - b).abs().max() / a.abs().max())
        for name, a, b in zip(heads, expected, found, strict=True)
        if not torch.allclose(a, b, rtol=0, atol=5e-2 * float(a.abs().max()))
    }
    assert not wrong


def test_the_plan_keeps_what_is_compared_and_still_finds_the_least_peak(monkeypatch):
    options = {"memory_budget": 1, "on_infeasible": "best_effort", "cost_model": "roofline"}
    model, x = Heads({"one": COMPARING["amax"], "another": COMPARING["amax"]}), torch.randn(ROWS, 16)
    kept = autoremat.explain(model, x, options=options, advice=False)
    monkeypatch.setattr("autoremat.passes.keep_compared", accumulate_into_first)  # a pass that does nothing here
    free = autoremat.explain(model, x, options=options, advice=False)
    assert [value.decision for value in kept.values if value.reason is Reason.DISCONTINUOUS] == [Decision.SAVED] * 2
    assert not [value for value in free.values if value.reason is Reason.DISCONTINUOUS]
    assert 0 <= kept.minimum_peak_bytes - free.minimum_peak_bytes <= 2 * ROWS * GROUPS * CLASSES * 4


pytestmark = pytest.mark.filterwarnings("ignore::autoremat.BudgetWarning")


@pytest.mark.parametrize("tiles", ["auto", 4])
def test_uncompiled_gradients_are_those_of_eager_code(tiles):
    heads = {name: COMPARING[name] for name in ("amax", "infinity norm", "mask", "clamp")}
    compare(heads, memory_budget=0.6, tiles=tiles, on_infeasible="best_effort")


@pytest.mark.slow
def test_compiled_gradients_are_those_of_eager_code():
    heads = {name: COMPARING[name] for name in ("amax", "infinity norm", "scatter_reduce", "mask by a difference", "clamp")}
    compare(heads, memory_budget=0.7, compiler="inductor", on_infeasible="best_effort")


aten = torch.ops.aten
SIZE, CONTIGUOUS, CHANNELS_LAST = (2, 4, 3, 3), (36, 9, 3, 1), (36, 1, 12, 4)


def as_a_line(traced: Tensor, rows: bool) -> fx.GraphModule:
    """What stands in memory from where ``relu(x)`` begins, or its second image; traced with ``traced``."""
    graph = fx.Graph()
    made = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    made.meta["val"] = traced.relu()
    if rows:
        made = graph.call_function(aten.slice.Tensor, (made, 0, 1, 2))
        made.meta["val"] = traced.relu()[1:2]
    graph.output(graph.call_function(aten.as_strided.default, (made, (36,), (1,))))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("strides", [CONTIGUOUS, CHANNELS_LAST])
def test_the_traced_layout_is_read(strides, rows):
    traced = torch.randn(SIZE).as_strided(SIZE, strides)
    other = traced.contiguous(memory_format=torch.channels_last if strides == CONTIGUOUS else torch.contiguous_format)
    assert other.stride() != traced.stride()
    module = as_a_line(traced, rows)
    expected = traced.relu()[1:2] if rows else traced.relu()
    expected = expected.as_strided((36,), (1,))
    assert not torch.equal(module(other), expected)
    run_passes(module, preserve_strides)
    assert torch.equal(module(other), expected)
    assert torch.equal(module(traced), expected)


def test_what_is_scattered_by_strides_is_laid_too():
    traced, source = torch.randn(SIZE), torch.ones(9)
    other = traced.contiguous(memory_format=torch.channels_last)
    graph = fx.Graph()
    made = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    made.meta["val"] = traced.relu()
    graph.output(graph.call_function(aten.as_strided_scatter.default, (made, graph.placeholder("source"), (9,), (1,), 0)))
    module = fx.GraphModule({}, graph)
    expected = module(traced, source)
    assert not torch.equal(module(other, source), expected)
    run_passes(module, preserve_strides)
    assert torch.equal(module(other, source), expected)


LENGTH = 64


def attended(x: Tensor, mask: Tensor, layers: int) -> Tensor:
    for _ in range(layers):
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return x


@pytest.mark.parametrize(("layers", "marked"), [(1, []), (2, ["where"]), (3, ["where"])])
def test_what_several_attentions_read_is_marked(layers, marked):
    def function(x: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.where(allowed, 0.0, -torch.inf)
        return attended(x.tanh(), mask[:, :, :, :], layers)

    with torch.no_grad():
        module = make_fx(function)(torch.randn(2, 2, LENGTH, 16), torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    run_passes(module, materialize_shared)
    assert [node.name for node in module.graph.nodes if node.meta.get(MATERIALIZED)] == marked


def test_what_a_product_reads_through_a_view_is_marked_if_others_read_it():
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        alone, direct, shared = x.sin(), x.cos(), x.tanh()
        products = alone.view(-1, 4) @ weight, direct[0] @ weight, shared.view(-1, 4) @ weight
        return (*products, direct.exp(), shared.exp())

    module = make_fx(lambda x, weight: function(x, weight))(torch.randn(2, 4, 4), torch.randn(4, 4))
    run_passes(module, materialize_shared)
    assert [node.name for node in module.graph.nodes if node.meta.get(MATERIALIZED)] == ["cos", "tanh"]
