"""What people are told who wait: at a terminal, in a notebook, in a log; and that others are not."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch
from requests_of_options import key_of
from rich.console import Console
from torch import nn

import autoremat
from autoremat.basics import progress
from autoremat.basics.progress import (
    LOG_INTERVAL_SECONDS,
    LOG_PATIENCE_SECONDS,
    Log,
    Notebook,
    Tally,
    carried,
    now,
    quiet,
    status_if_slow,
)
from autoremat.compiler import joint_graph, plan_report
from autoremat.options.options import PROGRESS_VARIABLE
from autoremat.tools import trace
from autoremat.torch_private import compile_progress


@pytest.fixture
def told(monkeypatch) -> io.StringIO:
    """A log that is written to at once and often."""
    file = io.StringIO()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=file, stdout=sys.stdout, modules=sys.modules))
    monkeypatch.setattr(Log, "patience", 0.0)
    monkeypatch.setattr(Log, "interval", 0.001)
    monkeypatch.delenv("RANK", raising=False)
    return file


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < limit, "nobody said so"
        time.sleep(0.002)


def until_said(file: io.StringIO, text: str) -> None:
    wait_for(lambda: text in file.getvalue())


def test_a_terminal_has_a_line_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with status_if_slow("planning 7 ops", console, 0.0):
        until_said(console.file, "planning 7 ops for 0 s")
    assert console.file.getvalue().endswith("\x1b[2K"), "the last thing that is done is to erase the line"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_soon_over_says_nothing(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with status_if_slow("planning 7 ops", console, 60.0):
        pass
    assert not console.file.getvalue()


def test_a_log_has_lines_that_say_what_is_done_and_how_much(told):
    with status_if_slow("compiling"):
        until_said(told, "autoremat: compiling for 0 s\n")
        tally = Tally(40)
        now("compiling kernels", tally.count)
        until_said(told, "for 0 s: compiling kernels, 0 of 40\n")
        tally.done = 12
        until_said(told, "compiling kernels, 12 of 40\n")
        now("tracing, ops", Tally(done=1234).count, attempt=2)
        until_said(told, "for 0 s, attempt 2: tracing, ops: 1,234 so far\n")
        now("tracing", attempt=2)
        until_said(told, "for 0 s, attempt 2: tracing\n")
    assert re.fullmatch(r"autoremat: done, compiling took \d s", told.getvalue().splitlines()[-1])
    assert LOG_PATIENCE_SECONDS < LOG_INTERVAL_SECONDS < 10, "no silence of ten seconds"


def test_an_explanation_names_its_stages_and_counts_traced_ops(monkeypatch):
    said, counts = [], {}

    def note(doing, count=None, attempt=None):
        said.append(doing)
        counts[doing] = count

    for module in (trace, compile_progress, joint_graph, plan_report):
        monkeypatch.setattr(module, "now", note)
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    autoremat.explain(
        lambda x: model(x).sum(), inputs, options={"memory_budget": 1.0, "cost_model": "roofline"}, device="A100-40GB"
    )
    stages = [
        "tracing the step",
        "tracing forward and backward",
        "reading",
        "capturing",
        "pricing",
        "planning",
        "planning",
        "planning",
        "describing",
        "following",
    ]
    assert [text.startswith(stage) for text, stage in zip(said, stages, strict=True)] == [True] * len(stages)
    (of_dynamo, _), (of_backward, _) = (counts[text]() for text in said[:2])
    assert of_dynamo > 3 < of_backward


def test_what_was_waited_before_counts(told, monkeypatch):
    monkeypatch.setattr(Log, "patience", 60.0)
    with status_if_slow("compiling", waited=70.0):
        until_said(told, "autoremat: compiling for 70 s\n")


def test_how_long_the_rest_takes_follows_from_how_long_the_first_took(told, monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(progress, "time", clock)
    with status_if_slow("compiling"):
        now("kernels", lambda: (10, 40))
        clock.monotonic = lambda: 110.0
        until_said(told, "for 10 s: kernels, 10 of 40, about 30 s left\n")


def test_what_is_inside_is_added_and_forgotten(told):
    with status_if_slow("looking"):
        with status_if_slow("trying 58"):
            now("planning 7 ops")
            until_said(told, "autoremat: looking for 0 s; trying 58 for 0 s: planning 7 ops\n")
        now("comparing")
        until_said(told, "autoremat: looking for 0 s: comparing\n")


def test_quiet_inside_and_around(told):
    with status_if_slow("around"):
        until_said(told, "around")
        with quiet(), status_if_slow("inside"):
            now("hushed")
            already = told.getvalue().count("\n")
            wait_for(lambda: told.getvalue().count("\n") > already + 1)
    with status_if_slow("never", shown=False), status_if_slow("never either", patience=0.0):
        time.sleep(0.02)
    now("outside")
    assert not re.search("inside|hushed|never|outside", told.getvalue())


def test_a_thread_that_works_for_another_speaks_for_it(told):
    with status_if_slow("calibrating"):
        worker = threading.Thread(target=carried(lambda: now("measuring")))
        worker.start()
        worker.join()
        until_said(told, "calibrating for 0 s: measuring\n")


def test_one_thread_speaks_at_a_time(told):
    over = threading.Event()

    def other() -> None:
        with status_if_slow("second"):
            over.wait(10.0)

    with status_if_slow("first"):
        until_said(told, "first")
        thread = threading.Thread(target=other)
        thread.start()
        already = told.getvalue().count("\n")
        wait_for(lambda: told.getvalue().count("\n") > already + 5)
        assert "second" not in told.getvalue()
    until_said(told, "second")  # its turn has come
    over.set()
    thread.join()
    assert progress._voice.acquire(blocking=False)
    progress._voice.release()


def test_only_the_first_rank_of_a_job_speaks(told, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with status_if_slow("compiling"):
        time.sleep(0.02)
    assert not told.getvalue()


def test_a_notebook_has_one_line_that_is_written_over(monkeypatch, told):
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(Notebook, "patience", 0.0)
    monkeypatch.setattr(Notebook, "interval", 0.001)
    with status_if_slow("compiling"):
        until_said(told, "\rautoremat: compiling for 0 s")
        assert "\n" not in told.getvalue()
    assert told.getvalue().endswith("s\n")
    shell.kernel = None  # IPython at a terminal
    assert not progress.in_notebook()


def test_an_error_ends_it_and_passes_through(told):
    with pytest.raises(KeyError), status_if_slow("planning"):
        raise KeyError
    assert progress._here.levels is None


def test_an_output_that_is_closed_ends_it(told):
    with status_if_slow("planning"):
        until_said(told, "planning")
        told.close()


STAGES = ("tracing", "reading the joint graph", "planning", "writing forward and backward")
INDUCTOR = ("lowering the forward", "generating code of the backward", "compiling kernels of the backward")


def noted_from_now_on(monkeypatch) -> list[str]:
    """A list to which all steps are added that are noted."""
    noted: list[str] = []
    teller = progress._Level.__setattr__

    def note(level: progress._Level, name: str, value: object) -> None:
        if name == "doing":
            noted.append(str(value))
        teller(level, name, value)

    monkeypatch.setattr(progress._Level, "__setattr__", note)
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    return noted


def said_of(monkeypatch, inner: str) -> list[str]:
    """All that is noted while a step is compiled."""
    noted = noted_from_now_on(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    step = torch.compile(
        lambda x: model(x).square().mean(), backend="autoremat", options={"compiler": inner, "memory_budget": "1MiB"}
    )
    step(torch.randn(64, 8)).backward()
    return noted


def test_a_compilation_says_what_it_does(monkeypatch):
    noted = said_of(monkeypatch, "aot_eager")
    assert not [stage for stage in STAGES if not any(text.startswith(stage) for text in noted)]


@pytest.mark.slow
def test_a_compilation_under_inductor_says_what_it_does(monkeypatch):
    noted = said_of(monkeypatch, "inductor")
    assert not [stage for stage in (*STAGES, *INDUCTOR) if not any(text.startswith(stage) for text in noted)]


@pytest.mark.slow
def test_a_dry_run_does_not_stay_at_kernels_that_it_leaves_out(monkeypatch):
    noted = noted_from_now_on(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    autoremat.explain(lambda x: model(x).square().mean(), torch.randn(64, 8), lower=True)
    kernels = [number for number, text in enumerate(noted) if text.startswith("compiling kernels")]
    assert len(kernels) == 2
    assert all(noted[number + 1] == "generating code" for number in kernels)


def test_silence_is_an_option_that_no_plan_depends_on(monkeypatch, told):
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    assert autoremat.Options.parse().progress
    assert not autoremat.Options.parse({"progress": False}).progress
    assert key_of(autoremat.Options(progress=False)) == key_of(autoremat.Options())
    model = nn.Linear(8, 1)
    autoremat.explain(model, torch.randn(4, 8), options={"compiler": "aot_eager"})
    assert "explaining" in told.getvalue()
    told.truncate(0)
    autoremat.explain(model, torch.randn(4, 8), options={"compiler": "aot_eager", "progress": False})
    assert not told.getvalue()
    monkeypatch.setenv(PROGRESS_VARIABLE, "loud")
    with pytest.raises(autoremat.OptionsError, match="AUTOREMAT_PROGRESS='loud' is not accepted.*1 or 0"):
        autoremat.Options.parse()
