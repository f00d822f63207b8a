"""Every option takes a value with a meaning, or refuses it by an `OptionsError` that names the option."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from requests_of_options import key_of

from autoremat.basics import disk_cache, environment
from autoremat.basics.errors import OptionsError, PlanFileError
from autoremat.options.options import OWN_KEYS, Options, configure


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


ODD: dict[str, Any] = {
    **{repr(value): value for value in (None, True, False, 0, 1, -1, 2, 70, 100, 101, 2**16, 2**16 + 1, 10**9, 2**63, 10**30)},
    **{repr(value): value for value in (0.0, 0.5, 1.0, 3.0, 70.0, 1e9, -0.5, 1e-300, 0.0009, 1e300, math.nan, math.inf, 1j)},
    **{repr(value): value for value in ("", " ", "70%", "0.05%", "101%", "-5%", "0.7", "6", "6G", "6 GiB", "6144M", "6GB/s")},
    **{repr(value): value for value in ("auto", "off", "free", "none", "full", "uniform:3", "uniform:0", "layers.*", "\0")},
    **{repr(value): value for value in (b"6G", (), [], {}, [1], [-1], [0.5], ["layers.*"], [""], {"layers.*": 1}, range(2))},
    "int64": numpy.int64(7), "huge uint64": numpy.uint64(2**64 - 1), "float32": numpy.float32(0.5), "bool_": numpy.bool_(True),
    "array": numpy.array([1, 2]), "array of text": numpy.array(["auto"]), "array without axes": numpy.array(5),
    "tensor of bytes": torch.tensor(100_000), "tensor of a share": torch.tensor(0.5), "tensor": torch.tensor([1, 2]),
    "meta tensor": torch.empty(2, device="meta"), "Fraction": Fraction(1, 4), "Decimal": Decimal("0.5"),
    "no such file": Path("/no/such/file"), "folder": Path("/"), "a class": int, "an object": object(),
    "an object without text": Unprintable(), "a list of such": [Unprintable()], "deep": [[[[1]]]],
}  # fmt: skip

COUNTS = {"1", "2", "70", "100", "101", "65536"}
TEXTS = {"'6G'", "'6 GiB'", "'6144M'"}
BYTES = COUNTS | TEXTS | {"65537", "1000000000", "int64"}
SECONDS = COUNTS | {"65537", "0.0009", "0.5", "1.0", "3.0", "70.0", "1e-300", "int64", "float32", "Fraction"}
SHARES = {"0.5", "1.0", "'70%'", "float32", "Fraction"}

ACCEPTED: dict[str, set[str]] = {
    "memory_budget": SHARES | BYTES - {"2", "70", "100", "int64"} | {"None", "'auto'"},
    "max_slowdown": SHARES | {"None", "'free'", "0", "1", "0.0", "0.0009", "'0.05%'", "1e-300"},
    "host_memory": BYTES | {"None", "'auto'"},
    "store": {"None"},
    "auto_headroom": BYTES | {"0"},
    "time_limit": SECONDS,
    "compiler": set(),
    "on_infeasible": {"None"},
    "on_planning_error": {"None"},
    "cost_model": set(),
    "plan": {"None"},
    "policy": {"None", "'full'", "'none'", "'uniform:3'"},
    "save": {"()", "[]", "{}", "['layers.*']"},
    "recompute": {"()", "[]", "['layers.*']"},
    "tiles": COUNTS - {"1"} | {"'auto'", "False", "int64"},
    "chunk_loss": COUNTS - {"1"} | {"'auto'", "True", "False", "int64"},
    "early_gradients": COUNTS - {"1"} | {"'auto'", "True", "False", "int64"},
    "hooks_free_gradients": {"True", "False"},
    "in_flight": COUNTS | {"None", "int64"},
    "accumulate": {"None", "True", "False"},
    "interconnect_bandwidth": BYTES | {"None", "'6GB/s'", "1.0", "3.0", "70.0", "1000000000.0"},
    "interconnect_latency": SECONDS | {"None"},
    "agreement": {"'auto'", "'off'", "[1]", "range(0, 2)"},
    "progress": {"True", "False"},
}
"""The values of ``ODD`` that each option takes."""


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, isolated_options):
    for variable in (environment.BUDGET, environment.COST_MODEL, environment.POLICY, environment.PROGRESS):
        monkeypatch.delenv(variable, raising=False)


def outcome(find: Callable[[], Options], name: str) -> str:
    """The cache key of the options, or "" if an error refuses them that names the option. Other errors pass through."""
    try:
        return key_of(find())
    except OptionsError as error:
        return "" if name in str(error) else f"refused without its name: {error}"


def configured(name: str, value: object) -> Options:
    try:
        configure(**{name: value})
        return Options.parse({})
    finally:
        configure()


@pytest.mark.parametrize("name", OWN_KEYS)
def test_every_value_has_a_meaning_or_is_refused(name):
    accepted = set()
    for label, value in ODD.items():
        found = outcome(lambda value=value: Options.parse({name: value}), name)
        assert outcome(lambda value=value: configured(name, value), name) == found, label
        assert found == "" or found.startswith("{"), label
        accepted |= {label} if found else set()
    assert accepted == ACCEPTED[name]


IN_THE_ENVIRONMENT = {
    environment.BUDGET: {"1", "101", "0.5", "1.0", "70%", "6G", "6 GiB", "auto", "none", ""},
    environment.COST_MODEL: {"roofline", "calibrated", ""},
    environment.POLICY: {"full", "none", "uniform:3", ""},
    environment.PROGRESS: {"0", "1", ""},
}
"""The texts that each variable takes."""


@pytest.mark.parametrize("variable", IN_THE_ENVIRONMENT)
def test_every_text_of_a_variable_has_a_meaning_or_is_refused(variable, monkeypatch):
    texts = set().union(
        *IN_THE_ENVIRONMENT.values(), {"2", "70", "100", "70.0", "1e-300", "1e300", "nan", "-1", "9" * 5000, "x"}
    )
    accepted = set()
    for text in texts:
        monkeypatch.setenv(variable, text)
        found = outcome(Options.parse, variable)
        assert found == "" or found.startswith("{"), text
        accepted |= {text} if found else set()
    assert accepted == IN_THE_ENVIRONMENT[variable]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir, Path.write_bytes])
def test_what_is_no_plan_file_is_refused_at_once(make, tmp_path):
    path = tmp_path / "plan.json"
    make(path, b"\xff") if make is Path.write_bytes else make(path)
    with pytest.raises(PlanFileError, match="plan.json"):
        Options(plan=path)


def test_a_plan_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(disk_cache.LARGEST_FILE + 1)
    with pytest.raises(PlanFileError, match="268,435,457 bytes"):
        Options(plan=tmp_path / "plan.json")
