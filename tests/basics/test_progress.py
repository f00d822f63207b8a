"""What people are told who wait: at a terminal and in a log; and that others are not."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch
from requests_of_options import key_of
from rich.console import Console
from torch import nn

import autoremat
from autoremat.basics import progress
from autoremat.basics.progress import now, status_if_slow
from autoremat.options.options import PROGRESS_VARIABLE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def told(monkeypatch) -> io.StringIO:
    """A log to which each stage is written at once."""
    file = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=file))
    monkeypatch.setattr(progress, "LOG_INTERVAL_SECONDS", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    return file


def test_a_terminal_has_a_line_that_goes_away(monkeypatch):
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with status_if_slow("planning 7 ops", waited=70.0):
        now("measuring")
        limit = time.monotonic() + 10.0
        while "measuring" not in file.getvalue():
            assert time.monotonic() < limit
            time.sleep(0.01)
    assert "planning 7 ops for 70 s: measuring" in file.getvalue()
    assert file.getvalue().rstrip("\x1b[?25h").endswith("\x1b[2K"), "the last thing that is done is to erase the line"


def test_what_is_soon_over_says_nothing(monkeypatch):
    for file in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", file)
        with status_if_slow("planning 7 ops"):
            now("tracing")
        assert not file.getvalue()


def test_a_log_has_lines_that_name_stages_and_what_is_inside(told):
    with status_if_slow("looking"):
        with status_if_slow("trying 58"):
            now("planning 7 ops")
        now("comparing")
    now("outside")
    assert [line.rstrip() for line in told.getvalue().splitlines()] == [
        "autoremat: looking; trying 58 for 0 s: planning 7 ops", "autoremat: looking for 0 s: comparing",
    ]  # fmt: skip


def test_silence_inside_around_and_in_other_ranks(told, monkeypatch):
    with status_if_slow("around"), status_if_slow("inside", shown=False):
        now("hushed")
    with status_if_slow("never", shown=False), status_if_slow("never either"):
        now("hushed")
    monkeypatch.setenv("RANK", "3")
    with status_if_slow("compiling"):
        now("hushed")
    assert not told.getvalue()


def test_an_error_ends_it_and_passes_through(told):
    with pytest.raises(KeyError), status_if_slow("planning"):
        raise KeyError
    now("outside")
    assert not told.getvalue()
    assert not progress._voice.locked()


def test_a_compilation_says_what_it_does(monkeypatch, told):
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    step = torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options={"compiler": "aot_eager"})
    step(torch.randn(64, 8)).backward()
    for stage in ("tracing", "reading the joint graph", "planning", "writing forward and backward"):
        assert f": {stage}" in told.getvalue()


def test_silence_is_an_option_that_no_plan_depends_on(monkeypatch, told):
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    assert autoremat.Options.parse().progress
    assert not autoremat.Options.parse({"progress": False}).progress
    assert key_of(autoremat.Options(progress=False)) == key_of(autoremat.Options())
    model = nn.Linear(8, 1)
    autoremat.explain(model, torch.randn(4, 8), options={"compiler": "aot_eager", "progress": False})
    assert not told.getvalue()
    autoremat.explain(model, torch.randn(4, 8), options={"compiler": "aot_eager"})
    assert "explaining" in told.getvalue()
    monkeypatch.setenv(PROGRESS_VARIABLE, "loud")
    with pytest.raises(autoremat.OptionsError, match="AUTOREMAT_PROGRESS='loud'"):
        autoremat.Options.parse()
