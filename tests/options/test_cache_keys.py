"""The part of a cache key that the options make."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from requests_of_options import key_of, request_with
from test_options import INDUCTOR_KEYS, no_cost_model_from_outside, parse  # noqa: F401

from autoremat.options.options import Options

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


@given(all_options, st.sampled_from(["time_limit", "compiler", "on_infeasible", "mode", "cost_model", "inductor"]), all_options)
def test_each_option_is_part_of_the_request(one, name, other):
    changed = replace(one, **{name: getattr(other, name)})
    if getattr(one, name) != getattr(other, name):
        assert request_with(one) != request_with(changed)


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
        (object(), object(), True),
        (Versioned("1"), Versioned("1"), True),
        (Versioned("1"), Versioned("2"), False),
        (len, sum, False),
        ([1, {"a": (2,)}], [1, {"a": (3,)}], False),
        ({"x", "y"}, {"y", "x"}, True),
    ],
)
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
