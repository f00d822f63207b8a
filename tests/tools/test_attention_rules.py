"""The kernel of attention on CUDA devices where there is none: against a table of torch's rules, and what it allocates."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.tools.cuda_kernels import Attention, attention_on_cuda
from autoremat.workspaces.formulas import estimated_bytes, workspace_bytes


def attention(
    minor: int, trains=True, heads=(4, 4, 4), batch=4, widths=(64, 64), mask=None, offset=0, card=(9, 0), **given
) -> str:
    """The kernel for an attention of 128 tokens in bfloat16."""
    options = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False} | given
    operands = [
        torch.empty(2 * batch * count * 128 * width, dtype=torch.bfloat16, device="meta")
        .as_strided((batch, count, 128, width), (count * 128 * width, 128 * width, width, 1), offset)
        .requires_grad_(trains)
        for count, width in zip(heads, (widths[0], *widths), strict=True)
    ]
    bias = None if mask is None else torch.empty(mask, dtype=torch.bfloat16, device="meta")
    return Attention(*operands, bias, **options, capability=card, minor=minor).kernel


A100, RTX_4090, H100, B200, T4, MI300X = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5), (9, 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dropout_p": 0.1}, ("cudnn", "flash", "flash", "flash")),
        ({"batch": 65_536, "heads": (1, 1, 1)}, ("cudnn", "cudnn", "flash", "flash")),
        ({"widths": (160, 160)}, ("cudnn", "cudnn", "cudnn", "flash")),
        ({"widths": (192, 128)}, ("cudnn", "cudnn", "cudnn", "cudnn")),
        ({"widths": (256, 224), "trains": False}, ("cudnn", "cudnn", "cudnn", "cudnn")),
        ({"heads": (4, 1, 1)}, ("math", "math", "math", "cudnn")),
        ({"heads": (4, 1, 1), "card": A100}, ("math", "math", "math", "flash")),
        ({"heads": (4, 2, 2), "enable_gqa": True}, ("cudnn", "cudnn", "cudnn", "cudnn")),
        ({"heads": (4, 2, 1), "enable_gqa": True}, ("cudnn", "cudnn", "cudnn", "cudnn")),
        ({"heads": (4, 2, 1), "enable_gqa": True, "card": A100}, ("math", "math", "math", "math")),
        ({"heads": (4, 2, 2), "enable_gqa": True, "card": A100, "mask": (128, 128)}, ("math", "math", "math", "efficient")),
        ({"mask": (4, 128, 128)}, ("efficient", "efficient", "efficient", "efficient")),
        ({"mask": (4, 2, 128, 128)}, ("efficient", "efficient", "efficient", "efficient")),
        ({"mask": (128, 128), "card": A100, "offset": 3}, ("efficient", "efficient", "math", "math")),
        ({"widths": (200, 200), "card": RTX_4090}, ("efficient", "efficient", "efficient", "efficient")),
        ({"widths": (256, 256), "card": RTX_4090}, ("flash", "flash", "flash", "flash")),
        ({"card": T4}, ("math", "math", "math", "math")),
        ({"widths": (264, 264), "card": A100}, ("efficient", "efficient", "efficient", "efficient")),
    ],
)
def test_each_version_of_torch_has_its_rules(given, expected):
    assert tuple(attention(minor, **given) for minor in range(11, 15)) == expected


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
