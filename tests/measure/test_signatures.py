"""Signatures of calls, and calls by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from autoremat.measure import signatures


def nodes_of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[fx.Node]:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def test_equal_calls_have_equal_signatures_and_others_do_not():
    x, y = torch.randn(4, 4), torch.randn(4, 8)

    def function(x, y):
        return torch.mm(x, x), torch.mm(x, x), torch.mm(x.t(), x), torch.mm(x, y), torch.cumsum(x, 0), torch.cumsum(x, 1)

    names = [signatures.signature(n) for n in nodes_of(function, x, y) if "aten.t." not in str(n.target)]
    assert names[0] == names[1]
    assert len(set(names)) == 5


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: torch.mm(x.expand(4, 4), x.expand(4, 4)), (torch.randn(1, 4),)),
        (lambda x, i: torch.ops.aten.index_put(x, [i], x[:2], True), (torch.randn(5, 3), torch.tensor([4, 1]))),
        (lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 9, -1, False), (torch.randn(2, 3), torch.tensor([8, 1]))),
        (lambda x: torch.sort(x)[0], (torch.randn(4, 4, dtype=torch.bfloat16),)),
        (lambda x: torch.empty(0, 3) @ x, (torch.randn(3, 2),)),
    ],
)
def test_ops_run_by_themselves_on_tensors_of_their_own_shapes(function, inputs):
    node = nodes_of(function, *inputs)[-1]
    node = node.args[0] if "getitem" in str(node.target) else node
    args, kwargs = torch.utils._pytree.tree_map(signatures.real, signatures.arguments(node))
    result, traced = node.target(*args, **kwargs), node.meta["val"]
    pairs = zip(result, traced, strict=True) if isinstance(result, tuple) else [(result, traced)]
    assert all((made.shape, made.stride(), made.dtype) == (fake.shape, fake.stride(), fake.dtype) for made, fake in pairs)
