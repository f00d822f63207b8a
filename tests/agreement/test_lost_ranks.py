"""Ranks that end or fail by themselves while others compile the same graph."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from processes import RankResult, run_ranks, values
from rank_step import EAGER, SHARE, blocks, step

from autoremat.agreement import rendezvous
from autoremat.compiler import joint_graph, peers

pytestmark = pytest.mark.slow  # each rank is a process


def ending(rank: int, lost: int, at: str) -> dict[str, Any]:
    """A step in which one process ends while it plans, or while it captures the graph."""
    if rank == lost:
        place, name = (peers, "plan_graph") if at == "planning" else (joint_graph, "capture")
        setattr(place, name, lambda *_, **__: os._exit(7))
    return step(SHARE)


@pytest.mark.parametrize(("lost", "at"), [(0, "planning"), (1, "capture")])
def test_a_rank_that_is_killed_ends_the_compilation_on_the_others(lost, at):
    found: list[RankResult] = run_ranks(ending, 2, args=(lost, at), timeout=120)
    assert "ended with code 7" in found[lost].error
    other = values([found[1 - lost]])[0]
    assert (other["error"], other["rank"]) == ("AgreementError", lost)
    assert f"rank {lost} is lost: its process" in other["text"]


def failing_alone(rank: int) -> tuple[str, list[str]]:
    """Two steps, after each of which gradients are summed. The second batch of rank 1 is too large for its budget."""
    torch._dynamo.reset()
    rendezvous.ALONE = 0.2
    model = blocks(64, 6)
    compiled = torch.compile(model, backend="autoremat", options=EAGER | {"memory_budget": 700_000}, dynamic=False)
    try:
        for rows in (256, 2048 if rank else 256):
            compiled(torch.randn(rows, 64)).square().mean().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
    except Exception as error:
        if rank:
            os._exit(7)  # as an uncaught error ends a process
        sys.excepthook(type(error), error, None)
        return type(error).__name__, getattr(error, "__notes__", [])
    raise AssertionError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python's errors have no notes")
def test_a_rank_in_a_collective_names_the_rank_that_could_not_compile():
    first, second = run_ranks(failing_alone, 2)
    assert "ended with code 7" in second.error
    kind, [note] = values([first])[0]
    assert kind == "RuntimeError", "the collective's own error"
    assert "before this error, rank 1 failed while it compiled" in note
    assert "BudgetInfeasible" in note
    assert note.splitlines()[0] in first.output
