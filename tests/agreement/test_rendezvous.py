"""Meetings of several ranks: each rank is a thread, and the store is in memory."""

from __future__ import annotations

import random
import threading
import time

import pytest
from rank_threads import LONG, quick, together  # noqa: F401
from torch.distributed import HashStore

from autoremat.agreement import joining
from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Rendezvous
from autoremat.basics.errors import OptionWarning
from autoremat.torch_private.processes import Job

pytestmark = pytest.mark.usefixtures("quick")


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
