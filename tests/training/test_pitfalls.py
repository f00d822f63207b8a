"""Pitfalls of budgets on activations, which plans are free of.

D1 to D7: dropout masks drawn again; peaks that rise as the budget falls; orders to save ignored at the lowest budget; and
as a knapsack: cheap items lost beside huge ones, tiny items that weigh nothing, a capacity that is exceeded, results of a
float solver compared for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from oracles import cut_cost, measured_step
from strategies import GraphBuilder
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat
from autoremat.compiler import peers, rewriting
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.planner import Planner

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")

ATEN = torch.ops.aten
LEAST = {"memory_budget": 1, "on_infeasible": "best_effort"}


def compiled_by_us(function: Callable, **options: object) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, backend="autoremat", options={"compiler": "aot_eager", **LEAST, **options})


# -- D1: dropout -------------------------------------------------------------------------------------------------------


def dropout_network(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A loss and every hidden state; where a hidden state is 0, its mask was."""
    hidden = []
    for weight in weights:
        x = F.dropout(torch.relu(x @ weight) + x, 0.5)
        hidden.append(x)
    return (x.square().mean(), *(h.detach() for h in hidden))


def gradient_error(compiled: Callable) -> float:
    """How far the gradients are from those with the masks of the forward, as a share of the largest gradient."""
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    weights = [torch.randn(32, 32).mul(0.2).requires_grad_() for _ in range(4)]
    loss, *hidden = compiled(x, weights)
    loss.backward()
    again = [weight.detach().clone().requires_grad_() for weight in weights]
    y = x
    for weight, mask in zip(again, [h != 0 for h in hidden], strict=True):
        y = (torch.relu(y @ weight) + y) * mask * 2
    torch.testing.assert_close(y, hidden[-1])
    y.square().mean().backward()
    errors = [float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in zip(weights, again, strict=True)]
    return max(errors)


def test_d1_recomputed_dropout_has_the_masks_of_the_forward():
    for budget in (None, 0.7, 1):
        assert gradient_error(compiled_by_us(dropout_network, memory_budget=budget)) < 1e-5
    assert autoremat.reports()[-1].recomputed_ops > 0


# -- D2: peaks ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a gated feed-forward layer, normed and residual, as in Llama."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, tokens, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    """Returns a loss, in a tuple."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.blocks(x).square().mean(),)


@pytest.fixture(scope="module")
def stack() -> tuple[Stack, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(2, 64, 32),)


def graph_of(model: nn.Module, inputs: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Graph:
    """The captured graph of the model's training step."""
    graphs = []
    original = peers.plan_graph
    monkeypatch.setattr(peers, "plan_graph", lambda priced, *given: (graphs.append(priced.graph), original(priced, *given))[1])
    compiled_by_us(model, memory_budget=None)(*inputs)
    return graphs[0]


@pytest.mark.slow
def test_d2_predicted_peak_and_cost_are_monotone_in_the_budget(stack, monkeypatch):
    planner = Planner(graph_of(*stack, monkeypatch), time_limit=60)
    baseline, smallest = planner.baseline.peak_bytes, planner.find(1).smallest.peak_bytes
    assert smallest < 0.5 * baseline
    budgets = [smallest + (baseline - smallest) * i // 12 for i in range(13)]
    plans = [planner.find(budget).plan for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert all(low.peak_bytes <= high.peak_bytes for low, high in pairwise(plans))
    assert all(low.cost_seconds >= high.cost_seconds for low, high in pairwise(plans))


@pytest.mark.slow
def test_d2_measured_peak_falls_with_the_budget(stack):
    model, inputs = stack

    def measured(compiled: Callable) -> int:
        measured_step(compiled, model, inputs)
        return measured_step(compiled, model, inputs)

    by_us = {budget: measured(compiled_by_us(model, memory_budget=budget)) for budget in (0.7, 0.5, 1)}
    peaks = list(by_us.values())
    assert peaks == sorted(peaks, reverse=True)


# -- D3: orders to save ------------------------------------------------------------------------------------------------


def save_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == ATEN.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def region(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.gelu(x @ first) @ second)


def selective(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(region, x, first, second, use_reentrant=False, context_fn=contexts).square().mean()


def products(module) -> int:
    return sum(node.target == ATEN.mm.default for node in module.graph.nodes)


def d3_inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(32, 32, requires_grad=True) for _ in range(3)]


def test_d3_orders_to_save_hold_at_the_lowest_budget(monkeypatch):
    modules = []
    original = rewriting.apply_plan
    monkeypatch.setattr(rewriting, "apply_plan", lambda *args: modules.append(original(*args)) or modules[-1])
    compiled_by_us(selective)(*d3_inputs()).backward()
    ((_, backward),) = modules
    assert products(backward) == 4  # two gradients of each product, nothing again
    assert autoremat.reports()[-1].recomputed_ops > 0


# -- D4 to D7: the knapsack, as graphs ---------------------------------------------------------------------------------


def items(sizes: Sequence[int], seconds: Sequence[float]) -> Graph:
    """One forward op per item, each read by its own backward op and by the loss."""
    build = GraphBuilder()
    x = build.source(0)
    made = [build.op([x], size, seconds=cost) for size, cost in zip(sizes, seconds, strict=True)]
    loss = build.op(made, 0, seconds=0.0)
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([tangent, loss], 0, forward=False)
    for value in reversed(made):
        gradient = build.op([gradient, value], 0, forward=False)
    return build.graph(forward_outputs=(loss,), backward_outputs=(gradient,), saving_seconds_per_byte=1e-16)


def solved(graph: Graph, budget: int) -> Plan:
    plan = Planner(graph).find(budget).plan
    assert plan is not None
    plan.check()
    assert plan.peak_bytes <= budget
    return plan


def test_d4_cheap_items_are_kept_beside_huge_ones():
    huge, cheap = 5e14 / 1e14, 1 / 1e14  # seconds of 5e14 FLOPs and of one
    graph = items([10] * 3 + [1] * 5, [huge] * 3 + [cheap] * 5)
    assert set(solved(graph, 100).saved) >= set(range(1, 9))
    assert MinCut(graph).solve(0.0) >= set(range(1, 9))
    # A price per byte between the two costs: each is judged on its own.
    assert len(MinCut(graph).solve(1e-9) & graph.backward_needs) == 3


def test_d5_tiny_items_add_up():
    count, budget = 300, 100
    graph = items([1] * count, [1e-3] * count)
    # All items are alive together before the loss, so the budget that counts is on what crosses to the backward.
    planner = Planner(graph)
    assert planner.baseline.peak_bytes == count
    assert Planner(graph).find(budget).plan is None
    assert planner.baseline.saved_bytes == count
    assert planner.find(count).plan.peak_bytes == count


@pytest.mark.parametrize("budget", [64, 100, 129, 170, 200, 255])
def test_d6_the_budget_is_never_exceeded(budget):
    """Many values far smaller than the budget, one after the other: what is saved adds up, byte by byte."""
    build = GraphBuilder()
    x = build.source(0)
    made = [x]
    for _ in range(256):
        made.append(build.op([made[-1]], 1, seconds=1e-6))
    gradient = build.source(0, Role.TANGENT)
    for before, after in zip(made[-2::-1], made[:0:-1], strict=True):
        gradient = build.op([before, after, gradient], 0, forward=False)
    graph = build.graph(forward_outputs=(made[-1],), backward_outputs=(gradient,), saving_seconds_per_byte=1e-9)
    plan = solved(graph, budget)
    assert budget // 2 < plan.peak_bytes <= budget
    assert plan.recomputed


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3, 1e-7, 1e7])
def test_d7_cuts_do_not_hang_on_float_equality(scale):
    """The same instance in other units has the same solution, also where costs and prices are no round numbers."""
    sizes, seconds = [3, 7, 11, 13, 17], [0.3, 0.1, 0.7, 0.2, 0.9]
    reference = MinCut(items(sizes, seconds)).solve(0.04)
    graph = items(sizes, [s * scale for s in seconds])
    found = MinCut(graph).solve(0.04 * scale)
    assert found == reference
    assert {v for v in found if graph.values[v].bytes} == {1, 3, 5}
    assert cut_cost(graph, found, 0.04 * scale, 1e30) == pytest.approx(scale * (0.04 * (3 + 11 + 17) + 0.1 + 0.2))
