"""The kernel of attention that is planned for CUDA devices, and what it allocates, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.tools.cuda_attention import attention_on_cuda
from autoremat.workspaces.formulas import estimated_bytes, workspace_bytes

A100, RTX_4090, H100, B200, T4, MI300X = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5), (9, 4)


def kernel(capability, dtype=torch.bfloat16, width=64, queries=32, keys=32, value_width=None, masked=False, **given):
    """The name of the kernel, such as "flash"."""
    shapes = (queries, width), (keys, width), (keys, value_width or width)
    query, key, value = (torch.empty(2, 4, *shape, dtype=dtype, requires_grad=True) for shape in shapes)

    def attend(query, key, value):
        mask = torch.ones(queries, keys, dtype=torch.bool) if masked else None
        return attention_on_cuda(query, key, value, mask, capability=capability, **given)

    traced = make_fx(attend, tracing_mode="fake")(query, key, value)
    (out,) = traced.graph.find_nodes(op="output")
    assert out.args[0].meta["val"].shape == (2, 4, queries, value_width or width)
    names = [node.target.overloadpacket.__name__ for node in traced.graph.nodes if node.op == "call_function"
             and isinstance(node.target, torch._ops.OpOverload)]  # fmt: skip
    fused = [name for name in names if name.startswith("_scaled_dot_product")]
    return fused[0].removeprefix("_scaled_dot_product_").removesuffix("_attention") if fused else "plain"


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [
        (A100, {}, "flash"),
        (T4, {"dtype": torch.float16}, "efficient"),
        (H100, {"masked": True}, "cudnn"),
        (MI300X, {}, "flash"),
        (B200, {"width": 192, "value_width": 128}, "cudnn"),
        (H100, {"width": 60}, "flash"),
        (H100, {"dropout_p": 0.125}, "cudnn"),
        (A100, {"is_causal": True, "keys": 48}, "efficient"),
        (RTX_4090, {"width": 256, "dropout_p": 0.1}, "efficient"),
        (A100, {"dtype": torch.float32, "width": 6}, "plain"),
    ],
)
def test_the_kernel_is_that_which_torch_takes(capability, given, expected):
    assert kernel(capability, **given) == expected


def needed(kernel, width=64, keys=96, groups=4, dtype=torch.bfloat16, laid_by_token=True, batch=2):
    """Bytes that the backward of "flash", "efficient" or "cudnn" is taken to need, for batches of 4 heads of 100 queries, and
    those of the forward."""

    def tensor(heads, length):
        return torch.empty(batch, length, heads, width, dtype=dtype, device="meta").transpose(1, 2)

    def count(suffix, *args):
        op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}").default
        node = fx.Graph().call_function(op)
        found = workspace_bytes(node, args, {}, args, "cuda")
        return estimated_bytes(node, args, "cuda") if found is None else found

    query, key = tensor(4, 100), tensor(groups, keys)
    gradient = query if laid_by_token else query.contiguous()
    return count("_backward", gradient, query, key, key), count("", query, key, key)


ROWS = 2 * 4 * 128
"""Queries are padded to blocks."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4 * ROWS * (64 + 1)),
        ({"width": 80}, 4 * ROWS * (96 + 1)),
        ({"width": 160}, 4 * ROWS * (192 + 1)),
        ({"groups": 2}, 4 * ROWS * (64 + 1) + 2 * (2 * 96 * 4 * 64) * 2),
        ({"laid_by_token": False}, 4 * ROWS * (64 + 1) + 2 * 100 * 4 * 64 * 2),
    ],
)
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_the_backward_of_flash_attention_accumulates(kernel, given, expected):
    assert needed(kernel, **given)[0] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4 * ROWS * (64 + 1)),
        ({"width": 80}, 4 * ROWS * (128 + 1)),
        ({"dtype": torch.float32}, 4 * 2 * 4 * 100 * (64 + 2)),
        ({"width": 192}, 4 * (ROWS * (256 + 1) + 2 * (2 * 4 * 128) * (256 + 256))),
    ],
)
def test_the_backward_of_efficient_attention_accumulates_in_half_precision_alone(given, expected):
    assert needed("efficient", **given)[0] == expected


def test_the_forward_accumulates_wide_heads_and_where_few_blocks_share_many_keys():
    assert needed("efficient", width=192)[1] == 4 * 2 * 4 * 100 * 192
    assert needed("flash", keys=1000)[1] == 4 * 2 * 4 * 100 * (64 + 1) * 4
    assert needed("flash", keys=1000, batch=64)[1] == 0


def test_kernels_that_read_nothing_and_scans_are_known():
    row = torch.empty(1600, device="meta")
    cumsum, draw = (fx.Graph().call_function(op) for op in (torch.ops.aten.cumsum.default, torch.ops.aten.randint.default))
    assert workspace_bytes(cumsum, (row, 0), {}, row, "cuda") == 100 + 4096
    assert workspace_bytes(draw, (9, [2]), {}, torch.empty(2, device="meta"), "cuda") == 0


def test_kernels_of_libraries_are_unknown_where_there_is_no_card():
    image, weight = torch.empty(2, 3, 8, 8, device="meta"), torch.empty(4, 3, 3, 3, device="meta")
    arguments = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    node = fx.Graph().call_function(torch.ops.aten.convolution.default)
    assert workspace_bytes(node, arguments, {}, torch.empty(2, 4, 6, 6, device="meta"), "cuda") is None
