"""Which values a graph shows to be equal on all ranks of a group, and which graphs may communicate."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from processes import group_of
from torch import Tensor, fx
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from autoremat.capture.communication import fingerprint, may_communicate, replicated_nodes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

X = torch.ones(4, 6)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with group_of(2, rank=1):
        yield


def reduced(x: Tensor, group: Any = None) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", group or dist.group.WORLD))


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*(inputs or (X,))).graph


def groups(function: Callable[..., Any], *inputs: Tensor) -> tuple[str, ...]:
    """The groups over which the only result of the function is replicated."""
    graph = traced(function, *inputs)
    (result,) = graph.output_node().all_input_nodes
    return replicated_nodes(graph).get(result, ())


REPLICATED: dict[str, Callable[[Tensor], Tensor]] = {
    "the result of an all-reduce": lambda x: reduced(x),
    "what follows element by element": lambda x: reduced(x).exp() * 3,
    "views": lambda x: reduced(x).t()[1:].reshape(-1),
    "a sum of two": lambda x: reduced(x) + reduced(x.sin()),
    "another type": lambda x: reduced(x).to(torch.float64),
    "a choice by itself": lambda x: torch.where(reduced(x) > 0, reduced(x), torch.full((4, 6), 2.0)),
}

NOT_REPLICATED: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x,
    "a partial sum before its reduction": lambda x: (x @ x.t()).exp(),
    "a sum with an input": lambda x: reduced(x) + x,
    "a sum with a constant of this process": lambda x: reduced(x) + torch.arange(6.0),
    "a part of a reduced sum": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).exp(),
    "a dropout mask": lambda x: torch.rand_like(reduced(x)) > 0.5,
    "the result of dropout": lambda x: torch.dropout(reduced(x), 0.5, True),
    "a product": lambda x: reduced(x) @ reduced(x).t(),
    "a reduction": lambda x: reduced(x).sum(0),
    "memory that nothing has written": lambda x: torch.empty_like(reduced(x)),
    "what a broadcast follows": lambda x: functional.broadcast(x, 0, dist.group.WORLD),
}


@pytest.mark.parametrize("function", REPLICATED.values(), ids=REPLICATED.keys())
def test_what_is_equal_on_all_ranks_is_found(function):
    assert groups(function) == (dist.group.WORLD.group_name,)


@pytest.mark.parametrize("function", NOT_REPLICATED.values(), ids=NOT_REPLICATED.keys())
def test_what_may_differ_between_ranks_is_not_claimed(function):
    assert groups(function) == ()


def test_values_of_two_groups_are_replicated_over_what_these_share():
    pair, name = dist.new_group([0, 1]), dist.group.WORLD.group_name
    assert groups(lambda x: reduced(x, pair)) == (pair.group_name,)
    assert groups(lambda x: reduced(x, pair) + reduced(x)) == ()
    assert groups(lambda x: reduced(x, pair).exp() * 0 + torch.full((4, 6), 1.0)) == (pair.group_name,)
    assert groups(lambda x: reduced(reduced(x, pair))) == (name,)


def test_nothing_is_claimed_once_an_op_writes_to_a_replicated_value():
    def writes(x: Tensor) -> Tensor:
        whole = reduced(x)
        whole.add_(x)
        return whole

    assert groups(writes) == ()
    assert not replicated_nodes(traced(writes))


def hash_of(function: Callable[..., Any], *inputs: Tensor) -> str:
    return fingerprint(replicated_nodes(traced(function, *inputs)))


def test_a_number_of_this_rank_changes_the_hash_that_ranks_compare():
    first = hash_of(lambda x: reduced(x) * 1.5)
    assert first == hash_of(lambda x: reduced(x) * 1.5)
    assert first == hash_of(lambda x: reduced(x * dist.get_rank()) * 1.5)  # before the reduction ranks may differ
    others = (
        hash_of(lambda x: reduced(x) * (1 + dist.get_rank())),
        hash_of(lambda x: reduced(x) + 1.5),
        hash_of(lambda x: reduced(x)[dist.get_rank() :] * 1.5),
        hash_of(lambda x: reduced(x) * 1.5, X.t()),
        hash_of(lambda x: reduced(x).double() * 1.5),
    )
    assert len({first, *others}) == 1 + len(others)


def test_the_hash_is_that_of_other_groups_of_a_mesh():
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    assert one.group_name != other.group_name
    assert hash_of(lambda x: reduced(x, one).exp()) == hash_of(lambda x: reduced(x, other).exp())


def test_which_of_two_sums_is_read_changes_the_hash():
    def two(which: int) -> Callable[[Tensor], Tensor]:
        return lambda x: (reduced(x), reduced(x.sin()))[which].exp()

    assert hash_of(two(0)) != hash_of(two(1))


def graphs(function: Callable[..., Tensor], *inputs: Tensor) -> list[fx.GraphModule]:
    """The graphs that Dynamo captures of a call."""
    torch._dynamo.reset()
    found: list[fx.GraphModule] = []
    torch.compile(function, backend=lambda gm, _: found.append(gm) or gm.forward)(*inputs)
    return found


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
