"""What the key of a compilation depends on, and "auto", which it has as a number."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoremat
from autoremat.basics.errors import OptionsError
from autoremat.compiler import cache_key
from autoremat.compiler.cache_key import fingerprint
from autoremat.options.options import Options
from autoremat.request import surroundings
from autoremat.request.budgets import request_of
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import kernel_settings

SECOND = torch.device("cuda", 1)
MIB = 2**20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A card whose free memory is less at each look; the devices that were looked at."""
    looks: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        looks.append(device)
        return (1024 - 64 * len(looks)) * MIB, 1024 * MIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    return looks


def scale(x: Tensor) -> Tensor:
    return x.exp() * 2


def key(inputs: tuple[Any, ...] = (torch.ones(4),), **fields: Any) -> str:
    return fingerprint(fx.symbolic_trace(scale), inputs, Request(Options(cost_model="roofline", **fields)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_shards_depend_on_the_place_of_a_rank_in_its_groups():
    found = {}
    for ranks in ([0, 1], [1, 2]):
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        assert dist.new_group(ranks).group_name == "1"
        found[ranks[0]] = key(), key(store=("device", "shards"))
        dist.destroy_process_group()
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_auto_is_looked_up_once_on_the_graphs_own_device(card, monkeypatch):
    monkeypatch.setattr(surroundings, "device_of_inputs", lambda *_: SECOND)
    before = len(autoremat.reports())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    options = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": "auto", "auto_headroom": "128MiB"}
    torch.compile(model, backend="autoremat", options=options)(torch.ones(4, 8)).sum().backward()
    (report,) = autoremat.reports()[before:]
    assert card == [SECOND]
    assert report.budget_bytes == (1024 - 64 - 128) * MIB


def test_the_key_has_the_bytes_that_auto_stands_for(card):
    options = Options(memory_budget="auto")
    first, second = (request_of(options, Surroundings(SECOND)) for _ in range(2))
    assert first.limits.peak_bytes == 448 * MIB
    assert second.limits.peak_bytes == 384 * MIB
    assert first.cache_key() != second.cache_key()
    with pytest.raises(OptionsError, match="needs a CUDA device"):
        request_of(options, Surroundings(torch.device("cpu")))


@pytest.mark.parametrize("library", ["mkldnn", "cudnn"])
def test_the_key_changes_with_libraries_that_are_switched_off(library, monkeypatch):
    before = key()
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends, library, Mock(enabled=False))
        assert key() != before
    assert key() == before


def test_the_key_changes_with_the_kernels_that_attention_may_take():
    before = key()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert key() != before
    assert key() == before


def test_the_key_changes_with_the_processor(monkeypatch):
    keys = [key()]
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "device_name", lambda device: "cpu of another make")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "of another kind")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(kernel_settings, "packs_operands", lambda dtype: None)
        keys.append(key())
    assert not any(one == other for one, other in itertools.combinations(keys, 2))


class Placed(torch.Tensor):
    placement = ""

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return [], self.placement


def test_the_key_changes_with_what_a_tensor_subclass_says_of_itself():
    one, other = (torch.ones(4).as_subclass(Placed) for _ in range(2))
    one.placement, other.placement = "shards", "replicas"
    assert key((one,)) == key((one,))
    assert key((one,)) != key((other,))
