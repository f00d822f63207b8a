"""The table of facts about ops: one row per op, and the rows that differ from each other."""

from __future__ import annotations

import torch

from autoremat.ops.op_table import ROWS, OpFacts, facts_of
from autoremat.planner.cost import Rate
from autoremat.planner.graph.op import Kind

aten = torch.ops.aten


def test_no_op_has_two_rows_and_no_facts_have_two():
    ops = [op for _, listed in ROWS for op in listed]
    assert len(ops) == len(set(ops))
    facts = [row for row, _ in ROWS]
    assert len(facts) == len(set(facts))


def test_scatters_have_the_kind_of_reductions_and_are_none():
    assert facts_of(aten.sum).reduces
    assert facts_of(aten.index_put).kind is Kind.REDUCTION
    assert not facts_of(aten.index_put).reduces


def test_products_and_attention_follow_from_the_rate():
    assert facts_of(aten.addmm).is_product
    assert facts_of(aten.bmm).rate is Rate.BATCHED_MATMUL
    assert facts_of(aten._flash_attention_backward).is_attention


def test_an_op_that_is_not_listed_has_no_facts():
    assert facts_of(aten.add) == OpFacts()
