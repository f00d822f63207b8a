"""What a person at a terminal sees of slow planning."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from autoremat.progress import said_if_slow


def terminal(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=80)


@pytest.mark.parametrize(("is_terminal", "patience", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_only_who_waits_at_a_terminal_is_told(is_terminal, patience, shown):
    console = terminal(is_terminal)
    with said_if_slow("planning 7 ops", console, patience):
        limit = time.monotonic() + 10.0
        while shown and "planning 7 ops" not in console.file.getvalue() and time.monotonic() < limit:
            time.sleep(0.01)
    assert ("planning 7 ops" in console.file.getvalue()) == shown


def test_an_error_ends_the_message_and_passes_through():
    with pytest.raises(KeyError), said_if_slow("planning", terminal(True), 0.0):
        raise KeyError
