"""Meetings and rounds of several ranks: each rank is a thread, and the store is in memory."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoremat.agreement import channel as channels
from autoremat.agreement import joining
from autoremat.agreement import presence as presences
from autoremat.agreement import rendezvous as meetings
from autoremat.agreement.channel import Channel
from autoremat.agreement.local_process import LocalProcess, State
from autoremat.agreement.presence import Presence, Pulse
from autoremat.agreement.rendezvous import Meeting, Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant, OptionWarning
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


def test_a_graph_without_communication_is_compiled_again_alone_and_then_nobody_waits(monkeypatch):
    done = threading.Event()

    def body(channel):
        rendezvous = Rendezvous(channel)
        for place in "ab":
            rendezvous.meet(place, range(2))
        if channel.rank:
            assert done.wait(LONG)
            return None
        found = [rendezvous.meet("a", range(2), communicates=False)]
        monkeypatch.setattr(meetings, "ALONE", LONG)
        found.append(rendezvous.meet("b", range(2), communicates=False))
        done.set()
        return found

    found, _ = together(body, 2)
    assert [(one.members, one.missing, one.is_needed) for one in found] == [((0,), (1,), False)] * 2


def test_ranks_that_recompile_differently_often_meet_when_they_come_together():
    alone = threading.Event()

    def body(channel):
        rendezvous = Rendezvous(channel)
        rendezvous.meet("a", range(2))
        if channel.rank:
            solitary = [rendezvous.meet("a", range(2), communicates=False).members for _ in range(2)]
            alone.set()
        else:
            solitary = []
            assert alone.wait(LONG)
        meetings.ALONE = LONG
        rendezvous.apart.clear()
        return solitary, rendezvous.meet("a", range(2), communicates=False).members

    assert together(body, 2) == [([], (0, 1)), ([(1,), (1,)], (0, 1))]


def test_a_lost_rank_is_named_but_not_needed_where_a_graph_without_communication_is_compiled_again(caplog):
    met = threading.Barrier(2)

    def body(channel):
        rendezvous = Rendezvous(channel)
        rendezvous.meet("a", range(2))
        if channel.rank:
            Presence(channel).end(MemoryError("nothing left"))
        met.wait(LONG)
        return None if channel.rank else rendezvous.meet("a", range(2), communicates=False).members

    assert together(body, 2) == [(0,), None]
    assert "rank 1 has ended with MemoryError: nothing left. a is compiled again without it" in caplog.text


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no data"), "ended with ValueError: no data"), (KeyboardInterrupt(), "ended with Keyboard")]
)
def test_a_rank_that_ends_before_its_first_compilation_ends_the_others_with_its_reason(error, said):
    def body(channel):
        if channel.rank == 2:
            Presence(channel).end(error)
            return None
        return Rendezvous(channel).meet("here", range(3))

    *others, _ = together(body, 3)
    assert all(isinstance(one, AgreementError) and one.rank == 2 and said in str(one) for one in others), others


def test_a_rank_that_has_ended_in_order_is_not_waited_for():
    def body(channel):
        if channel.rank:
            return Presence(channel).end(None)
        return Rendezvous(channel).meet("here", range(2))

    found, _ = together(body, 2)
    assert (found.members, found.missing) == ((0,), (1,))


def test_a_process_that_is_killed_before_its_first_compilation_ends_the_others():
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, registered = LocalProcess.of(killed.pid), threading.Event()

    def body(channel):
        if channel.rank == 2:
            channel.write("process/2", dataclasses.asdict(process))  # in place of this process
            registered.set()
            killed.kill()
            killed.communicate()
            return None
        assert registered.wait(LONG)
        return Rendezvous(channel).meet("here", range(3))

    *others, _ = together(body, 3)
    assert all(isinstance(one, AgreementError) and one.rank == 2 for one in others), others
    assert all(f"rank 2 is lost: its process {killed.pid} has ended" in str(one) for one in others)


def test_a_rank_that_has_never_registered_is_waited_for_until_half_of_the_timeout(monkeypatch):
    store = HashStore()
    channel = Channel(Job(0, 2, store, timeout=0.6))
    found = Rendezvous(channel).meet("here", range(2))
    assert (found.members, found.missing) == ((0,), (1,))
    assert [channel.within(seconds) for seconds in (0.2, 300.0)] == [0.2, 0.3]
    with pytest.warns(OptionWarning, match="Ranks 1 have not used autoremat in this job"):
        joining._tell_of_missing(found, "here", channel)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_of_a_rank_that_waits_for_others_reaches_them(monkeypatch, interrupted):
    """The interrupted rank lives on, as in a notebook. It is the first to arrive or not, and would have led or not."""
    true = meetings.wait_for

    def wait_for(channel, key, writer):
        if channel.rank == interrupted:
            raise KeyboardInterrupt
        return true(channel, key, writer)

    monkeypatch.setattr(meetings, "wait_for", wait_for)
    through = threading.Barrier(2)

    def body(channel):
        try:
            return Session(channel, Rendezvous(channel).meet("here", range(2))).round("begin", None, lambda parts: None)
        finally:
            through.wait(LONG)

    found = together(body, 2)
    assert isinstance(found[interrupted], KeyboardInterrupt)
    other = found[1 - interrupted]
    assert isinstance(other, AgreementError)
    assert f"failed on rank {interrupted}" in str(other)
    assert "KeyboardInterrupt" in str(other)


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


def test_an_interrupt_of_the_leader_reaches_all():
    def body(channel):
        def plan():
            raise KeyboardInterrupt

        return session(channel).from_leader("plan", plan)

    own, *others = together(body, 3)
    assert isinstance(own, KeyboardInterrupt)
    assert all(str(one).endswith("failed on rank 0, so all ranks that share it stop: KeyboardInterrupt") for one in others)


def test_a_process_that_keeps_the_store_waits_until_the_others_know_its_error():
    def body(channel):
        channel.job = dataclasses.replace(channel.job, keeper=0)
        if channel.rank:
            time.sleep(0.3)
            return session(channel).round("begin", None, lambda parts: None)
        rounds = session(channel)
        rounds.fail(ValueError("odd"))
        return channel.count("test/heard", 0)

    heard, *_ = together(body, 3)
    assert heard == 2


def test_a_rank_that_was_given_up_reads_of_itself():
    def body(channel):
        channel.paused = 41.0 if channel.rank == 0 else 0.0
        rounds = session(channel)
        if channel.rank:
            rounds.fail(AgreementError("rank 0 has not answered for 30 s", 0))
            return None
        return rounds.round("begin", None, lambda parts: None)

    found, _ = together(body, 2)
    assert str(found).startswith("this process, rank 0, stood still for 41 s while a graph was compiled, and rank 1 waits 1 s")
    assert found.rank == 0


def test_failures_of_a_rank_by_itself_are_logged_by_the_others(caplog):
    def body(channel):
        if channel.rank:
            Presence(channel).tell("failed while it compiled here by itself", MemoryError("nothing left"))
        while not [one for one in caplog.records if "nothing left" in one.getMessage()]:
            time.sleep(0.01)

    together(body, 2)
    assert caplog.records[0].getMessage() == "rank 1 failed while it compiled here by itself: MemoryError: nothing left"


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


@pytest.mark.parametrize(
    ("looks", "is_lost"),
    [
        ([0.0, 0.4, 0.8, 1.3], True),
        ([0.0, 0.4, 5.0], False),  # this process itself stood still
    ],
)
def test_only_seconds_in_which_this_process_looked_count_as_silence(monkeypatch, looks, is_lost):
    monkeypatch.setattr(presences, "LOOK", 0.2)
    channel, times = Channel(Job(0, 2, HashStore())), iter([100 + at for at in looks])
    channel.write("process/1", {"machine": "", "pid": 1, "start": ""})
    pulse = Pulse(channel, 1, clock=lambda: next(times))
    found = [pulse.look() for _ in looks]
    assert [one is not None for one in found] == [False] * (len(looks) - 1) + [is_lost]


def test_the_state_of_a_process_of_this_machine():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, found = LocalProcess.of(other.pid), []
    if not process.machine:
        pytest.skip("this system does not tell the state of processes")
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
        os.kill(other.pid, number)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WCONTINUED | os.WEXITED | os.WNOWAIT)
        found.append(process.state())
    other.communicate()
    assert found == [State.STOPPED, State.RUNNING, State.ENDED]
    assert process.state() is State.ENDED
    assert dataclasses.replace(process, machine="another").state() is State.UNKNOWN
    assert LocalProcess.of(os.getpid()).state() is State.RUNNING
    assert dataclasses.replace(LocalProcess.of(os.getpid()), start="earlier").state() is State.ENDED


def test_a_store_that_never_answers_is_an_error_and_later_requests_fail_at_once(monkeypatch):
    monkeypatch.setattr(channels, "SILENCE", 0.1)
    asked = []

    class Stopped(HashStore):
        def check(self, keys):
            asked.append(keys)
            time.sleep(LONG)

    channel = Channel(Job(1, 2, Stopped(), keeper=0))
    for _ in range(2):
        with pytest.raises(AgreementError, match="rank 0 has ended, is stopped or cannot be reached") as caught:
            channel.has("key")
        assert caught.value.rank == 0
    assert len(asked) == 1


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
