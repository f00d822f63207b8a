"""Training steps on the emulated card: gradients, measured peaks, and the peaks of the generated code as replayed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autoremat
from autoremat.compiler.lowering import Lowered
from autoremat.planner.memory.allocations import Allocations, joined
from autoremat.torch_private import inductor_lowering
from autoremat.torch_private.origins import Origins
from emulated_cuda import allocation_log

SEED = 7


class MeanSquare(nn.Module):
    """The mean of squares of what ``network`` computes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).square().mean()


@dataclass(frozen=True)
class StepResult:
    """One training step. ``peak_bytes`` is what the step allocated at most, above what was there before."""

    loss: float
    gradients: tuple[Tensor, ...]
    peak_bytes: int
    allocations: Allocations | None
    """The emulated card's own allocations in sequence. None on a real card."""


@dataclass(frozen=True)
class PlannedStep:
    """A step that was compiled and run under a budget."""

    result: StepResult
    report: autoremat.Report
    replayed_bytes: int
    """Peak of the accepted code by replay, without workspaces and code headroom: the emulated card allocates neither."""
    replayed: Allocations
    """The allocations of the accepted code by replay, without both."""


def run_step(function: Callable[..., Tensor], module: nn.Module, inputs: tuple[Tensor, ...]) -> StepResult:
    """Runs forward and backward of ``function``, a scalar loss, with gradients anew."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    torch.cuda.reset_peak_memory_stats()
    before, log = torch.cuda.memory_allocated(), next(iter(allocation_log.present), None)
    begin = 0 if log is None else len(log)
    loss = function(*inputs)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    allocations = None if log is None else log.step_since(begin)
    gradients = tuple(p.grad.detach().cpu().clone() for p in module.parameters() if p.grad is not None)
    return StepResult(float(loss.detach().cpu()), gradients, peak, allocations)


@contextlib.contextmanager
def replayed_peaks() -> Iterator[dict[bool, inductor_lowering.LoweredPeak]]:
    """Collects the peaks of both halves (backward: True) of the code that Inductor generates last, of its tensors alone."""
    found: dict[bool, inductor_lowering.LoweredPeak] = {}
    original = inductor_lowering._lowered_peak

    def replay(lowering: Any, source: str, known: Any) -> Any:
        with mock.patch.object(Origins, "workspace", return_value=None):
            bare = original(lowering, source, dataclasses.replace(known, workspaces={}, code_headroom_bytes=0))
        assert not bare.is_estimate, "the generated code is not replayed"
        found[bare.is_backward] = bare
        return original(lowering, source, known)

    inductor_lowering._lowered_peak = replay
    try:
        yield found
    finally:
        inductor_lowering._lowered_peak = original


def planned_step(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> PlannedStep:
    """Compiles ``module``, whose result is a scalar loss, and runs its second step."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    # Code from a cache is not replayed. Padding of matrix products asks the clock of the card.
    settings = torch._inductor.config.patch(fx_graph_cache=False, shape_padding=False)
    with replayed_peaks() as peaks, settings, torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(module, backend="autoremat", options=options)
        run_step(compiled, module, inputs)
        result = run_step(compiled, module, inputs)
    lowered = Lowered.of(peaks)
    replayed = joined(lowered.allocations[False], lowered.allocations[True])
    return PlannedStep(result, autoremat.reports()[-1], max(lowered.code_peaks.values()), replayed)


def on_card(built: tuple[nn.Module, tuple[Tensor, ...]], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Returns the model and its inputs on the card. Inputs of floats take ``dtype`` too."""
    module, inputs = built
    return module.to("cuda", dtype), tuple(x.to("cuda", dtype) if x.is_floating_point() else x.cuda() for x in inputs)


def relative_error(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Returns the largest distance of a gradient from its reference, as a share of its norm or of 1 % of the largest."""
    assert len(found) == len(wanted)
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    scale = max(float(b.norm()) for _, b in pairs)
    return max(float((a - b).norm() / max(float(b.norm()), 1e-2 * scale)) for a, b in pairs)
