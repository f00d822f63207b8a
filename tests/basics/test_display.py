"""What results look like at a prompt, in ``print`` and in a notebook, what is said to people who wait, and units."""

import html
import io
import re
import sys
import time

import pytest
import rich.console
import torch
from hypothesis import given
from hypothesis import strategies as st
from requests_of_options import key_of
from rich.console import Console
from torch import nn

import autoremat
from autoremat.basics import environment, progress
from autoremat.basics.display import PlainTable
from autoremat.basics.progress import now, status_if_slow
from autoremat.basics.units import bytes_apart, format_bytes, format_seconds, parse_bytes

OPTIONS = {"compiler": "aot_eager"}
ODD = "[red]<b>&\x1b[31m"


@pytest.fixture(scope="module")
def shown() -> dict[str, object]:
    """One of each that users get."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))), torch.randn(128, 32)
    model.add_module(ODD.replace(".", ""), nn.Linear(32, 32))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    report = autoremat.explain(loss, x, options={**OPTIONS, "memory_budget": 0.8})
    return {
        "Report": report,
        "Plan": report.plan,
        "ReportDiff": report.diff(autoremat.explain(loss, x, options=OPTIONS)),
        "StepProfile": autoremat.profile_step(loss, x, memory_budget=0.8, options=OPTIONS),
        "Pareto": autoremat.pareto(loss, x, points=3, torch_budgets=(), options=OPTIONS),
        "Fit": autoremat.max_batch(lambda size: torch.randn(size, 32), loss, "300KiB", device="T4", options=OPTIONS),
    }


KINDS = ("Report", "Plan", "ReportDiff", "StepProfile", "Pareto", "Fit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_shows_a_line_and_rich_and_a_notebook_show_what_print_shows(shown, kind):
    text = repr(shown[kind])
    assert text.startswith(f"<{kind}: ")
    assert len(text) < 240
    assert "\n" not in text
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(shown[kind])
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert printed == str(shown[kind]).splitlines()
    assert (4 if kind == "Fit" else 3) <= len(printed) < 60  # a fit has a row for its note on the card
    found = shown[kind]._repr_html_()
    assert (found[:5], found[-6:], "<" in found[5:-6]) == ("<pre>", "</pre>", False)
    assert html.unescape(found[5:-6]) == str(shown[kind])


def test_texts_are_no_markup_wherever_they_come_from():
    table = PlainTable(ODD, ("what",), numbers=0)
    table.add_row(ODD)
    assert str(table).count("[red]<b>&\\x1b[31m") == 2


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
    with status_if_slow("planning 7 ops"):
        now("measuring")
        limit = time.monotonic() + 10.0
        while "measuring" not in file.getvalue():
            assert time.monotonic() < limit
            time.sleep(0.01)
    assert " s: measuring, planning 7 ops" in file.getvalue()
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
    with status_if_slow("looking for a size" * 4), status_if_slow("trying 58"):
        now("planning 7 ops")  # the widest part has no room
    assert [line.rstrip() for line in told.getvalue().splitlines()] == [
        "autoremat 0 s: planning 7 ops, trying 58, looking", "autoremat 0 s: comparing, looking",
        "autoremat 0 s: planning 7 ops, trying 58",
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
    monkeypatch.setenv(environment.PROGRESS, "1")
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    step = torch.compile(lambda x: model(x).square().mean(), backend="autoremat", options={"compiler": "aot_eager"})
    step(torch.randn(64, 8)).backward()
    for stage in ("tracing", "reading the joint graph", "planning", "writing forward and backward"):
        assert f": {stage}" in told.getvalue()
    lines = told.getvalue().splitlines()
    assert lines[-1] == f"autoremat: {autoremat.reports()[-1].summary()}"
    assert max(map(len, lines)) <= 80


def test_silence_is_an_option_that_no_plan_depends_on(monkeypatch, told):
    monkeypatch.setenv(environment.PROGRESS, "1")
    assert autoremat.Options.parse().progress
    assert not autoremat.Options.parse({"progress": False}).progress
    assert key_of(autoremat.Options(progress=False)) == key_of(autoremat.Options())
    model = nn.Linear(8, 1)
    autoremat.explain(model, torch.randn(4, 8), options={"compiler": "aot_eager", "progress": False})
    assert not told.getvalue()
    autoremat.explain(model, torch.randn(4, 8), options={"compiler": "aot_eager"})
    assert "explaining" in told.getvalue()
    monkeypatch.setenv(environment.PROGRESS, "loud")
    with pytest.raises(autoremat.OptionsError, match="AUTOREMAT_PROGRESS='loud'"):
        autoremat.Options.parse()


UNITS = ["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5GiB", 3 * 2**29), (".5 KiB", 512), ("3 kIb", 3072), ("1.9B", 1), ("  6  gib\n", 6 * 2**30),
        ("9007199254740993B", 2**53 + 1), ("0.1GB", 100_000_000), ("6 g", 6 * 2**30), ("6Gi", 6 * 2**30), ("1.5T", 3 * 2**39),
    ],
)  # fmt: skip
def test_parse_bytes_accepts(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "6", "GiB", "6 GiB free", "-6GiB", "1,5GB", "1_000B", "1e3MB", "6.GB", "nanGB", "\u0666GiB", "6GiB6GiB", 6, b"6GiB"],
)
def test_parse_bytes_refuses_nonsense_and_shows_it(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0B", "0 GiB", "0.0MB", "0.9B", "0.0001KB"])
def test_parse_bytes_refuses_less_than_one_byte(text):
    with pytest.raises(ValueError, match="less than one byte"):
        parse_bytes(text)


@given(st.integers(1, 10**30), st.sampled_from(UNITS), st.sampled_from(["", " "]), st.sampled_from([str.lower, str.upper]))
def test_parse_bytes_is_exact_in_every_unit(count, unit, space, change_case):
    base = 1024 if "i" in unit else 1000
    expected = count * base ** ("BKMGT".index(unit[0]))
    assert parse_bytes(f"{count}{space}{change_case(unit)}") == expected


@given(st.integers(-(10**18), 10**18))
def test_format_bytes_never_shows_1024_of_a_unit(count):
    number, unit = format_bytes(count).split()
    assert unit == "TiB" or abs(float(number)) < 1024


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1000 * 1024, "1000.00 KiB"),  # units are powers of 1024, so a unit has four digits before the point at times
        (1048570, "1023.99 KiB"),
        (1048571, "1.00 MiB"),  # 1023.9951 KiB, which would round to 1024.00 KiB
        (5000 * 2**40, "5000.00 TiB"),
        (-(3 * 2**29), "-1.50 GiB"),
    ],
)
def test_format_bytes(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0.00 s"), (5e-8, "0.05 us"), (999.999e-6, "1.00 ms"), (125.0, "125.00 s"), (-0.0015, "-1.50 ms")],
)
def test_format_seconds(seconds, expected):
    assert format_seconds(seconds) == expected


def test_bytes_that_look_alike_are_told_in_full():
    assert bytes_apart(2**20, 2**20 + 24) == ("1.00 MiB (1048576 bytes)", "1.00 MiB (1048600 bytes)")
    assert bytes_apart(2**20, 2**20) == ("1.00 MiB", "1.00 MiB")
    assert bytes_apart(2**20, 2**21) == ("1.00 MiB", "2.00 MiB")
