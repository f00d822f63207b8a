"""What is read by its strides keeps the layout that it was traced with, however its inputs come to lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from autoremat.passes import preserve_strides
from autoremat.passes.pipeline import run_passes

aten = torch.ops.aten
SIZE, CONTIGUOUS, CHANNELS_LAST = (2, 4, 3, 3), (36, 9, 3, 1), (36, 1, 12, 4)


def as_a_line(traced: Tensor, rows: bool) -> fx.GraphModule:
    """What stands in memory from where ``relu(x)`` begins, or its second image; traced with ``traced``."""
    graph = fx.Graph()
    made = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    made.meta["val"] = traced.relu()
    if rows:
        made = graph.call_function(aten.slice.Tensor, (made, 0, 1, 2))
        made.meta["val"] = traced.relu()[1:2]
    graph.output(graph.call_function(aten.as_strided.default, (made, (36,), (1,))))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("strides", [CONTIGUOUS, CHANNELS_LAST])
def test_the_traced_layout_is_read(strides, rows):
    traced = torch.randn(SIZE).as_strided(SIZE, strides)
    other = traced.contiguous(memory_format=torch.channels_last if strides == CONTIGUOUS else torch.contiguous_format)
    assert other.stride() != traced.stride()
    module = as_a_line(traced, rows)
    expected = traced.relu()[1:2] if rows else traced.relu()
    expected = expected.as_strided((36,), (1,))
    assert not torch.equal(module(other), expected)
    run_passes(module, preserve_strides)
    assert torch.equal(module(other), expected)
    assert torch.equal(module(traced), expected)


def test_what_is_scattered_by_strides_is_laid_too():
    traced, source = torch.randn(SIZE), torch.ones(9)
    other = traced.contiguous(memory_format=torch.channels_last)
    graph = fx.Graph()
    made = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    made.meta["val"] = traced.relu()
    graph.output(graph.call_function(aten.as_strided_scatter.default, (made, graph.placeholder("source"), (9,), (1,), 0)))
    module = fx.GraphModule({}, graph)
    expected = module(traced, source)
    assert not torch.equal(module(other, source), expected)
    run_passes(module, preserve_strides)
    assert torch.equal(module(other, source), expected)
