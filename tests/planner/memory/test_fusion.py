"""What the simulator knows of Inductor: facts about single ops, and predicted peaks against those of generated code."""

from collections.abc import Callable

import pytest
import torch
from block_models import FeedForward
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autoremat
from autoremat.ops.op_traits import kind_of, works_in_place
from autoremat.planner.graph.graph import Graph, Machine
from autoremat.planner.graph.op import Kind

aten = torch.ops.aten


def nodes_of(function: Callable[..., object], *inputs: Tensor) -> dict[str, fx.Node]:
    """The calls of a traced function by name."""
    return {node.name: node for node in make_fx(function)(*inputs).graph.nodes}


def test_what_is_read_where_it_is_written():
    def function(a: Tensor, b: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        return a + b, torch.where(a > 0, a, row), torch.flip(a, [0])

    nodes = nodes_of(function, torch.randn(4, 4), torch.randn(4, 4), torch.randn(4))
    read = {name: [n.name for n in works_in_place(nodes[name])] for name in ("add", "gt", "where", "flip")}
    # Of another type, too; not where it is repeated over rows, nor turned round.
    assert read == {"add": ["a_1", "b_1"], "gt": ["a_1"], "where": ["gt", "a_1"], "flip": []}


@pytest.mark.parametrize(
    ("threads", "runs_on", "expected"), [(1, "cpu", Kind.REDUCTION), (2, "cpu", Kind.EXTERN), (2, "cuda", Kind.REDUCTION)]
)
def test_a_scatter_that_adds_is_atens_where_threads_could_meet(monkeypatch, threads, runs_on, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    index = torch.tensor([[0, 1]])
    nodes = nodes_of(lambda x, y: (x.scatter_add(1, index, y), x.scatter(1, index, y)), torch.randn(1, 4), torch.randn(1, 2))
    assert kind_of(nodes["scatter_add"], runs_on) is expected
    assert kind_of(nodes["scatter"]) is Kind.REDUCTION


def test_how_much_is_inlined_is_what_the_user_has_set():
    weight = torch.randn(8, 8, requires_grad=True)

    def graph_with(**options: int) -> Graph:
        plan = autoremat.explain(lambda x: (x @ weight).sin().square().mean(), torch.randn(4, 8), options=options).plan
        assert plan is not None
        return plan.graph

    assert graph_with().machine.most_reads == torch._inductor.config.realize_reads_threshold == Machine().most_reads
    assert graph_with(realize_reads_threshold=8).machine.most_reads == 8


class Attention(nn.Module):
    """By its formula, so that Inductor makes the softmax and the random numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inwards, self.outwards, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inwards(x).chunk(3, -1)
        weights = F.softmax(query @ key.mT / 6, -1)
        return x + self.outwards(F.dropout(weights, self.dropout) @ value)


def gated(x: Tensor) -> Tensor:
    return F.silu(x) * torch.tanh(x)


MODULES: dict[str, Callable[[], list[nn.Module]]] = {
    "attention": lambda: [Attention(0.0), Attention(0.0)],
    "dropout": lambda: [Attention(0.1), Attention(0.1)],
    "gelu": lambda: [FeedForward(32), FeedForward(32)],
    "gated": lambda: [FeedForward(32, gated), FeedForward(32, gated)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "budget", "error"),
    [
        ("attention", 0.75, 0.001),
        ("attention", "least", 0.001),
        ("dropout", 0.7, 0.001),
        ("gelu", "least", 0.001),
        ("gated", "least", 0.001),
    ],
)
def test_predicted_peaks_are_those_of_generated_code(kind, budget, error):
    torch.manual_seed(0)
    model, x = nn.Sequential(*MODULES[kind]()), torch.randn(8, 128, 32)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    options = {"memory_budget": 1, "on_infeasible": "best_effort"} if budget == "least" else {"memory_budget": budget}
    report = autoremat.explain(loss, x, lower=True, options=options)
    assert report.recomputed_ops > 0
    predicted = report.predicted_peak_bytes + report.code_headroom_bytes
    assert report.compiled_peak_bytes == pytest.approx(predicted, rel=error)
