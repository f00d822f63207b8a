"""CUDA graphs, streams and kernels of the user on the emulated card, with the bytes of the replay."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from block_models import Chain, MeanSquare
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime import JITFunction

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.ops import declarations
from autoremat.report.decisions import Decision
from autoremat.torch_private import inductor_lowering
from emulated_cuda import graphs, small_models
from emulated_cuda.steps import (
    ROUNDING,
    checked,
    has_equal_bits,
    on_card,
    planned_step,
    relative_error,
    replayed_peaks,
    run_step,
)

BATCH = torch.Size((128, 64))
INPUT_BYTES = 4 * BATCH.numel()
TANGENT_BYTES = 512
"""The gradient of the loss, which autograd holds outside of the pool."""

RECORDED = {"triton.cudagraphs": True, "cost_model": "roofline"}


class Broken(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.first, self.second, self.split = nn.Linear(64, 256), nn.Linear(256, 16), split

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x))
        if self.split:
            hidden = hidden.cpu().sin().cuda() * hidden
        return self.second(hidden).square().mean()


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was recorded. Bytes outside of the pool are above those at its start."""

    gradients: tuple[Tensor, ...]
    pool_bytes: int
    other_bytes: int
    peak_bytes: int
    """Of both at one time."""
    halves: dict[bool, inductor_lowering.LoweredPeak]
    report: autoremat.Report


def recorded_step(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> RecordedStep:
    """Compiles ``module`` and returns its second step, in which torch records it. The first one warms up."""
    torch._dynamo.reset()
    settings = torch._inductor.config.patch(fx_graph_cache=False, shape_padding=False)
    with replayed_peaks() as halves, settings, torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(module, backend="autoremat", options=RECORDED | options)
        run_step(compiled, module, inputs)
        module.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        result = run_step(compiled, module, inputs)
    pool, outside = graphs.peaks()
    return RecordedStep(result.gradients, pool, outside - before, result.peak_bytes, dict(halves), autoremat.reports()[-1])


def tensor_bytes(step: RecordedStep) -> tuple[int, int]:
    """Returns the replayed bytes in the pool and outside of it, without code headroom and workspaces."""
    pools = [half.pool_bytes or 0 for half in step.halves.values()]
    return max(pools), max(half.peak_bytes - (half.pool_bytes or 0) for half in step.halves.values())


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_recorded_step_needs_the_pool_and_what_lies_outside(split):
    module, inputs = on_card((Broken(split), (torch.randn(BATCH),)))
    reference = run_step(module, module, inputs).gradients
    step = recorded_step(module, inputs)
    assert relative_error(step.gradients, reference) <= ROUNDING[torch.float32]
    assert (step.pool_bytes, step.other_bytes) == tensor_bytes(step)
    assert step.report.graph_pool_bytes == step.pool_bytes  # its kernels have no workspaces
    assert step.report.compiled_peak_bytes >= step.pool_bytes + step.other_bytes
    assert (step.other_bytes == TANGENT_BYTES) == (not split)
    if split:
        assert step.pool_bytes + step.other_bytes > step.peak_bytes  # they peak at different times
    else:
        whole = planned_step(module, inputs, cost_model="roofline")
        assert whole.report.graph_pool_bytes is None
        assert step.peak_bytes == whole.result.peak_bytes + INPUT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("llama", {"layers": 1}), ("gpt2", {"layers": 1}), ("resnet", {"blocks": 1})])
def test_recorded_models_keep_to_their_budgets(name, sizes):
    built = on_card(small_models.build(name, **sizes))
    free = recorded_step(*built)
    budget = int(0.8 * free.report.compiled_peak_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        tight = recorded_step(*built, memory_budget=budget, on_infeasible="best_effort")
    for step in (free, tight):
        assert (step.pool_bytes, step.other_bytes) == tensor_bytes(step)
        assert step.report.graph_pool_bytes >= step.pool_bytes
    assert tight.report.recomputed_ops > free.report.recomputed_ops
    assert tight.pool_bytes < free.pool_bytes
    assert not tight.report.within_budget or tight.pool_bytes + tight.other_bytes <= budget
    allowed = 5e-3 if name == "resnet" else ROUNDING[torch.float32]
    assert relative_error(tight.gradients, free.gradients) <= allowed


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 16)
        self.left, self.right = nn.Linear(128, 128), nn.Linear(128, 128)
        self.side, self.ready, self.done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    @torch.compiler.disable
    def branches(self, x: Tensor) -> Tensor:
        self.ready.record()
        with torch.cuda.stream(self.side):
            self.ready.wait()
            right = F.gelu(self.right(x))
            self.done.record()
        left = F.gelu(self.left(x))
        self.done.wait()
        return left + right

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.branches(F.gelu(self.first(x))))).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")  # the best effort exceeds one byte
def test_a_step_on_a_stream_of_its_own():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    module, inputs = on_card((MeanSquare(*layers), (torch.randn(256, 64),)))
    expected = planned_step(module, inputs, cost_model="roofline", memory_budget=1, on_infeasible="best_effort")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step = planned_step(module, inputs, cost_model="roofline", memory_budget=1, on_infeasible="best_effort")
    torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, step.result.gradients, expected.result.gradients))
    assert step.result.peak_bytes == step.replayed_bytes == expected.replayed_bytes
    assert step.report.recomputed_ops > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_streams_between_two_graphs():
    module, inputs = on_card((Branches(), (torch.randn(256, 64),)))
    reference = run_step(module, module, inputs).gradients
    step = planned_step(module, inputs, cost_model="roofline", memory_budget=1.0)
    assert relative_error(step.result.gradients, reference) <= ROUNDING[torch.float32]


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


@pytest.mark.slow
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_kernels_of_the_user_run(declared, monkeypatch):
    monkeypatch.setattr(declarations, "_declared", {})
    module, inputs = on_card((Chain(4, 96, activation=F.silu), (torch.randn(200, 96),)))
    reference = run_step(module, module, inputs).gradients
    module.activation = Silu.apply
    if declared:
        autoremat.declare_pure(silu)
    budgets = (None, 0.7, 1) if declared else (None,)
    steps = checked((module, inputs), torch.float32, budgets, reference=reference)
    decisions = [value.decision for value in autoremat.reports()[-1].values if "triton_kernel" in value.op]
    # Once the interpreter has run, torch reads no kernel and assumes that it writes all its operands.
    assert len(decisions) in (4, 8)
    assert (Decision.RECOMPUTED in decisions) == declared
    assert all(has_equal_bits(step, steps[0]) for step in steps)
    assert not declared or steps[-1].result.peak_bytes < steps[0].result.peak_bytes
