"""A step whose copies differ from its plan is an error, and steps that are legal are none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import stays
import torch
from torch import nn

import autoremat
from autoremat import TransferError, host_memory
from autoremat.host_memory.links import Link
from autoremat.passes.forms import OnHost

X = torch.randn(32, 16)


@pytest.fixture(autouse=True)
def on_a_device() -> Iterator[None]:
    torch._dynamo.reset()
    with host_memory.stand_in(), stays.staying(stays.as_short_as_possible):
        yield


def compiled() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    options = {"compiler": "aot_eager", "cost_model": "roofline"}
    return model, torch.compile(lambda x: model(x).square().sum(), backend="autoremat", options=options)


def test_a_store_that_does_not_happen_is_an_error():
    _, step = compiled()
    with mock.patch.object(Link, "copy_to_host", lambda self, source, capacity: source.clone()):
        with pytest.raises(TransferError) as raised:
            step(X)
    planned = autoremat.reports()[-1].stored.moved_bytes
    assert f"the forward of a compiled graph has moved 0 bytes to the host, and its plan moves {planned}:" in str(raised.value)


def test_a_load_that_a_pass_drops_is_an_error():
    _, step = compiled()
    unchanged = {
        "begin_load": lambda self, builder, holder, stored: stored,
        "end_load": lambda self, builder, holder, begun, stored: begun,
    }
    with mock.patch.multiple(OnHost, **unchanged):
        loss = step(X)
        with pytest.raises(
            TransferError, match=r"the backward of a compiled graph has moved 0 bytes from the host, and its plan"
        ):
            loss.backward()


def test_steps_that_are_legal_pass():
    model, step = compiled()
    losses = [step(X), step(X)]  # two forwards before a backward
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    workers = [threading.Thread(target=lambda: step(X).backward()) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = step(X)
    loss.backward()
    planned, done = autoremat.reports()[-1].stored.moved_bytes, host_memory.statistics("cpu")
    assert done.to_host_bytes == 5 * planned
    assert done.from_host_bytes == 6 * planned
    assert done.used_bytes == 0
    del model
