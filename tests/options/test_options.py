import functools
import json
import os
import pickle
import re
import subprocess
import sys
from fractions import Fraction

import numpy
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from requests_of_options import budget_with, key_of, request_with

from autoremat.basics.environment import BUDGET, COST_MODEL
from autoremat.basics.errors import OptionsError
from autoremat.options.options import OWN_KEYS, Options, configure

INDUCTOR_KEYS = ("max_autotune", "max_autotune_gemm", "triton.cudagraphs", "fallback_random")


@pytest.fixture(autouse=True)
def no_cost_model_from_outside(monkeypatch, isolated_options):
    monkeypatch.delenv(COST_MODEL)  # set for all other tests


def parse(options=None, mode=None):
    return Options.parse(options, mode, lambda: INDUCTOR_KEYS)


def test_the_table_of_options_has_all():
    page = (ROOT / "docs" / "options.md").read_text().partition("| Variable |")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(OWN_KEYS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None), ("1.5 gb", 1_500_000_000), (" AUTO ", "auto"), (1.0, 1.0), ("70 %", 0.7), (numpy.uint8(200), 200),
        (numpy.float32(0.5), 0.5), (Fraction(1, 4), 0.25),
    ],
)  # fmt: skip
def test_memory_budget_is_normalised(given, expected):
    budget = Options(memory_budget=given).memory_budget
    assert budget == expected
    assert type(budget) is type(expected)


@pytest.mark.parametrize(
    ("options", "suggestion"),
    [
        ({"memory_budget": 6}, '"6GiB"'),
        ({"memory_budget": 6.0}, '"6GiB"'),
        ({"memory_budget": 70.0}, r"0.7 \(70 %\)"),
        ({"max_slowdown": 3}, r"0.03 \(3 %\)"),
        ({"mode": 3}, ""),
    ],
)
def test_a_wrong_number_names_the_value_that_may_be_meant(options, suggestion):
    (name,) = options
    with pytest.raises(OptionsError, match=rf"^{name}=.*{suggestion}"):
        parse(options) if name != "mode" else parse({}, **options)


def test_parse_separates_our_keys_from_inductors():
    options = parse({"time_limit": 3, "triton.cudagraphs": True, "memory_budget": "1GB", "max_autotune": False}, "default")
    assert options.memory_budget == 10**9
    assert options.time_limit == 3.0
    assert options.inductor == (("max_autotune", False), ("triton.cudagraphs", True))
    assert options.mode == "default"


@pytest.mark.parametrize(("key", "nearest"), [("max_autotun", "max_autotune"), ("time-limits", "time_limit")])
def test_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(OptionsError) as caught:
        parse({key: 1})
    assert re.search(rf"nearest: [^;.]*\b{nearest}\b", str(caught.value))


@pytest.mark.parametrize("options", [{"max_autotune": True, "max-autotune": False}, {3: True}, {"inductor": ()}, 5])
def test_wrong_dicts_of_options_are_refused(options):
    with pytest.raises(OptionsError):
        parse(options)


@pytest.mark.parametrize(
    ("options", "configured", "environment", "expected"),
    [
        ({"memory_budget": 1}, {"memory_budget": "2B"}, "3B", 1),
        ({"memory_budget": None}, {"memory_budget": "2B"}, "3B", None), ({}, {"memory_budget": None}, "3B", None),
        ({}, {"time_limit": 5}, "3B", 3), ({}, {}, "3B", 3), ({}, {}, None, None),
    ],
)  # fmt: skip
def test_precedence_of_the_budget(monkeypatch, options, configured, environment, expected):
    if configured:
        configure(**configured)
    if environment is not None:
        monkeypatch.setenv(BUDGET, environment)
    assert parse(options).memory_budget == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("6GiB", 6 * 2**30), ("1.0", 1.0), ("5e-1", 0.5), ("None", None), (" 123456 ", 123456)]
)
def test_environment_forms(monkeypatch, text, expected):
    monkeypatch.setenv(BUDGET, text)
    budget = parse().memory_budget
    assert budget == expected
    assert type(budget) is type(expected)


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


@given(st.integers(0, 2**60), st.floats(0.001, 1))
def test_a_share_is_floored_and_within_the_baseline(baseline, share):
    budget = budget_with(Options(memory_budget=share), baseline)
    assert isinstance(budget, int)
    assert 0 <= budget <= baseline
    assert budget <= Fraction(repr(share)) * baseline < budget + 1


def test_auto_shows_both_numbers_when_nothing_is_left():
    with pytest.raises(OptionsError, match=r"7 bytes.*auto_headroom=2097152"):
        budget_with(Options(memory_budget="auto", auto_headroom="2MiB"), 10, 7)


budgets = st.one_of(st.none(), st.just("auto"), st.integers(101, 2**50), st.floats(0.001, 1))
all_options = st.builds(
    Options,
    memory_budget=budgets,
    auto_headroom=st.integers(0, 2**40),
    time_limit=st.floats(0.001, 1000),
    compiler=st.sampled_from(["inductor", "aot_eager"]),
    on_infeasible=st.sampled_from(["raise", "best_effort"]),
    on_planning_error=st.sampled_from(["fallback", "raise"]),
    inductor=st.dictionaries(st.sampled_from(INDUCTOR_KEYS), st.one_of(st.booleans(), st.integers(0, 1), st.text())).map(
        lambda config: tuple(config.items())
    ),
    mode=st.sampled_from([None, "default", "max-autotune"]),
    cost_model=st.sampled_from(["roofline", "calibrated"]),
)


@given(all_options)
def test_cache_key_is_sorted_json_and_survives_pickling(options):
    key = key_of(options)
    assert json.dumps(json.loads(key), sort_keys=True) == key
    assert key_of(pickle.loads(pickle.dumps(options))) == key


@given(all_options, all_options)
def test_different_requests_have_different_cache_keys(one, other):
    if request_with(one) != request_with(other):
        assert key_of(one) != key_of(other)


def test_spelling_does_not_change_the_cache_key():
    one = parse({"memory_budget": "1KiB", "max-autotune": True, "fallback_random": False})
    other = parse({"fallback_random": False, "max_autotune": True, "memory-budget": 1024})
    assert key_of(one) == key_of(other)


class Versioned:
    def __init__(self, version):
        self.version = version

    def __call__(self, graph):
        return None

    def uuid(self):
        return self.version


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (object(), object(), True), (Versioned("1"), Versioned("1"), True), (Versioned("1"), Versioned("2"), False),
        (len, sum, False), ([1, {"a": (2,)}], [1, {"a": (3,)}], False), ({"x", "y"}, {"y", "x"}, True),
    ],
)  # fmt: skip
def test_cache_key_of_values_that_json_does_not_know(one, other, equal):
    keys = [key_of(Options(inductor=(("post_grad_custom_pre_pass", value),))) for value in (one, other)]
    assert (keys[0] == keys[1]) is equal
    assert "0x" not in keys[0]


def test_cache_key_is_the_same_in_every_process():
    code = (
        "from autoremat import Options; from autoremat.request.request import Request;"
        "print(Request(Options(inductor=(('a', {'x', 'y', 'z'}), ('b', len), ('c', object())))).cache_key())"
    )
    run = functools.partial(subprocess.run, capture_output=True, check=True, cwd=ROOT)
    seeds = ("1", "2", "3")
    keys = {run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in seeds}
    assert len(keys) == 1
