"""What kernels of their own and others read is made once: the mark in the graph, and what Inductor makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autoremat.ops.op_traits import MATERIALIZED
from autoremat.passes.inductor_workarounds.materialize_shared import materialize_shared
from autoremat.passes.pipeline import run_passes

LENGTH, WIDTH = 64, 32
MASK = "empty_strided_cpu((2, 1, 64, 64)"


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


class Network(nn.Module):
    """Attentions with one mask, which the backward reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.where(allowed, 0.0, -torch.inf)
        for layer in self.layers:
            heads = layer(x).view(2, LENGTH, 2, WIDTH // 2).transpose(1, 2)
            x = attended(heads, mask, 1).transpose(1, 2).reshape(x.shape)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, "280KiB"])
def test_code_makes_the_mask_once_in_each_half(budget):
    from torch._inductor.utils import run_and_get_code

    model = Network()
    inputs = torch.randn(2, LENGTH, WIDTH), torch.rand(2, 1, LENGTH, LENGTH) > 0.1
    compiled = torch.compile(model, backend="autoremat", options={"memory_budget": budget})
    _, sources = run_and_get_code(lambda: compiled(*inputs).backward())
    assert len(sources) == 2
    assert all(source.count(MASK) <= 1 for source in sources)
    assert MASK in sources[0]
