"""Meetings and rounds of several ranks: each rank is a thread, and the store is in memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoremat.agreement import channel as channels
from autoremat.agreement import presence as presences
from autoremat.agreement import rendezvous as meetings
from autoremat.agreement.channel import Channel
from autoremat.agreement.presence import Presence
from autoremat.agreement.rendezvous import Meeting, Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant
from autoremat.torch_private.processes import Job

LONG = 60.0
"""Seconds after which a rank that has not come back hangs."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ranks beat, fall silent and lose patience within tenths of a second."""
    monkeypatch.setattr(presences, "BEAT", 0.05)
    monkeypatch.setattr(presences, "LOOK", 0.05)
    monkeypatch.setattr(channels, "SILENCE", 1.0)
    monkeypatch.setattr(meetings, "RECOMPILATION", 0.3)
    monkeypatch.setattr(meetings, "ALONE", 0.3)
    monkeypatch.setattr(meetings, "NOTICE", 0.1)


def together(body: Callable[[Channel], Any], ranks: int) -> list[Any]:
    """The result, or the error, of ``body`` on each rank."""
    store, found = HashStore(), [None] * ranks

    def run(rank: int) -> None:
        channel = Channel(Job(rank, ranks, store))
        presence = Presence(channel)
        try:
            found[rank] = body(channel)
        except BaseException as error:
            found[rank] = error
        finally:
            presence.stop()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


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


def test_stages_of_pipelines_meet_by_themselves():
    """Ranks 0 and 2 are one pipeline, 1 and 3 the other; the second stages come only once the first ones are through."""
    through = [threading.Event(), threading.Event()]

    def body(channel):
        stage, pipeline = divmod(channel.rank, 2)
        if stage:
            assert through[pipeline].wait(LONG)
        met = Rendezvous(channel).meet(f"stage {stage}", range(4), elsewhere=[(channel.rank + 2) % 4])
        through[pipeline].set()
        return met.members

    assert together(body, 4) == [(0, 1), (0, 1), (2, 3), (2, 3)]


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


def test_a_rank_that_never_came_is_waited_for_briefly_until_it_comes(monkeypatch):
    monkeypatch.setattr(meetings, "PATIENCE", 0.3)
    monkeypatch.setattr(meetings, "BRIEFLY", 0.1)
    alone = threading.Event()

    def body(channel):
        rendezvous, seconds = Rendezvous(channel), []
        if channel.rank:
            assert alone.wait(LONG)
            return rendezvous.meet("c", range(2)).members
        for place in "ab":
            begin = time.monotonic()
            rendezvous.meet(place, range(2))
            seconds.append(time.monotonic() - begin)
        lost = set(rendezvous.lost)
        monkeypatch.setattr(meetings, "BRIEFLY", LONG)
        alone.set()
        return rendezvous.meet("c", range(2)).members, seconds[1] < seconds[0], lost, rendezvous.lost

    first, second = together(body, 2)
    assert first == ((0, 1), True, {1}, set())
    assert second == (0, 1)


def test_only_the_ranks_that_are_named_are_expected():
    def body(channel):
        return None if channel.rank == 2 else Rendezvous(channel).meet("here", (0, 1)).members

    assert together(body, 3) == [(0, 1), (0, 1), None]


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


# -- rounds ------------------------------------------------------------------------------------------------------------


def session(channel: Channel) -> Session:
    return Session(channel, Meeting("test", tuple(range(channel.job.world_size))))


def test_the_leader_makes_one_result_of_all_parts():
    def body(channel):
        rounds = session(channel)
        total = rounds.round("sum", channel.rank + 1, lambda parts: sum(parts.values()))
        told = rounds.from_leader("tell", lambda: f"rank {channel.rank}")
        rounds.close()
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
        def plan():
            raise error

        return session(channel).from_leader("plan", plan)

    own, told = together(body, 2)
    assert own is error
    assert isinstance(told, BudgetInfeasible)
    assert told.figures() == error.figures() | {"rank": 0}
    assert "within the budget of rank 0" in str(told)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_falls_silent_ends_the_round_on_the_others(lost):
    def body(channel):
        return "gone" if channel.rank == lost else session(channel).round("begin", None, lambda parts: None)

    found = together(body, 3)
    assert found[lost] == "gone"
    errors = [error for rank, error in enumerate(found) if rank != lost]
    assert all(isinstance(error, AgreementError) and error.rank == lost for error in errors), errors
    assert all(f"rank {lost} has not answered" in str(error) for error in errors)


def test_ranks_of_different_graphs_split():
    def body(channel):
        part = session(channel).split("graph", "even" if channel.rank % 2 == 0 else "odd")
        value = part.round("sum", channel.rank, lambda parts: sum(parts.values()))
        part.close()
        return part.members, value

    assert together(body, 4) == [((0, 2), 2), ((1, 3), 4), ((0, 2), 2), ((1, 3), 4)]


def test_ranks_at_different_rounds_are_told_so():
    def body(channel):
        return session(channel).round("plan" if channel.rank else "verdict", None, lambda parts: None)

    found = together(body, 2)
    assert all("rank 1 is at 'plan'" in str(error) and "rank 0 is at 'verdict'" in str(error) for error in found)


def test_a_closed_session_leaves_no_data_of_its_rounds():
    stores = []

    def body(channel):
        rounds = session(channel)
        rounds.from_leader("plan", lambda: "x" * 1000)
        stores.append(channel)
        rounds.close()

    together(body, 2)
    assert not stores[0].has("test/1/result")
    assert stores[0].has("test/2/result"), "a member may still read the end of the session"


def test_a_store_that_has_gone_is_an_agreement_error():
    class Gone(HashStore):
        def check(self, keys):
            raise RuntimeError("connection closed")

    with pytest.raises(AgreementError, match="connection closed"):
        Channel(Job(0, 2, Gone())).has("key")
