"""Models whose weights are sharded over the ranks of a group and gathered inside the compiled graph, as SimpleFSDP does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.utils import parametrize


class _Gather(torch.autograd.Function):
    """All-gathers a shard in ``dtype``; reduces and scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.shard_dtype = shard.dtype
        return functional.all_gather_tensor(shard.to(dtype), 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scattered = functional.reduce_scatter_tensor(gradient.contiguous(), "avg", 0, dist.group.WORLD)
        return scattered.to(ctx.shard_dtype), None


class Sharded(nn.Module):
    """The parametrization of a weight of which each rank holds an equal part of the rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, shard: Tensor) -> Tensor:
        return _Gather.apply(shard, self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


def shard_weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns ``model`` with every parameter sharded over all ranks, gathered as ``dtype`` where it is read."""
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, Sharded(dtype), unsafe=True)
    return model
