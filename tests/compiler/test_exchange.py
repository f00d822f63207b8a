"""What ranks tell each other while they compile, whenever they come and whatever fails: each rank is a thread."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant, OptionWarning
from autoremat.compiler import exchange
from autoremat.compiler.exchange import Session, session_at
from autoremat.torch_private.process_groups import Job

LONG = 60.0
"""Seconds after which a rank that has not come back hangs."""

SHORT = 1.0
"""A timeout of a process group, of which ranks wait half for each other."""


def together(body: Callable[[Job], Any], ranks: int, timeout: float = LONG) -> list[Any]:
    """The result, or the error, of ``body`` on each rank. Ranks wait for each other half of ``timeout``."""
    store, found = HashStore(), [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = body(Job(rank, ranks, store, timeout))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


def met(job: Job, place: str = "here") -> Session:
    session = Session(job)
    session.meet(place, tuple(range(job.world_size)))
    return session


def test_all_ranks_have_the_terms_of_all_whenever_they_come():
    def body(job):
        time.sleep(0.1 * job.rank)
        session = met(job)
        return session.name, [list(session.exchange("terms", [number, job.rank]).items()) for number in range(2)]

    first, *others = together(body, 3)
    assert first[1] == [[(rank, [number, rank]) for rank in range(3)] for number in range(2)]
    assert others == [first, first]


def test_ranks_meet_again_at_each_occurrence_of_a_place():
    first, second = together(lambda job: [met(job).name for _ in range(3)], 2)
    assert first == second
    assert len(set(first)) == 3


def test_ranks_that_do_not_come_in_time_are_named_once_and_meet_those_that_are_left(monkeypatch):
    """Ranks 2 and 3 come late, such as for a shape that only they meet again."""
    late, local = threading.Event(), threading.local()
    monkeypatch.setattr(exchange, "job", lambda: local.job)
    told = []
    monkeypatch.setattr(exchange, "warn_user", lambda text, kind: told.append((local.job.rank, kind, text)))

    def body(job):
        local.job, found = job, []
        if job.rank >= 2:
            late.wait(LONG)
        for _ in range(2):
            with session_at("here", "auto") as session:
                late.set()
                found.append(session.members)
        return found

    assert together(body, 4, SHORT) == [[(0, 1)] * 2] * 2 + [[(2, 3)] * 2] * 2
    assert sorted((rank, kind, text[:30]) for rank, kind, text in told) == [
        *((rank, OptionWarning, "ranks 2, 3 did not come to com") for rank in (0, 1)),
        *((rank, OptionWarning, "ranks 0, 1 did not come to com") for rank in (2, 3)),
    ]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_on_one_rank_is_an_error_on_all(failing):
    def body(job):
        session = met(job)
        session.exchange("begin", None)
        if job.rank == failing:
            session.fail(ValueError("the graph is odd"))
        return session.exchange("next", None)

    found = together(body, 3)
    assert all(isinstance(error, AgreementError) and error.rank == failing for error in found)
    others = [error for rank, error in enumerate(found) if rank != failing]
    assert all(f"failed on rank {failing}" in str(error) and "the graph is odd" in str(error) for error in others)


def test_figures_of_an_infeasible_budget_reach_all_ranks():
    error = BudgetInfeasible(
        budget_bytes=10, minimum_bytes=30, lower_bound_bytes=20, occupants=[Occupant("t", 30)], device="cpu"
    )

    def body(job):
        session = met(job)
        if not job.rank:
            session.fail(error)
        return session.exchange("plans", None)

    _, told = together(body, 2)
    assert isinstance(told, BudgetInfeasible)
    assert told.figures() == error.figures() | {"rank": 0}
    assert "within the budget of rank 0" in str(told)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_does_not_answer_is_named_on_all_others(lost, monkeypatch, caplog):
    monkeypatch.setattr(exchange, "NOTICE", 0.1)

    def body(job):
        session = met(job)
        return "gone" if job.rank == lost else session.exchange("plans", None)

    found = together(body, 3, SHORT)
    assert found.pop(lost) == "gone"
    assert all(isinstance(error, AgreementError) and error.rank == lost for error in found), found
    assert all(f"rank {lost} has not answered for 0.5 s" in str(error) for error in found)
    assert sum(f"waits for rank {lost}, up to 0.5 s" in record.getMessage() for record in caplog.records) == 2


def test_an_error_ends_the_session_although_the_store_has_gone():
    """Who asks again whether all have compiled would otherwise compile for ever."""

    class Gone(HashStore):
        def set(self, key, value):
            raise RuntimeError("connection closed")

    session = Session(Job(1, 2, Gone()), "here", (0, 1))
    with pytest.raises(AgreementError, match="connection closed"):
        session.exchange("graph", None)
    assert session.failed


@pytest.mark.parametrize("seed", range(40))
def test_an_interrupt_at_any_request_to_the_store_reaches_all_who_wait(seed, monkeypatch):
    draw = random.Random(seed)
    ranks, request, before = draw.randint(2, 3), draw.randint(1, 20), draw.random() < 0.5
    interrupted, delays = draw.randrange(ranks), [draw.choice([0.0, 0.0, 0.02, 0.1]) for _ in range(ranks)]
    local, requests = threading.local(), []

    def ask(name):
        true = getattr(HashStore, name)

        def asked(*given):
            counts = getattr(local, "counts", False)
            requests.extend([name] * counts)
            if counts and before and len(requests) == request:
                raise KeyboardInterrupt
            answer = true(*given)
            if counts and len(requests) == request:
                raise KeyboardInterrupt
            return answer

        return asked

    for name in ("set", "get", "check", "compare_set"):
        monkeypatch.setattr(HashStore, name, ask(name))

    def compile_together(job):
        session = Session(job)
        try:
            session.meet("here", tuple(range(ranks)))
            return [[*session.exchange(topic, None)] for topic in ("options", "graph", "plans")]
        except BaseException as error:
            session.fail(error)
            return error

    def body(job):
        time.sleep(delays[job.rank])
        local.counts = job.rank == interrupted
        found = compile_together(job)
        local.counts = False
        return found, compile_together(job)

    for rank, (first, second) in enumerate(together(body, ranks)):
        if rank == interrupted and len(requests) >= request:
            assert isinstance(first, KeyboardInterrupt)
        else:
            assert isinstance(first, AgreementError | list)
        assert second == [list(range(ranks))] * 3
