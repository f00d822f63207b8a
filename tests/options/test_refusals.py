"""What users get wrong in options, the environment and ``configure`` is refused or warned of, never ignored."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autoremat.basics import environment
from autoremat.basics.errors import OptionsError, OptionWarning
from autoremat.options.options import Options, configure, note_compiled

HUGE = 10**400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_budget", 10**5000), ("memory_budget", "9" * 5000 + "GiB"), ("memory_budget", Fraction(HUGE, 3)),
        ("auto_headroom", "9" * 40 + "B"), ("time_limit", HUGE), ("progress", "yes"),
    ],
    ids=lambda value: str(value)[:9] if isinstance(value, str) else "number",
)  # fmt: skip
def test_numbers_beyond_all_memory_and_time_are_refused(key, value):
    with pytest.raises(OptionsError, match=rf"^{key}=.*is not accepted. Accepted: ") as refusal:
        Options.parse({key: value})
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(("name", "near"), [("AUTOREMAT_BUDGET", "Is AUTOREMAT_MEMORY_BUDGET meant"), ("AUTOREMAT_X", "None")])
def test_a_variable_that_nothing_reads_is_warned_of_once(monkeypatch, name, near):
    monkeypatch.setattr(environment, "_refused", set())
    monkeypatch.setenv(name, "6GiB")
    with pytest.warns(OptionWarning, match=f"{name} has no effect: nothing reads it. {near}"):
        Options.parse()
    Options.parse()


def test_configure_says_what_it_comes_too_late_for(monkeypatch):
    monkeypatch.setattr("autoremat.options.options._taken", {})
    passed = {"time_limit": 5.0}
    left = [True]
    note_compiled(Options.parse(passed), passed, lambda: left[0])
    configure(time_limit=3.0, memory_budget=None)  # nothing took the first, and the second is what was taken
    configure(progress=False)
    with pytest.warns(OptionWarning, match=r"configure\(memory_budget=..., save=...\) comes too late.*torch.compiler.reset"):
        configure(memory_budget="1GiB", save=["mm"])
    left[0] = False  # as after a reset of torch
    configure(memory_budget="2GiB")
