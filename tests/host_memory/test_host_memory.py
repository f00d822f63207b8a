"""The buffers on the host, ops that copy, and steps whose copies differ from plans, on a CPU that stands in for a device."""

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import stays
import torch
from torch import Tensor, nn

import autoremat
from autoremat import TransferError, host_memory
from autoremat.host_memory import links, ops
from autoremat.host_memory.links import Link
from autoremat.passes.insert_transfers import OnHost


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """No buffers of an earlier test."""
    torch._dynamo.reset()
    with host_memory.stand_in():
        yield


def stored(source: Tensor) -> Tensor:
    return ops.wait_for_copy_to_host(ops.copy_to_host(source, source.nbytes), source)


def loaded(host: Tensor) -> Tensor:
    return ops.wait_for_copy_from_host(ops.copy_from_host(host, torch.device("cpu")), host)


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4, 5), "transposed": lambda: torch.randn(3, 4, 5).transpose(0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "a slice": lambda: torch.randn(8, 6)[2:5, 1:4], "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "a scalar": lambda: torch.tensor(2.5), "empty": lambda: torch.empty(0, 3), "booleans": lambda: torch.rand(5, 3) > 0.5,
    "halves": lambda: torch.randn(5, 3).bfloat16(), "complex": lambda: torch.randn(4, dtype=torch.complex64),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_layouts_come_back_bit_by_bit(layout):
    source = LAYOUTS[layout]()
    host = stored(source)
    expected = source.clone(memory_format=torch.preserve_format)
    source.zero_() if layout != "expanded" else source[:, 0].zero_()
    back = loaded(host)
    assert (back.dtype, back.stride()) == (source.dtype, source.stride())
    assert torch.equal(back, expected)
    assert back.data_ptr() != host.data_ptr() or not source.numel()


def test_a_buffer_is_lent_as_long_as_anything_reads_it():
    host = stored(torch.ones(256))
    address, view = host.data_ptr(), host.view(16, 16)[3]
    assert stays.statistics("cpu") == stays.Statistics(1024, 1024, 1024, 0)
    del host
    assert stored(torch.zeros(256)).data_ptr() != address
    assert stays.statistics("cpu").held_bytes == 2048
    assert view.sum() == 16
    del view
    assert stays.statistics("cpu").used_bytes == 0
    assert stored(torch.zeros(256)).data_ptr() == address
    assert stays.statistics("cpu").held_bytes == 2048


def test_a_buffer_has_the_planned_capacity_whatever_the_size():
    for rows in (3, 8, 5):
        assert torch.equal(loaded(ops.copy_to_host(torch.ones(rows, 4), 8 * 4 * 4)), torch.ones(rows, 4))
    assert stays.statistics("cpu") == stays.Statistics(128, 0, 16 * 16, 16 * 16)


def test_unused_buffers_are_dropped_on_request_and_after_a_reset():
    host = stored(torch.ones(256))
    stored(torch.ones(512))
    assert stays.statistics("cpu").held_bytes == 1024 + 2048
    host_memory.release()
    assert stays.statistics("cpu").held_bytes == 1024
    torch._dynamo.reset()
    assert stays.statistics("cpu") == stays.Statistics()
    assert torch.equal(loaded(host), torch.ones(256))  # a graph that was compiled before the reset may still end


def test_a_source_that_nobody_else_keeps_lives_until_the_wait_or_as_long_as_the_copy():
    link = links.Link(torch.device("cpu"))

    def copied() -> tuple[Tensor, weakref.ref[Tensor]]:
        source = torch.ones(64)
        return link.copy_to_host(source, source.nbytes), weakref.ref(source)

    host, source = copied()
    assert source() is not None
    link.wait_for_copy_to_host(host)
    assert source() is None
    abandoned, source = copied()
    del abandoned
    assert source() is None


def test_threads_share_the_pool():
    def store_and_load(number: int) -> None:
        for _ in range(200):
            host = stored(torch.full((64,), float(number)))
            assert torch.equal(loaded(host), torch.full((64,), float(number)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store_and_load, range(4)))
    now = stays.statistics("cpu")
    assert now.used_bytes == 0
    assert now.held_bytes <= 2 * 4 * 256  # the next one is stored before the last one is dropped
    assert now.to_host_bytes == now.from_host_bytes == 4 * 200 * 256


def test_a_cpu_stands_in_only_where_it_is_told_to():
    assert host_memory.is_available(torch.device("cpu"))
    assert host_memory.is_available(torch.device("cuda", 0))
    assert not host_memory.is_available(torch.device("meta"))
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(host_memory.is_available, torch.device("cpu")).result()


@pytest.mark.parametrize("op", [ops.copy_to_host, ops.copy_from_host, ops.wait_for_copy_to_host, ops.wait_for_copy_from_host])
def test_fake_results_are_those_of_the_ops(op):
    tensor = torch.randn(4, 6).t()
    arguments = {ops.copy_to_host: (tensor, 96), ops.copy_from_host: (tensor, torch.device("cpu"))}.get(op, (tensor, tensor))
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


X = torch.randn(32, 16)


@pytest.fixture
def step() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    options = {"compiler": "aot_eager", "cost_model": "roofline"}
    with stays.staying(stays.as_short_as_possible):
        yield torch.compile(lambda x: model(x).square().sum(), backend="autoremat", options=options)


def test_a_store_that_does_not_happen_is_an_error(step):
    with mock.patch.object(Link, "copy_to_host", lambda self, source, capacity: source.clone()):
        with pytest.raises(TransferError) as raised:
            step(X)
    planned = autoremat.reports()[-1].moved_bytes
    assert f"the forward of a compiled graph has moved 0 bytes to the host, and its plan moves {planned}:" in str(raised.value)


def test_a_load_that_a_pass_drops_is_an_error(step):
    unchanged = {"begin_load": lambda self, stored: stored, "end_load": lambda self, begun, stored: begun}
    with mock.patch.multiple(OnHost, **unchanged):
        loss = step(X)
        with pytest.raises(
            TransferError, match=r"the backward of a compiled graph has moved 0 bytes from the host, and its plan"
        ):
            loss.backward()


def test_steps_that_are_legal_pass(step):
    losses = [step(X), step(X)]  # two forwards before a backward
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: step(X).backward(), range(2)))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = step(X)
    loss.backward()
    planned, done = autoremat.reports()[-1].moved_bytes, stays.statistics("cpu")
    assert done.to_host_bytes == 5 * planned
    assert done.from_host_bytes == 6 * planned
    assert done.used_bytes == 0
