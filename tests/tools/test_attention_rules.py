"""The kernel of attention on CUDA devices where there is none: against a table of torch's rules, and what it allocates."""

from __future__ import annotations

import random

import pytest
import torch
from attention_choice import Facts, chosen
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.tools.cuda_kernels import Attention, attention_on_cuda
from autoremat.workspaces.formulas import estimated_bytes, workspace_bytes

CARDS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
DTYPES = {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64}


def drawn(draw: random.Random, minor: int) -> tuple[Attention, Facts]:
    """An attention, and the facts about it. Most have ordinary sizes, and some part that is not."""

    def rarely(usual, *others):
        return draw.choice(others) if draw.random() < 0.15 else usual

    def pick(*values):
        return draw.choice(values)

    card, dtype = rarely((9, 0), *CARDS), rarely("BFloat16", *DTYPES)
    batch, heads, queries, keys = rarely(2, 1, 65_535, 65_536), rarely(4, 65_536), rarely(32, 1, 0, 33), rarely(32, 1, 0, 40)
    width = pick(8, 64, 128, rarely(64, 1, 4, 60, 160, 192, 208, 224, 232, 256, 264))
    value_width = rarely(width, 128, 64, 60)
    key_heads = rarely(heads, 1, 2, 3)
    value_heads = rarely(key_heads, 1, heads)
    trains, grouped = pick(True, False), pick(True, False)

    def operand(heads, length, width):
        offset, stride = rarely(0, 4, 8, 3), rarely(1, 2)
        sizes = (rarely(batch, batch, 1), heads, length, width)
        shape = torch.empty(sizes, device="meta").stride()
        made = torch.empty_strided((1,), (1,), dtype=DTYPES[dtype], device="meta")
        return made.as_strided(sizes, [stride * s for s in shape], offset).detach().requires_grad_(trains)

    query, key, value = operand(heads, queries, width), operand(key_heads, keys, width), operand(value_heads, keys, value_width)
    mask = None
    if pick(True, False):
        whole = (query.shape[0], heads, queries, keys)
        sizes = [rarely(size, size, 1) for size in whole[-pick(2, 2, 4, 4, 3) :]]
        mask = torch.empty(sizes, dtype=DTYPES[dtype], device="meta")
        mask = rarely(mask, mask.requires_grad_(pick(True, False)), mask.transpose(-1, -2).contiguous().transpose(-1, -2))
    dropout, causal = rarely(0.0, 0.1, 0.125, 0.5), mask is None and pick(True, False)
    facts = Facts(
        dtype=dtype, capability=card, dimensions=4, batches=tuple(t.shape[0] for t in (query, key, value)),
        heads=(heads, key_heads, value_heads), lengths=(queries, keys, keys), widths=(width, width, value_width),
        strides=tuple(t.stride(-1) for t in (query, key, value)),
        offsets=tuple(t.storage_offset() for t in (query, key, value)),
        mask=None if mask is None else tuple(mask.shape), mask_stride=1 if mask is None else mask.stride(-1),
        mask_trains=mask is not None and mask.requires_grad, trains=trains, causal=causal, grouped=grouped, dropout=dropout,
    )  # fmt: skip
    return Attention(query, key, value, mask, dropout, causal, grouped, card, minor), facts


@pytest.mark.parametrize("minor", range(11, 16))
def test_the_choice_is_that_of_the_table(minor):
    draw = random.Random(minor)
    found = set()
    for _ in range(2000):
        attention, facts = drawn(draw, minor)
        assert attention.kernel == chosen(facts, minor), facts
        found.add(attention.kernel)
    assert found == {"cudnn", "flash", "efficient", "math"}


def attention(minor: int) -> str:
    """The kernel for an attention of four heads and 128 tokens in bfloat16."""
    operands = (torch.empty(4, 4, 128, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    return Attention(*operands, None, 0.0, False, False, (9, 0), minor).kernel


def test_settings_of_torch_are_obeyed(monkeypatch):
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert attention(13) == "efficient"
    torch.use_deterministic_algorithms(True)
    try:
        assert attention(13) == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert attention(13) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0")
    assert attention(13) == "cudnn"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention(13) == "flash"


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
        (A100, {}, "flash"), (T4, {"dtype": torch.float16}, "efficient"), (H100, {"masked": True}, "cudnn"),
        (MI300X, {}, "flash"), (B200, {"width": 192, "value_width": 128}, "cudnn"), (H100, {"width": 60}, "flash"),
        (H100, {"dropout_p": 0.125}, "cudnn"), (A100, {"is_causal": True, "keys": 48}, "efficient"),
        (RTX_4090, {"width": 256, "dropout_p": 0.1}, "efficient"), (A100, {"dtype": torch.float32, "width": 6}, "plain"),
    ],
)  # fmt: skip
def test_the_kernel_is_that_which_torch_takes(capability, given, expected):
    assert kernel(capability, **given) == expected


def needed(kernel, width=64, keys=96, groups=4, dtype=torch.bfloat16, laid_by_token=True, batch=2):
    """Bytes that the backward of a kernel needs for batches of 4 heads of 100 queries, and those of the forward."""

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
