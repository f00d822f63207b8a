"""Importing the backend in a distributed job starts nothing. The first compilation does."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from processes import run_ranks, values
from rank_step import EAGER, step

from autoremat.agreement import joining

BEATS = "autoremat-heartbeat"


def imported_and_used(rank: int) -> tuple[list[bool], list[bool]]:
    """Whether a thread sends heartbeats and whether the hook for errors is ours, after the import and after a step."""

    def present() -> list[bool]:
        is_ours = getattr(sys.excepthook, "func", None) is joining._show
        return [any(one.name == BEATS for one in threading.enumerate()), is_ours]

    torch._dynamo.lookup_backend("autoremat")
    before = present()
    step(EAGER | {"memory_budget": 10**9})
    return before, present()


@pytest.mark.slow  # each rank is a process
def test_the_import_starts_no_heartbeat_and_replaces_no_hook():
    assert values(run_ranks(imported_and_used, 2)) == [([False, False], [True, True])] * 2
