"""Every option takes a value with a meaning, or refuses it by an `OptionsError` that names it; the forms of saved tensors."""

import json
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
from requests_of_options import CPU, around, key_of, profile, request_with

from autoremat.basics import disk_cache, environment
from autoremat.basics.errors import OptionsError, OptionWarning, PlanFileError
from autoremat.measure import calibration
from autoremat.options.options import OWN_KEYS, Options, configure, note_compiled
from autoremat.request import budgets
from autoremat.request.budgets import request_of, requests_of
from autoremat.request.surroundings import Surroundings


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
    "memory_budget": SHARES | BYTES - {"2", "70", "100", "int64"} | {"None", "'none'", "'auto'", "'0.7'"},
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


HUGE = 10**400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_budget", 10**5000), ("memory_budget", "9" * 5000 + "GiB"), ("memory_budget", Fraction(HUGE, 3)),
        ("auto_headroom", "9" * 40 + "B"), ("time_limit", HUGE), ("progress", "yes"),
        ("interconnect_bandwidth", "50GB/min"), ("max_slowdown", "fast"),
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


GIB = 2**30


@pytest.mark.parametrize(("given", "bytes_"), [("64GiB", 64 * GIB), (7, 7), (None, None)])
def test_a_bound_on_the_host_is_part_of_the_limits(given, bytes_):
    request = request_with(Options(host_memory=given))
    assert request.limits.host_bytes == bytes_
    assert request.forms == (set() if bytes_ is None else {"host", "bits"})


def test_auto_is_the_share_of_the_rank(monkeypatch):
    here = Surroundings(CPU, runs_here=False)
    monkeypatch.setattr(budgets, "share_of_host_memory", lambda: 5 * GIB)
    assert request_of(Options(host_memory=" Auto "), here).limits.host_bytes == 5 * GIB


def test_store_names_the_forms_that_are_allowed():
    assert request_with(Options(store=["bits", "device"])).forms == {"bits"}
    assert Options(store=["bits", "device"]) == Options(store=("device", "bits"))
    assert request_with(Options(store=("device", "host"), host_memory="1GiB")).forms == {"host"}
    assert request_with(Options(store=("device",))).forms == set()


@pytest.mark.parametrize("options", [{"store": ("device", "host")}, {"store": ("device",), "host_memory": "1GiB"}])
def test_a_form_and_its_bound_go_together(options):
    with pytest.raises(OptionsError, match="store=.* and host_memory="):
        Options(**options)


def test_forms_are_part_of_the_cache_key():
    choices = (Options(), Options(host_memory=1), Options(host_memory=2), Options(host_memory=1, store=("device", "host")))
    assert len({key_of(options) for options in choices}) == len(choices)
    assert json.loads(key_of(choices[1]))["host_bytes"] == 1


def test_a_profile_that_was_made_without_host_memory_keeps_nothing_there():
    with pytest.warns(OptionWarning, match="host_memory has no effect"):
        (request,) = requests_of(Options(memory_budget=profile(), host_memory="1GiB"), around()).values()
    assert request.limits.host_bytes is None
    assert request.forms == set()


def test_free_memory_is_that_of_the_machine_and_of_the_control_group(tmp_path):
    def free_of(available_kib: int, control: dict[str, str]) -> int:
        (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
        for name, text in control.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return calibration.free_host_bytes(tmp_path / "meminfo", tmp_path)

    assert free_of(1000, {}) == 1000 * 1024
    assert free_of(1000, {"memory.max": "max\n", "memory.current": "5\n"}) == 1000 * 1024
    assert free_of(1000, {"memory.max": "9000\n", "memory.current": "8000\n"}) == 1000
    assert free_of(1000, {"memory/memory.limit_in_bytes": "10", "memory/memory.usage_in_bytes": "20"}) == 0


def test_the_machine_is_divided_by_its_ranks(monkeypatch):
    monkeypatch.setattr(calibration, "free_host_bytes", lambda: 100 * GIB + 5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert calibration.share_of_host_memory() == 32 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert calibration.ranks_of_machine() == 8
    assert calibration.share_of_host_memory() == 4 * GIB
    monkeypatch.setattr(calibration, "free_host_bytes", lambda: 80 * GIB)  # a later process finds the same
    assert calibration.share_of_host_memory() == 4 * GIB
    monkeypatch.setattr(calibration, "free_host_bytes", lambda: 0)
    assert calibration.share_of_host_memory() == 0
