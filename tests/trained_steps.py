"""One way to compile a step, to train it and to measure it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autoremat

EAGER: dict[str, Any] = {"compiler": "aot_eager", "cost_model": "roofline"}
LEAST: dict[str, Any] = EAGER | {"memory_budget": 1, "on_infeasible": "best_effort"}
"""A budget that nothing fits: best effort takes the plan of least memory."""


@dataclass(frozen=True)
class Trained:
    """The last of some equal steps."""

    tensors: list[Tensor]
    """The loss, the gradients of inputs and those of parameters."""
    peak: int
    report: autoremat.Report


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``function`` by the backend, anew; uncompiled graphs unless ``options`` say otherwise."""
    torch._dynamo.reset()
    return torch.compile(function, backend="autoremat", options=EAGER | options)


Leaves = nn.Module | list[Tensor]


def without_gradients(leaves: Leaves, *inputs: Tensor) -> list[Tensor]:
    tensors = [*inputs, *(leaves.parameters() if isinstance(leaves, nn.Module) else leaves)]
    for tensor in tensors:
        tensor.grad = None
    return tensors


def gradients(function: Callable[..., Tensor], leaves: Leaves, *inputs: Tensor, seed: int = 0) -> list[Tensor]:
    """The loss of one step, and the gradients of inputs and of ``leaves``."""
    tensors = without_gradients(leaves, *inputs)
    torch.manual_seed(seed)
    loss = function(*inputs)
    loss.backward()
    return [loss.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]


def measured(
    function: Callable[..., Tensor], leaves: Leaves, *inputs: Tensor, seed: int = 0, steps: int = 2
) -> tuple[list[Tensor], int]:
    """The tensors and the measured peak of the last of some equal steps, by default of one after that which compiles."""
    for _ in range(steps - 1):
        gradients(function, leaves, *inputs, seed=seed)
    without_gradients(leaves, *inputs)
    with autoremat.track_peak("cpu") as peak:
        found = gradients(function, leaves, *inputs, seed=seed)
    return found, peak.bytes


def trained(
    function: Callable[..., Tensor], leaves: Leaves, *inputs: Tensor, seed: int = 0, steps: int = 2, **options: Any
) -> Trained:
    """Compiles ``function``, runs some equal steps, and measures the last one."""
    found, peak = measured(compiled(function, **options), leaves, *inputs, seed=seed, steps=steps)
    return Trained(found, peak, autoremat.reports()[-1])


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest distance of a tensor from the wanted one, as a share of that one's norm."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


def assert_close(found: list[Tensor], wanted: list[Tensor], **tolerances: float) -> None:
    assert len(found) == len(wanted) > 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerances)
