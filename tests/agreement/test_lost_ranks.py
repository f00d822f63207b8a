"""Ranks that end, fail by themselves, stand still or come late while others compile the same graph."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from processes import RankResult, run_ranks, values
from rank_step import EAGER, SHARE, blocks, step

from autoremat.agreement import channel, rendezvous
from autoremat.agreement.session import Session
from autoremat.compiler import joint_graph, peers

pytestmark = pytest.mark.slow  # each rank is a process


def arriving(rank: int, seconds: float) -> dict[str, Any]:
    time.sleep(seconds * rank)
    return step(SHARE)


@pytest.fixture(scope="module", autouse=True)
def late() -> Iterator[Future[list[RankResult]]]:
    """The results of ranks that arrive thirty seconds apart. They sleep and wait while the other tests run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_ranks, arriving, 2, args=(30.0,))


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


def stopping(rank: int, seconds: float, patience: float) -> dict[str, Any]:
    """A step in which the process of rank 0 stands still for ``seconds`` while it plans and the other rank waits for it."""
    channel.SILENCE = patience
    true, true_round, store = peers.plan_graph, Session.round, torch.distributed.distributed_c10d._get_default_store()

    def arriving(session: Session, topic: str, *given: Any) -> Any:
        if topic == "end":
            store.set(f"arrived {rank}", "")
        return true_round(session, topic, *given)

    def plan(*given: Any) -> Any:
        store.wait(["arrived 1"])
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return true(*given)

    Session.round = arriving
    if rank == 0:
        peers.plan_graph = plan
    return step(SHARE)


def test_a_leader_that_stands_still_for_a_while_goes_on():
    first, second = values(run_ranks(stopping, 2, args=(4.0, 30.0)))
    assert first["schedule"] == second["schedule"]


def test_a_leader_that_stands_still_for_too_long_ends_the_compilation_on_all_ranks():
    first, second = values(run_ranks(stopping, 2, args=(12.0, 3.0)))
    assert (first["error"], first["rank"], second["error"], second["rank"]) == ("AgreementError", 0, "AgreementError", 0)
    assert first["text"].startswith("this process, rank 0, stood still for ")
    assert "rank 0 has not answered for 3 s: its process" in second["text"]
    assert "is stopped" in second["text"]


def test_ranks_that_arrive_thirty_seconds_apart_have_one_plan(late):
    first, second = values(late.result())
    assert first["schedule"] == second["schedule"]
    assert first["seconds"] >= 29
