"""A model, optimizers of several kinds, and the memory of their steps as it is measured."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.planner.multigraph.device_budget import LedgerRow

BLOCK = 256


def quantised(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 8 bits for each element and the scale of each block."""
    blocks = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
    return (blocks / scale * 127 + 128).round().to(torch.uint8), scale


def dequantised(bits: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the moment in the form of ``like``."""
    return ((bits.float() - 128) / 127 * scale).flatten()[: like.numel()].view_as(like)


class EightBitAdam(torch.optim.Optimizer):
    """Adam whose moments are stored in 8 bits, and in full only for the parameter that is stepped."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.abs().sum().item() < float("inf"):  # reads a number
                    self.step_one(parameter, group)

    def step_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad, (first, second) = self.state[parameter], parameter.grad, group["betas"]
        assert grad is not None
        if not state:
            state["step"] = 0
            state["mean"] = quantised(torch.zeros_like(parameter))
            state["square"] = quantised(torch.zeros_like(parameter))
        state["step"] += 1
        mean = dequantised(*state["mean"], parameter).mul_(first).add_(grad, alpha=1 - first)
        square = dequantised(*state["square"], parameter).mul_(second).addcmul_(grad, grad, value=1 - second)
        update = mean / (square.clamp_min(0) / (1 - second ** state["step"])).sqrt_().add_(1e-8)
        parameter.add_(update, alpha=-group["lr"] / (1 - first ** state["step"]))
        state["mean"], state["square"] = quantised(mean), quantised(square)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW loop": functools.partial(torch.optim.AdamW, foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "8-bit Adam": EightBitAdam,
}


class Model(nn.Module):
    """Residual blocks between an embedding and a loss, with a buffer."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                                    for _ in range(layers))  # fmt: skip
        self.head = nn.Linear(width, 64)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def bytes_of(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def row(budget: autoremat.DeviceBudget, name: str) -> LedgerRow:
    (found,) = [one for one in budget.rows if one.name == name]
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    leaves = torch.utils._pytree.tree_leaves([list(state.values()) for state in optimizer.state.values()])
    return bytes_of(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def measured_updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[int, int]:
    """The peaks of a first and of a second step, in bytes above the memory that is live before the first."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    tracker = autoremat.track_peak("cpu")
    with tracker:
        optimizer.step()
        tracker.mark()
        optimizer.step()
    first, later = tracker.readings
    return first.peak_bytes, later.peak_bytes


class Sorting(torch.optim.SGD):
    """Steps only where gradients are not zero: the sizes of its temporaries depend on data."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad[p.grad != 0].sum()
