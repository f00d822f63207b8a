"""Triton kernels of the user on the emulated card: Inductor copies them into its code, and the interpreter runs them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime import JITFunction

import autoremat
from autoremat.ops import declarations
from autoremat.report.data import Decision
from emulated_cuda.cells import ROUNDING, cells_of, check
from emulated_cuda.steps import on_card, run_step

BLOCK = 1024


def compiled(function: Callable[..., None]) -> Any:
    """Returns the kernel that Dynamo recognises. Here `triton.jit` returns one for the interpreter, which it does not."""
    return JITFunction(function)


@compiled
def silu(x, result, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0.0)
    tl.store(result + place, value / (1 + tl.exp(-value)), mask=place < size)


@compiled
def silu_backward(x, gradient, result, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0.0)
    share = 1 / (1 + tl.exp(-value))
    incoming = tl.load(gradient + place, mask=place < size, other=0.0)
    tl.store(result + place, incoming * (share + value * share * (1 - share)), mask=place < size)


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        result = torch.empty_like(x)
        silu[(triton.cdiv(x.numel(), BLOCK),)](x, result, x.numel(), BLOCK=BLOCK)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        silu_backward[(triton.cdiv(x.numel(), BLOCK),)](x, gradient.contiguous(), result, x.numel(), BLOCK=BLOCK)
        return result


class Layers(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.activation = nn.ModuleList(nn.Linear(96, 96) for _ in range(4)), activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.square().mean()


@pytest.fixture
def built() -> Any:
    torch.manual_seed(0)
    return Layers(Silu.apply), (torch.randn(200, 96),)


@pytest.fixture
def forget() -> Iterator[None]:
    yield
    declarations._declared.clear()


@pytest.mark.slow
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_kernels_of_the_user_run(declared, built, forget):
    module, inputs = on_card(built)
    own, module.activation = module.activation, F.silu
    reference = run_step(module, module, inputs).gradients
    module.activation = own
    if declared:
        autoremat.declare_pure(silu)
    cells = list(cells_of("", (module, inputs), torch.float32, (None, 0.7, 1) if declared else (None,), reference))
    for cell in cells:
        check(cell, ROUNDING[torch.float32])
    decisions = [value.decision for value in autoremat.reports()[-1].values if "triton_kernel" in value.op]
    # Once the interpreter has run, torch reads no kernel and assumes that it writes all its operands.
    assert len(decisions) in (4, 8)
    assert (Decision.RECOMPUTED in decisions) == declared
    assert all(cell.has_equal_bits for cell in cells)
    assert not declared or cells[-1].measured_bytes < cells[0].measured_bytes
