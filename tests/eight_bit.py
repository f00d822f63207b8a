"""An optimizer with state of 8 bits: Adam with blocks of quantised moments, each with a scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

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
        self.steps_skipped = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Steps all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.abs().sum().item() == float("inf"):  # reads a number
                    self.steps_skipped += 1
                    continue
                self.step_one(parameter, group)

    def step_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Steps one parameter."""
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
