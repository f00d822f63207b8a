"""Rounds of several ranks, and what each knows of the others: each rank is a thread."""

from __future__ import annotations

import pytest
from rank_threads import quick, together  # noqa: F401
from torch.distributed import HashStore

from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Meeting
from autoremat.agreement.session import Session
from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant
from autoremat.torch_private.processes import Job

pytestmark = pytest.mark.usefixtures("quick")


def session(channel: Channel) -> Session:
    return Session(channel, Meeting("test", tuple(range(channel.job.world_size))))


def test_the_leader_makes_one_result_of_all_parts():
    def body(channel):
        rounds = session(channel)
        total = rounds.round("sum", channel.rank + 1, lambda parts: sum(parts.values()))
        told = rounds.round("tell", None, lambda parts: f"rank {channel.rank}")
        return total, told

    assert together(body, 3) == [(6, "rank 0")] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_on_one_rank_is_an_error_on_all(failing):
    def body(channel):
        rounds = session(channel)
        rounds.round("begin", None, lambda parts: None)
        if channel.rank == failing:
            rounds.fail(ValueError("the graph is odd"))
            return None
        return rounds.round("next", None, lambda parts: None)

    found = together(body, 3)
    others = [error for rank, error in enumerate(found) if rank != failing]
    assert all(isinstance(error, AgreementError) and error.rank == failing for error in others)
    assert all(f"failed on rank {failing}" in str(error) and "the graph is odd" in str(error) for error in others)


def test_figures_of_an_infeasible_budget_reach_all_ranks():
    error = BudgetInfeasible(
        budget_bytes=10, minimum_bytes=30, lower_bound_bytes=20, occupants=[Occupant("t", 30)], device="cpu"
    )

    def body(channel):
        def plan(parts):
            raise error

        return session(channel).round("plan", None, plan)

    own, told = together(body, 2)
    assert own is error
    assert isinstance(told, BudgetInfeasible)
    assert told.figures() == error.figures() | {"rank": 0}
    assert "within the budget of rank 0" in str(told)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_does_not_answer_ends_the_round_on_the_others(lost, monkeypatch):
    monkeypatch.setattr(Channel, "within", lambda channel, seconds: 1.0)

    def body(channel):
        return "gone" if channel.rank == lost else session(channel).round("begin", None, lambda parts: None)

    found = together(body, 3)
    assert found[lost] == "gone"
    errors = [error for rank, error in enumerate(found) if rank != lost]
    assert all(isinstance(error, AgreementError) and error.rank == lost for error in errors), errors
    assert all(f"rank {lost} has not answered" in str(error) for error in errors)


def test_an_error_ends_the_session_although_the_store_has_gone():
    """Who asks again whether all have compiled would otherwise compile for ever."""

    class Gone(HashStore):
        def set(self, key, value):
            raise RuntimeError("connection closed")

    rounds = session(Channel(Job(1, 2, Gone())))
    with pytest.raises(AgreementError, match="connection closed"):
        rounds.round("graph", None, lambda parts: None)
    assert rounds.failed


def test_ranks_at_different_rounds_are_told_so():
    def body(channel):
        return session(channel).round("plan" if channel.rank else "verdict", None, lambda parts: None)

    found = together(body, 2)
    assert all("rank 1 is at 'plan'" in str(error) and "rank 0 is at 'verdict'" in str(error) for error in found)


def test_a_round_leaves_no_data_of_earlier_ones():
    stores = []

    def body(channel):
        rounds = session(channel)
        for _ in range(2):
            rounds.round("plan", "x" * 1000, lambda parts: parts[1])
        stores.append(channel)

    together(body, 2)
    assert not any(map(stores[0].has, ("test/1/result/0", "test/1/1", "test/2/1")))
    assert stores[0].has("test/2/result/0"), "a member may still read the last result"
