"""The options on forms of saved tensors, `host_memory` and `store`, and what they ask of a graph."""

from __future__ import annotations

import json

import pytest
from requests_of_options import CPU, around, key_of, profile, request_with

from autoremat import OptionsError, OptionWarning
from autoremat.measure import machine
from autoremat.options.options import Options
from autoremat.request.budgets import request_of, requests_of
from autoremat.request.surroundings import Surroundings

GIB = 2**30


@pytest.mark.parametrize(("given", "bytes_"), [("64GiB", 64 * GIB), (7, 7), (None, None)])
def test_a_bound_on_the_host_is_part_of_the_limits(given, bytes_):
    request = request_with(Options(host_memory=given))
    assert request.limits.host_bytes == bytes_
    assert request.forms == (set() if bytes_ is None else {"host", "bits"})


def test_auto_is_the_share_of_the_rank():
    here = Surroundings(CPU, runs_here=False)
    vars(here)["host_bytes"] = 5 * GIB
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


@pytest.fixture
def free_of(tmp_path):
    """Returns the free bytes by files that say so."""

    def found(available_kib: int, control: dict[str, str]) -> int:
        (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
        for name, text in control.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return machine.free_host_bytes(tmp_path / "meminfo", tmp_path)

    return found


def test_free_memory_is_that_of_the_machine_and_of_the_control_group(free_of):
    assert free_of(1000, {}) == 1000 * 1024
    assert free_of(1000, {"memory.max": "max\n", "memory.current": "5\n"}) == 1000 * 1024
    assert free_of(1000, {"memory.max": "9000\n", "memory.current": "8000\n"}) == 1000
    assert free_of(1000, {"memory/memory.limit_in_bytes": "10", "memory/memory.usage_in_bytes": "20"}) == 0


def test_the_machine_is_divided_by_its_ranks(monkeypatch):
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 100 * GIB + 5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert machine.share_of_host_memory() == 32 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine.ranks_of_machine() == 8
    assert machine.share_of_host_memory() == 4 * GIB
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 80 * GIB)  # a later process finds the same
    assert machine.share_of_host_memory() == 4 * GIB
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 0)
    assert machine.share_of_host_memory() == 0
