"""Models on several ranks: weights that the graph gathers, as SimpleFSDP does it, and a tensor-parallel decoder."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from block_models import FeedForward
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


TOKENS = 16
"""Number of different tokens."""


class Decoder(nn.Module):
    """A decoder without attention. ``scale`` multiplies the embedded tokens."""

    def __init__(self, layers: int, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.head, self.scale = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS, bias=False), scale
        self.layers = nn.ModuleList(FeedForward(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def tensor_parallel_decoder(layers: int, width: int, scale: float = 1.0) -> Decoder:
    """Returns a decoder that is split over all ranks of the default group."""
    torch.manual_seed(0)
    decoder, mesh = Decoder(layers, width, scale), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(decoder, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    for layer in decoder.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return decoder
