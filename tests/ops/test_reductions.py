"""Which reductions end a pass: by the dimensions that they reduce, the layout in memory, and the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.ops.reductions import ends_pass

CPU, H100 = 1, 132
"""Multiprocessors."""

IMAGES = torch.zeros(2, 8, 4, 4)


def last_op_ends_pass(called: Callable[[torch.Tensor], object], operand: torch.Tensor, multiprocessors: int) -> bool:
    graph = make_fx(called)(operand).graph
    called_ops = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return ends_pass(called_ops[-1], multiprocessors)


@pytest.mark.parametrize("multiprocessors", [CPU, H100])
@pytest.mark.parametrize(
    ("called", "operand", "expected"),
    [
        (lambda x: x.sum(-1), torch.zeros(64, 100), False),
        (lambda x: x.sum(0), torch.zeros(64, 100), True),
        (lambda x: x.sum(0), torch.zeros(100, 64).t(), False),
        (lambda x: x.sum((0, 1)), torch.zeros(8, 8, 100), True),
        (lambda x: x.sum((1, 2)), torch.zeros(64, 8, 100), False),
        (lambda x: x.sum(0), torch.zeros(1, 100), False),
        (lambda x: x.sum(-1), torch.zeros(()), False),
        (lambda x: torch.softmax(x, -1), torch.zeros(64, 100), False),
        (lambda x: torch.softmax(x, 0), torch.zeros(64, 100), True),
        (lambda x: torch.ops.aten.var_mean.correction(x, [0, 2, 3]), IMAGES, True),
        (lambda x: torch.ops.aten.var_mean.correction(x, [0, 2, 3]), IMAGES.to(memory_format=torch.channels_last), True),
        (lambda x: x.scatter_add(0, torch.zeros(4, dtype=torch.int64), torch.ones(4)), torch.zeros(4), True),
        (lambda x: x + 1, torch.zeros(64, 100), False),
    ],
)
def test_reductions_that_are_none_of_rows_and_scatters_end_a_pass(called, operand, expected, multiprocessors):
    assert last_op_ends_pass(called, operand, multiprocessors) == expected


@pytest.mark.parametrize(
    ("rows", "length", "multiprocessors", "expected"),
    [
        (1, 10_000, CPU, True),
        (4, 10_000, CPU, False),
        (4, 10_000, H100, True),
        (4, 8_000, H100, False),
        (300, 10_000, H100, False),
    ],
)
def test_few_long_rows_end_a_pass(rows, length, multiprocessors, expected):
    assert last_op_ends_pass(lambda x: x.sum(1), torch.zeros(rows, length), multiprocessors) == expected
