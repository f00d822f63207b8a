"""The code that Inductor generates for the card: explained without a run, and every kernel compiled by Triton for sm_90.

These checks run without Triton's interpreter, because it takes the place of the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache

import autoremat
from autoremat.report.data import Decision
from autoremat.torch_private import inductor_lowering

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.S)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The wrapper code of all halves that Inductor generates."""
    found: list[str] = []
    original = inductor_lowering._lowered_peak

    def keep(lowering: Any, source: str, known: Any) -> Any:
        found.append(source)
        return original(lowering, source, known)

    monkeypatch.setattr(inductor_lowering, "_lowered_peak", keep)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.bfloat16), ("resnet", torch.float32)])
def test_every_kernel_of_an_explained_step_compiles(name, dtype, sources):
    module, inputs = models.build(name, **({} if name == "resnet" else {"layers": 2}))
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    options = {"cost_model": "roofline", "on_infeasible": "best_effort"}
    whole = autoremat.explain(module.to(dtype), *inputs, device="cuda", lower=True, options=options)
    assert whole.compiled_peak_bytes is not None
    budget = int(0.7 * whole.compiled_peak_bytes)
    report = autoremat.explain(module, *inputs, device="cuda", lower=True, options=options | {"memory_budget": budget})
    assert report.compiled_peak_bytes is not None
    assert report.compiled_peak_bytes < whole.compiled_peak_bytes
    assert report.recomputed_ops > 0
    # A kernel that has two names, as in the code of two plans, is compiled once.
    kernels = {code.replace(kernel, "kernel"): (code, kernel) for source in sources for kernel, code in KERNEL.findall(source)}
    assert len(kernels) >= 10
    with torch._inductor.config.patch(use_static_triton_launcher=False):  # a static launcher hides what was compiled
        for code, kernel in kernels.values():
            tuner = getattr(PyCodeCache.load(code), kernel)
            assert tuner._precompile_config(tuner.configs[0]).kernel.asm["cubin"]


@triton.jit
def silu(x, result, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size)
    tl.store(result + place, value * tl.sigmoid(value), mask=place < size)


@triton.jit
def silu_backward(x, gradient, result, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size)
    share = tl.sigmoid(value)
    incoming = tl.load(gradient + place, mask=place < size)
    tl.store(result + place, incoming * (share + value * share * (1 - share)), mask=place < size)


class Silu(torch.autograd.Function):
    """A function whose kernels the user wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        result = torch.empty_like(x)
        silu[(triton.cdiv(x.numel(), 1024),)](x, result, x.numel(), BLOCK=1024)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        silu_backward[(triton.cdiv(x.numel(), 1024),)](x, gradient.contiguous(), result, x.numel(), BLOCK=1024)
        return result


class OwnKernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Silu.apply(layer(x))
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_kernels_of_the_user_are_recomputed_if_declared(sources):
    module, x = OwnKernels().cuda(), torch.randn(512, 128, device="cuda")

    def smallest() -> autoremat.Report:
        options = {"memory_budget": 1, "on_infeasible": "best_effort"}
        return autoremat.explain(module, x, device="cuda", lower=True, options=options)

    def decisions(report: autoremat.Report) -> list[Decision]:
        return [value.decision for value in report.values if "triton_kernel" in value.op]

    def launches(kernel: str) -> list[str]:
        """Returns the launches in the backward."""
        return re.findall(rf"\b{kernel}_\d+\.run\(", sources[-1])

    undeclared = smallest()
    assert decisions(undeclared) == 4 * [Decision.SAVED]
    assert not launches("silu")
    autoremat.declare_pure(silu)
    declared = smallest()
    assert Decision.RECOMPUTED in decisions(declared)
    assert launches("silu")
    assert launches("silu_backward")
    assert not undeclared.notes
    assert not declared.notes  # no estimate
    assert declared.compiled_peak_bytes < undeclared.compiled_peak_bytes
