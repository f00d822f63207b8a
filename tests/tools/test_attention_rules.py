"""The choice of a kernel of attention against a table of torch's rules, for random arguments."""

from __future__ import annotations

import random

import pytest
import torch
from attention_choice import Facts, chosen

from autoremat.tools.attention_rules import Attention

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
