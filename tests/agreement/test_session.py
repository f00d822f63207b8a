"""Rounds and meetings of several ranks, and interrupts of them: each rank is a thread, and the store is in memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import HashStore

from autoremat.agreement import joining
from autoremat.agreement import rendezvous as meetings
from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Meeting, Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant, OptionWarning
from autoremat.torch_private.processes import Job

LONG = 60.0
"""Seconds after which a rank that has not come back hangs."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ranks lose patience within tenths of a second."""
    monkeypatch.setattr(meetings, "RECOMPILATION", 0.3)
    monkeypatch.setattr(meetings, "NOTICE", 0.1)


def together(body: Callable[[Channel], Any], ranks: int) -> list[Any]:
    """The result, or the error, of ``body`` on each rank."""
    store, found = HashStore(), [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = body(Channel(Job(rank, ranks, store)))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


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


def test_ranks_at_one_place_meet_whenever_they_come():
    def body(channel):
        time.sleep(0.2 * channel.rank)
        return Rendezvous(channel).meet("here", range(3))

    first, *others = together(body, 3)
    assert first.members == (0, 1, 2)
    assert first.missing == ()
    assert others == [first, first]


def test_a_place_is_met_again_at_each_occurrence():
    def body(channel):
        rendezvous = Rendezvous(channel)
        return [rendezvous.meet("here", range(2)).name for _ in range(3)]

    first, second = together(body, 2)
    assert first == second
    assert len(set(first)) == 3


def test_ranks_that_compile_two_places_in_opposite_order_do_not_wait_for_each_other():
    def body(channel):
        rendezvous = Rendezvous(channel)
        return {place: rendezvous.meet(place, range(2)).members for place in ("ab" if channel.rank else "ba")}

    first, second = together(body, 2)
    for place in "ab":  # the rank that gives a place up first may still meet the other at the second place
        assert {first[place], second[place]} in ({(0,), (1,)}, {(0, 1)})
    assert first["a"] != (0, 1) or first["b"] != (0, 1)


def test_a_rank_that_recompiles_alone_goes_on_after_a_while_and_at_once_the_next_time(caplog):
    done = threading.Event()

    def body(channel):
        rendezvous = Rendezvous(channel)
        rendezvous.meet("here", range(2))
        if channel.rank:
            assert done.wait(LONG)
            return None
        found, begin = [rendezvous.meet("here", range(2))], time.monotonic()
        found.append(rendezvous.meet("here", range(2)))
        done.set()
        return found, time.monotonic() - begin

    (found, _), _ = together(body, 2)
    assert [(one.members, one.missing) for one in found] == [((0,), (1,))] * 2
    assert [record.getMessage() for record in caplog.records if "waits for rank 1 to compile here" in record.getMessage()]
    assert len(caplog.records) == 1, "the second recompilation does not wait"


def test_a_rank_that_never_comes_is_waited_for_until_half_of_the_timeout():
    channel = Channel(Job(0, 2, HashStore(), timeout=0.6))
    found = Rendezvous(channel).meet("here", range(2))
    assert (found.members, found.missing) == ((0,), (1,))
    assert [channel.within(seconds) for seconds in (0.2, 300.0)] == [0.2, 0.3]
    with pytest.warns(OptionWarning, match="ranks 1 did not come to compile here"):
        joining._tell_of_missing(found, "here")


@pytest.mark.parametrize("seed", range(50))
def test_random_arrivals_never_hang_and_members_agree(seed):
    """Ranks run a common sequence of places, in which some ranks exchange two neighbours or leave one out at the end."""
    draw = random.Random(seed)
    ranks, places = draw.randint(2, 4), [draw.choice("abc") for _ in range(draw.randint(1, 5))]
    sequences = []
    for _ in range(ranks):
        own = list(places)
        if len(own) > 1 and draw.random() < 0.3:
            at = draw.randrange(len(own) - 1)
            own[at], own[at + 1] = own[at + 1], own[at]
        sequences.append(own)
    delays = [[draw.choice([0, 0, 0.003]) for _ in places] for _ in range(ranks)]

    def body(channel):
        rendezvous, found = Rendezvous(channel), []
        for place, delay in zip(sequences[channel.rank], delays[channel.rank], strict=True):
            time.sleep(delay)
            found.append(rendezvous.meet(place, range(ranks)))
        return found

    by_rank = together(body, ranks)
    assert not [one for one in by_rank if isinstance(one, Exception)]
    named = {one.name: one.members for found in by_rank for one in found}
    for rank, found in enumerate(by_rank):
        assert all(rank in one.members and named[one.name] == one.members for one in found)
    if all(own == places for own in sequences):
        assert {one.members for found in by_rank for one in found} == {tuple(range(ranks))}


ROUNDS = ("options", "graph", "end")


@dataclass
class Interrupts:
    """Interrupts a rank once, before or after one of its requests to the store."""

    request: int
    comes_before: bool
    thread: int | None = None
    """The identity of the rank's thread, from which on its requests count."""
    requests: int = 0

    def ask(self, request: Any) -> Any:
        if threading.get_ident() != self.thread:
            return request()
        self.requests += 1
        if self.requests == self.request and self.comes_before:
            raise KeyboardInterrupt
        answer = request()
        if self.requests == self.request:
            raise KeyboardInterrupt
        return answer


def compile_together(channel: Channel, rendezvous: Rendezvous) -> list[Any]:
    meeting = rendezvous.meet("here", range(channel.job.world_size))
    session = Session(channel, meeting)
    return [session.round(topic, channel.rank, lambda parts: sorted(parts)) for topic in ROUNDS if len(meeting.members) > 1]


@pytest.mark.parametrize("seed", range(64))
def test_an_interrupt_at_any_request_reaches_all_who_wait(seed, monkeypatch):
    draw = random.Random(seed)
    ranks = draw.randint(2, 3)
    interrupted, again = draw.randrange(ranks), draw.random() < 0.4
    delays = [draw.choice([0.0, 0.0, 0.02, 0.1]) for _ in range(ranks)]
    interrupts = Interrupts(draw.randint(1, 24), draw.random() < 0.5)
    true = Channel._ask
    monkeypatch.setattr(Channel, "_ask", lambda channel, *request: interrupts.ask(lambda: true(channel, *request)))
    monkeypatch.setattr(meetings, "RECOMPILATION", LONG)  # a rank that is told of an interrupt may linger
    through = threading.Barrier(ranks)
    at_once = draw.random() < 0.5

    def body(channel):
        rendezvous = Rendezvous(channel)
        if again:
            assert compile_together(channel, rendezvous) == [list(range(ranks))] * len(ROUNDS)
        if channel.rank == interrupted:
            interrupts.thread = threading.get_ident()
        time.sleep(delays[channel.rank])
        try:
            found = compile_together(channel, rendezvous)
        except (KeyboardInterrupt, AgreementError) as error:
            found = error
        interrupts.thread = None
        if not at_once:
            through.wait(LONG / 2)
        return found, compile_together(channel, rendezvous)

    for rank, (first, second) in enumerate(together(body, ranks)):
        if rank == interrupted and interrupts.requests >= interrupts.request:
            assert isinstance(first, KeyboardInterrupt)
        else:
            assert isinstance(first, AgreementError | list)
        assert second == [list(range(ranks))] * len(ROUNDS)
