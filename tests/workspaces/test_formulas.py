"""Workspace formulas are upper bounds on what the CPU's kernels allocate beside their results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat import track_peak
from autoremat.ops import op_traits
from autoremat.workspaces.formulas import SCALARS, bound_bytes, workspace_bytes

aten = torch.ops.aten


def measured(call: Callable[..., Any], *args: torch.Tensor) -> int:
    """Bytes beside the results at the peak of a warm call."""
    call(*args)
    with track_peak("cpu") as peak:
        result = call(*args)
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return peak.bytes - sum(t.untyped_storage().nbytes() for t in tensors)


def bound(call: Callable[..., Any], *args: torch.Tensor) -> int:
    return _largest(bound_of, call, *args)


def formula(call: Callable[..., Any], *args: torch.Tensor) -> int:
    """The largest workspace of the traced calls."""
    return _largest(lambda *one: workspace_bytes(*one, "cpu"), call, *args)


def bound_of(*call: Any) -> int:
    found = bound_bytes(*call, "cpu")
    assert found is not None
    return found + SCALARS


def _largest(of: Callable[..., Any], call: Callable[..., Any], *args: torch.Tensor) -> int:
    found = []
    for node in make_fx(call, tracing_mode="fake")(*args).graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and not op_traits.is_view(node):
            values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            found.append(of(node, tuple(values[0]), dict(values[1]), node.meta["val"]))
    return max(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4, 64, 64), (2, 2, 1024, 64), (1, 2, 301, 33)])
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


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
}
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("image", LAYOUTS)
@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("size", [(8, 16, 8, 8), (2, 512, 4, 4)])
def test_batch_norm_backward(size: tuple[int, ...], gradient: str, image: str, dtype: torch.dtype) -> None:
    tensors = [LAYOUTS[layout](torch.randn(size).to(dtype)) for layout in (gradient, image)]
    sums = [torch.rand(size[1]).to(dtype) for _ in range(5)]

    def backward(*tensors: torch.Tensor) -> Any:
        return aten.native_batch_norm_backward(*tensors, True, 1e-5, [True] * 3)

    needed = measured(backward, *tensors, *sums)
    assert needed <= formula(backward, *tensors, *sums)
    assert needed <= bound(backward, *tensors, *sums)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum over what is not adjacent": lambda x: aten.sum.dim_IntList(x, [0, 2], True),
    "sum in 64 bits": lambda x: aten.sum.dim_IntList(x, [0, 2], True, dtype=torch.float64), "sum": aten.sum.default,
    "mean": lambda x: aten.mean.dim(x, [1], True), "softmax": lambda x: aten._softmax(x, -1, False),
    "gradient of a softmax": lambda x: aten._softmax_backward_data(x, x, -1, x.dtype), "largest": aten.max.default,
    "least and largest": aten.aminmax.default, "position of the largest": aten.argmax.default,
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_that_are_too_large_to_be_measured(reduction: str, layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(4, 16, 24, 8).to(dtype))
    assert measured(REDUCTIONS[reduction], x) <= bound(REDUCTIONS[reduction], x)


def test_masks_are_converted_to_be_counted() -> None:
    mask = torch.ones(64, 64, dtype=torch.bool)
    assert 0 < measured(aten.sum.default, mask) <= bound(aten.sum.default, mask)


def test_reductions_of_what_lies_in_order_need_nothing() -> None:
    assert bound(aten.sum.default, torch.randn(64, 64)) == SCALARS == bound(aten.argmax.default, torch.randn(64, 64))


@pytest.mark.parametrize("dtype", TYPES)
def test_scatters_of_16_bits_are_made_in_32(dtype: torch.dtype) -> None:
    def scatter(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> Any:
        return aten.scatter.src(x, -1, index, source)

    tensors = torch.zeros(50, 50, dtype=dtype), torch.zeros(50, 3, dtype=torch.long), torch.ones(50, 3, dtype=dtype)
    assert measured(scatter, *tensors) <= bound(scatter, *tensors)


@pytest.mark.parametrize(("shifts", "dimensions"), [([1, 2, 3], [0, 1, 2]), ([5], [])])
def test_a_roll_is_made_dimension_by_dimension(shifts: list[int], dimensions: list[int]) -> None:
    def roll(x: torch.Tensor) -> torch.Tensor:
        return aten.roll(x, shifts, dimensions)

    x = torch.randn(8, 16, 32).mT
    assert 0 < measured(roll, x) <= bound(roll, x)


def test_pooling_that_inductor_generates_needs_nothing() -> None:
    def pool(images: torch.Tensor) -> Any:
        return torch.ops.prims._low_memory_max_pool_with_offsets(images, [3, 3], [2, 2], [1, 1], [1, 1], False)

    assert formula(pool, torch.randn(4, 16, 64, 64)) == 0
