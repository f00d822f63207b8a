import math
import pickle
import re
from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests_of_options import budget_with

from autoremat.basics.errors import OptionsError
from autoremat.options.options import (
    COST_MODEL_VARIABLE,
    DEFAULT_AUTO_HEADROOM,
    ENVIRONMENT_VARIABLE,
    OWN_KEYS,
    Options,
    configure,
)

INDUCTOR_KEYS = ("max_autotune", "max_autotune_gemm", "triton.cudagraphs", "fallback_random")


@pytest.fixture(autouse=True)
def no_cost_model_from_outside(monkeypatch, isolated_options):
    monkeypatch.delenv(COST_MODEL_VARIABLE)  # set for all other tests


def parse(options=None, mode=None):
    return Options.parse(options, mode, lambda: INDUCTOR_KEYS)


def test_defaults():
    assert Options() == Options(None, 512 * 2**20, 10.0, "inductor", None, None, (), None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (1, 1),
        (6 * 2**30, 6 * 2**30),
        ("6GiB", 6 * 2**30),
        ("1.5 gb", 1_500_000_000),
        ("auto", "auto"),
        (" AUTO ", "auto"),
        (0.5, 0.5),
        (1.0, 1.0),
        (0.001, 0.001),
        ("0.1%", 0.001),
        ("70 %", 0.7),
        (numpy.int64(700), 700),
        (numpy.uint8(200), 200),
        (numpy.float64(0.5), 0.5),
        (numpy.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_memory_budget_is_normalised(given, expected):
    budget = Options(memory_budget=given).memory_budget
    assert budget == expected
    assert type(budget) is type(expected)


@pytest.mark.parametrize(
    "value",
    [0, -1, numpy.int64(-5), True, False, numpy.bool_(True), 0.0, -0.5, math.nan, math.inf, -math.inf]
    + ["", "6", "0.5", "none", "-6GiB", "0GiB", "automatic", b"6GiB", [1], {}, 1j],
)
def test_memory_budget_refuses_and_shows_value_and_forms(value):
    with pytest.raises(OptionsError) as caught:
        Options(memory_budget=value)
    message = str(caught.value)
    assert message.startswith(f"memory_budget={value!r} is not accepted. Accepted: ")
    for form in ["an int > 0 (bytes)", '"6GiB", "6G", "800MB" or "1.5 GB"', "a float in [0.001, 1]", '"auto"', "None"]:
        assert form in message


@pytest.mark.parametrize("value", [1.0000001, 6.0, 2e9, numpy.float64(6.0), Fraction(3, 2)])
def test_float_above_one_says_which_form_was_meant(value):
    with pytest.raises(OptionsError) as caught:
        Options(memory_budget=value)
    message = str(caught.value)
    assert message.startswith(
        f"memory_budget={value!r}: a float is a share of the peak that the step needs without autoremat, at most 1."
    )
    assert 'For bytes give an int or a string with a unit, such as "6GiB".' in message
    assert (f'Did you mean "{float(value):g}GiB"?' in message) == (value <= 32)


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (5, 5), ("1GiB", 2**30), ("5 kb", 5000), (numpy.int32(9), 9)])
def test_reserve_is_normalised(given, expected):
    reserve = Options(auto_headroom=given).auto_headroom
    assert reserve == expected
    assert type(reserve) is int


@pytest.mark.parametrize("value", [-1, True, None, 0.5, 2.0, "auto", "6", "0B", [1]])
def test_reserve_refuses(value):
    with pytest.raises(
        OptionsError, match=re.escape(f"auto_headroom={value!r} is not accepted. Accepted: an int >= 0 (bytes)")
    ):
        Options(auto_headroom=value)


@pytest.mark.parametrize("value", [1, 0.1, numpy.float32(2), numpy.int64(3)])
def test_time_limit_is_a_float(value):
    time_limit = Options(time_limit=value).time_limit
    assert time_limit == float(value)
    assert type(time_limit) is float


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, None, "10", "10s"])
def test_time_limit_refuses(value):
    with pytest.raises(OptionsError, match=re.escape(f"time_limit={value!r} is not accepted. Accepted: a finite number")):
        Options(time_limit=value)


@pytest.mark.parametrize("value", ["eager", "Inductor", "Warn", "", 1, True, ["inductor"]])
@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("compiler", '"inductor" or "aot_eager"'),
        ("on_infeasible", '"raise" or "best_effort"'),
        ("on_planning_error", '"fallback" or "raise"'),
    ],
)
def test_choices_refuse(name, forms, value):
    with pytest.raises(OptionsError, match=re.escape(f"{name}={value!r} is not accepted. Accepted: {forms}")):
        Options(**{name: value})


def test_mode_must_be_text():
    with pytest.raises(OptionsError, match="mode=3 is not accepted"):
        Options(mode=3)


def test_options_are_frozen_hashable_and_picklable():
    options = Options(memory_budget="6GiB", inductor=(("b", 1), ("a", 2)))
    with pytest.raises(AttributeError):
        options.memory_budget = 1
    assert options == Options(memory_budget=6 * 2**30, inductor=(("a", 2), ("b", 1)))
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    assert pickle.loads(pickle.dumps(options)) == options


# Keys and where values come from


def test_parse_of_nothing_is_the_defaults():
    assert Options.parse() == Options.parse(None) == Options.parse({}) == Options()


def test_parse_separates_our_keys_from_inductors():
    options = parse({"time_limit": 3, "triton.cudagraphs": True, "memory_budget": "1GB", "max_autotune": False}, "default")
    assert options.memory_budget == 10**9
    assert options.time_limit == 3.0
    assert options.inductor == (("max_autotune", False), ("triton.cudagraphs", True))
    assert options.mode == "default"


def test_dashes_in_keys_are_underscores():
    options = parse({"memory-budget": 500, "max-autotune": True})
    assert options.memory_budget == 500
    assert options.inductor == (("max_autotune", True),)


def test_inductor_keys_are_asked_for_only_when_needed():
    def fail():
        raise AssertionError("not needed")

    assert Options.parse({key: getattr(Options(), key) for key in OWN_KEYS}, None, fail) == Options()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("memory_bugdet", "memory_budget"), ("max_autotun", "max_autotune"), ("time-limits", "time_limit")],
)
def test_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(OptionsError) as caught:
        parse({key: 1})
    message = str(caught.value)
    assert f"the option {key.replace('-', '_')!r} is known neither to autoremat nor to Inductor's config" in message
    assert re.search(rf"nearest: [^;.]*\b{nearest}\b", message)


@pytest.mark.parametrize("key", ["xyzzy", "inductor", "mode"])
def test_unknown_key_lists_our_names(key):
    with pytest.raises(OptionsError, match=f"Autoremat's own: {', '.join(OWN_KEYS)}"):
        parse({key: "default"})


def test_key_given_twice():
    with pytest.raises(OptionsError, match="'max_autotune' is given twice"):
        parse({"max_autotune": True, "max-autotune": False})


def test_key_must_be_text():
    with pytest.raises(OptionsError, match="the option name 3 is not a string"):
        parse({3: True})


@pytest.mark.parametrize(
    ("options", "configured", "environment", "expected"),
    [
        ({"memory_budget": 1}, {"memory_budget": "2B"}, "3B", 1),
        ({"memory_budget": None}, {"memory_budget": "2B"}, "3B", None),
        ({"memory_budget": 1}, {}, "3B", 1),
        ({}, {"memory_budget": "2B"}, "3B", 2),
        ({}, {"memory_budget": None}, "3B", None),
        ({}, {"time_limit": 5}, "3B", 3),
        ({}, {}, "3B", 3),
        ({}, {}, None, None),
    ],
)
def test_precedence_of_the_budget(monkeypatch, options, configured, environment, expected):
    if configured:
        configure(**configured)
    if environment is not None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, environment)
    assert parse(options).memory_budget == expected


def test_precedence_is_per_key():
    configure(memory_budget="1GiB", time_limit=2, compiler="aot_eager", on_infeasible="best_effort", auto_headroom="1MB")
    options = parse({"time_limit": 3, "compiler": "inductor"})
    assert options == Options(2**30, 10**6, 3.0, "inductor", "best_effort")


def test_a_bad_environment_is_not_read_when_it_does_not_count(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "lots")
    assert parse({"memory_budget": 1}).memory_budget == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * 2**30),
        ("auto", "auto"),
        ("0.5", 0.5),
        ("1.0", 1.0),
        ("5e-1", 0.5),
        ("none", None),
        ("None", None),
        ("", None),
        (" 123456 ", 123456),
    ],
)
def test_environment_forms(monkeypatch, text, expected):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
    budget = parse().memory_budget
    assert budget == expected
    assert type(budget) is type(expected)


@pytest.mark.parametrize("text", ["lots", "-5", "0", "0.0", "1.5", "nan", "inf", "true", "6 GiBs"])
def test_environment_errors_name_the_variable(monkeypatch, text):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
    with pytest.raises(OptionsError, match=rf"^AUTOREMAT_MEMORY_BUDGET=.*{re.escape(text)}.*Accepted: "):
        parse()


def test_configure_accumulates_and_resets():
    assert configure(memory_budget="1GiB") is None
    configure(time_limit=2)
    assert parse() == Options(memory_budget=2**30, time_limit=2)
    configure()
    assert parse() == Options()


def test_configure_checks_at_once_and_then_changes_nothing():
    configure(memory_budget=500)
    with pytest.raises(OptionsError, match="time_limit=-1"):
        configure(memory_budget=600, time_limit=-1)
    assert parse() == Options(memory_budget=500)
    with pytest.raises(OptionsError, match="the option 'max_autotune' is known neither"):
        configure(max_autotune=True)


# The resolved budget


@given(st.integers(0, 2**60), st.floats(0.001, 1))
def test_a_share_is_floored_and_within_the_baseline(baseline, share):
    budget = budget_with(Options(memory_budget=share), baseline)
    assert isinstance(budget, int)
    assert 0 <= budget <= baseline
    assert budget <= Fraction(repr(share)) * baseline < budget + 1


@given(st.integers(0, 2**60), st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)))
def test_a_larger_share_is_never_a_smaller_budget(baseline, shares):
    smaller, larger = (budget_with(Options(memory_budget=share), baseline) for share in sorted(shares))
    assert smaller <= larger


@pytest.mark.parametrize(
    ("budget", "baseline", "free", "expected"),
    [
        (0.7, 10, None, 7),
        (0.5, 101, None, 50),
        (1.0, 2**60 + 1, None, 2**60 + 1),
        (123, 10, None, 123),
        (123, 10, 1, 123),
        (None, 10, 1, None),
        ("auto", 10, DEFAULT_AUTO_HEADROOM + 9, 9),
    ],
)
def test_resolve_budget(budget, baseline, free, expected):
    assert budget_with(Options(memory_budget=budget), baseline, free) == expected


def test_auto_needs_a_cuda_device():
    with pytest.raises(OptionsError, match=r'memory_budget="auto" needs a CUDA device.*Accepted elsewhere: an int') as caught:
        budget_with(Options(memory_budget="auto"), 10, None)
    assert "less `auto_headroom`" not in str(caught.value)


@pytest.mark.parametrize("free", [0, 2**20, 2 * 2**20])
def test_auto_shows_both_numbers_when_nothing_is_left(free):
    with pytest.raises(OptionsError) as caught:
        budget_with(Options(memory_budget="auto", auto_headroom="2MiB"), 10, free)
    assert f"({free} bytes) are free" in str(caught.value)
    assert "auto_headroom=2097152 (2.00 MiB)" in str(caught.value)
