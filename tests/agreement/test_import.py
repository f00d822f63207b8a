"""Neither the import nor a step in a distributed job starts a thread or replaces a hook of the interpreter."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from processes import run_ranks, values
from rank_step import EAGER, step


def imported_and_used(rank: int) -> list[bool]:
    """Whether threads and the hook for errors are as before, after the import and after a step."""

    def present() -> tuple[object, set[str]]:
        return sys.excepthook, {one.name for one in threading.enumerate() if one.name.startswith("autoremat")}

    before = present()
    torch._dynamo.lookup_backend("autoremat")
    imported = present()
    step(EAGER | {"memory_budget": 10**9, "progress": False})
    return [imported == before, present() == before]


@pytest.mark.slow  # each rank is a process
def test_neither_import_nor_step_starts_a_thread_or_replaces_a_hook():
    assert values(run_ranks(imported_and_used, 2)) == [[True, True]] * 2
