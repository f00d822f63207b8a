"""Workspace formulas are upper bounds on what the CPU's kernels allocate beside their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat import track_peak
from autoremat.workspaces.formulas import workspace_bytes

aten = torch.ops.aten


def measured(call: Callable[..., Any], *args: torch.Tensor) -> int:
    """Bytes beside the results at the peak of a warm call."""
    call(*args)
    with track_peak("cpu") as peak:
        result = call(*args)
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return peak.bytes - sum(t.untyped_storage().nbytes() for t in tensors)


def formula(call: Callable[..., Any], *args: torch.Tensor) -> int:
    """The largest workspace of the traced calls."""
    found = []
    for node in make_fx(call, tracing_mode="fake")(*args).graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            found.append(workspace_bytes(node, tuple(values[0]), dict(values[1]), node.meta["val"]))
    return max(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4, 64, 64), (2, 4, 256, 64), (2, 2, 1024, 64), (1, 8, 300, 80), (1, 2, 301, 33)])
def test_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value, gradient = (torch.randn(shape, dtype=dtype) for _ in range(4))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)

    out, logsumexp = forward(query, key, value)

    def backward(*tensors: torch.Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, False)

    saved = (gradient, query, key, value, out, logsumexp)
    assert 0 < measured(forward, query, key, value) <= formula(forward, query, key, value)
    assert 0 < measured(backward, *saved) <= formula(backward, *saved)


@pytest.mark.parametrize("channels", [(3, 16), (16, 32), (64, 64)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (1, 1), (3, 2)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution(channels: tuple[int, int], kernel: int, stride: int, layout: torch.memory_format) -> None:
    image = torch.randn(8, channels[0], 32, 32).to(memory_format=layout)
    weight = torch.randn(channels[1], channels[0], kernel, kernel).to(memory_format=layout)
    settings = (None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return aten.convolution(x, w, *settings)

    def backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        return aten.convolution_backward(g, x, w, *settings, [True, True, False])

    gradient = torch.randn_like(forward(image, weight))
    assert measured(forward, image, weight) <= formula(forward, image, weight)
    assert measured(backward, gradient, image, weight) <= formula(backward, gradient, image, weight)


def test_product_with_an_expanded_operand_copies_it() -> None:
    left, right = torch.randn(1, 1).expand(64, 32), torch.randn(32, 16)
    assert measured(torch.mm, left, right) == 64 * 32 * 4
    assert formula(torch.mm, left, right) == 64 * 32 * 4


def test_plain_product_needs_nothing() -> None:
    left, right = torch.randn(64, 32), torch.randn(16, 32).t()
    assert measured(torch.mm, left, right) == 0 == formula(torch.mm, left, right)
