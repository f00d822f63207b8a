"""Rows of a tensor in several dimensions are read in one dimension without a copy of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoremat.passes.building import Builder
from autoremat.passes.rows.row_partition import Region
from autoremat.passes.rows.run_by_parts import _Rewriting


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_rows_between_two_places(sizes, data):
    rows = torch.Size(sizes).numel()
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    whole = torch.randn(*sizes[:-1], sizes[-1] + 1, 2)[..., : sizes[-1], :]
    graph, mode = fx.Graph(), FakeTensorMode()
    given_node = graph.placeholder("given")
    given_node.meta["val"] = mode.from_tensor(whole)
    rewriting = _Rewriting(graph, Region(rows), [(start, stop)], Builder(graph, mode))
    graph.output(rewriting.between(given_node, len(sizes), start, stop, given_node))
    found = fx.GraphModule({}, graph)(whole)
    assert torch.equal(found, whole.reshape(rows, 2)[start:stop])


@pytest.mark.parametrize(("cut", "copies"), [(4, False), (3, True)])
def test_only_rows_with_gaps_between_them_are_copied(cut, copies):
    node = fx.Graph().placeholder("given")
    node.meta["val"] = torch.randn(3, 4, 2)[:, :cut]
    assert _Rewriting.copies(node, 2) is copies
