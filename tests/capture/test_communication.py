"""Which graphs of Dynamo's may communicate, so that all ranks have to compile them again together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from autoremat.capture.communication import may_communicate


def graphs(function: Callable[..., Tensor], *inputs: Tensor) -> list[fx.GraphModule]:
    """The graphs that Dynamo captures of a call."""
    torch._dynamo.reset()
    found: list[fx.GraphModule] = []
    torch.compile(function, backend=lambda gm, _: found.append(gm) or gm.forward)(*inputs)
    return found


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def summed(x: Tensor) -> Tensor:
    return collectives.all_reduce(x.sin(), "sum", torch.distributed.group.WORLD) * 2


def test_a_graph_of_plain_ops_does_not_communicate():
    assert [may_communicate(gm) for gm in graphs(lambda x: (x @ x).relu(), torch.ones(4, 4))] == [False]


@pytest.mark.parametrize("function", [summed, lambda x: checkpoint(summed, x, use_reentrant=False)])
def test_a_graph_with_a_collective_communicates_even_inside_of_a_region(function):
    assert any(may_communicate(gm) for gm in graphs(function, torch.ones(4, 4, requires_grad=True)))


def test_a_graph_with_distributed_tensors_communicates():
    sharded = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert any(may_communicate(gm) for gm in graphs(lambda x: x * x, sharded))
