"""Rounds of several ranks, and what each knows of the others: each rank is a thread."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from rank_threads import LONG, impatient, quick, together  # noqa: F401
from torch.distributed import HashStore

from autoremat.agreement import channel as channels
from autoremat.agreement import presence as presences
from autoremat.agreement import session as sessions
from autoremat.agreement.channel import Channel
from autoremat.agreement.local_process import LocalProcess, State
from autoremat.agreement.presence import Presence, Pulse
from autoremat.agreement.rendezvous import Meeting
from autoremat.agreement.session import Session, grouped
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


def test_an_interrupt_of_the_leader_reaches_all():
    def body(channel):
        def plan(parts):
            raise KeyboardInterrupt

        return session(channel).round("plan", None, plan)

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


@pytest.mark.usefixtures("impatient")
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
        def plan(parts):
            raise error

        return session(channel).round("plan", None, plan)

    own, told = together(body, 2)
    assert own is error
    assert isinstance(told, BudgetInfeasible)
    assert told.figures() == error.figures() | {"rank": 0}
    assert "within the budget of rank 0" in str(told)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_falls_silent_ends_the_round_on_the_others(lost):
    def body(channel):
        return "gone" if channel.rank == lost else session(channel).round("begin", None, lambda parts: None)

    found = together(body, 3)
    assert found[lost] == "gone"
    errors = [error for rank, error in enumerate(found) if rank != lost]
    assert all(isinstance(error, AgreementError) and error.rank == lost for error in errors), errors
    assert all(f"rank {lost} has not answered" in str(error) for error in errors)


@pytest.mark.usefixtures("impatient")
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


def test_parts_are_grouped_by_a_value():
    parts = {rank: {"graph": "odd" if rank % 2 else "even", "rank": rank} for rank in range(4)}
    found = grouped(parts, "graph")
    assert {graph: [*alike] for graph, alike in found.items()} == {"even": [0, 2], "odd": [1, 3]}
    assert found["odd"][3] is parts[3]


def test_a_rank_that_gives_up_in_the_last_round_ends_it_on_the_leader(monkeypatch):
    true, gave_up = sessions.wait_for, threading.Event()

    def wait_for(channel, key, writer):
        if channel.rank:
            raise AgreementError("rank 0 has not answered for 30 s", 0)
        return true(channel, key, writer)

    monkeypatch.setattr(sessions, "wait_for", wait_for)

    def body(channel):
        if channel.rank == 0:
            assert gave_up.wait(LONG)
        try:
            return session(channel).round("end", None, lambda parts: None)
        finally:
            gave_up.set()

    leading, other = together(body, 2)
    assert str(other) == "rank 0 has not answered for 30 s"
    assert str(leading).startswith("this process, rank 0, stood still")


def test_nothing_is_exchanged_after_an_error():
    def body(channel):
        rounds = session(channel)
        rounds.fail(ValueError("odd"))
        return rounds.round("next", None, lambda parts: None)

    assert all(isinstance(one, AgreementError) for one in together(body, 2))


def test_an_error_ends_the_session_although_the_store_has_gone():
    """Who asks again whether all have compiled would otherwise compile for ever."""

    class Gone(HashStore):
        def set(self, key, value):
            raise RuntimeError("connection closed")

    rounds = session(Channel(Job(1, 2, Gone())))
    with pytest.raises(AgreementError, match="connection closed"):
        rounds.round("graph", None, lambda parts: None)
    assert rounds.failed


def test_ranks_that_fail_by_themselves_do_not_wait_for_each_other():
    def body(channel):
        channel.job = dataclasses.replace(channel.job, keeper=0)
        session(channel).fail(ValueError("odd"))
        return channel.count("test/heard", 0)

    assert together(body, 3)[0] == 2


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


def test_a_store_that_has_gone_is_an_agreement_error():
    class Gone(HashStore):
        def check(self, keys):
            raise RuntimeError("connection closed")

    with pytest.raises(AgreementError, match="connection closed"):
        Channel(Job(0, 2, Gone())).has("key")
