"""Steps and models under budgets on the emulated card: gradients, measured peaks, and peaks of the code as replayed."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

import autoremat
from autoremat.basics.errors import BudgetWarning
from autoremat.compiler.lowering import code_peaks
from autoremat.planner.memory.allocations import Allocations, joined
from autoremat.torch_private import inductor_lowering
from autoremat.torch_private.inductor_lowering import Origins
from emulated_cuda import allocation_log
from emulated_cuda.small_models import HAVE_DROPOUT, build

SEED = 7


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

    with mock.patch.object(inductor_lowering, "_lowered_peak", replay):
        yield found


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
    replayed = joined(peaks[False].allocations, peaks[True].allocations)
    return PlannedStep(result, autoremat.reports()[-1], max(code_peaks(peaks).values()), replayed)


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


ROUNDING = {torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""Largest relative error of a gradient against another order of the same arithmetic, by data type."""

Budget = float | int | None


def inductors_gradients(built: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the gradients of plain Inductor, the reference where the rounding that fused kernels omit decides."""
    module, inputs = on_card(built, dtype)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, shape_padding=False):
        return run_step(torch.compile(module), module, inputs).gradients


def checked(
    built: Any,
    dtype: torch.dtype,
    budgets: Sequence[Budget] = (None, 1),
    rounding: float | None = None,
    reference: tuple[Tensor, ...] | None = None,
    has_dropout: bool = False,
    **options: Any,
) -> list[PlannedStep]:
    """Runs a model under each budget. Asserts that measured and replayed peak agree to the byte, that budgets hold, and that
    gradients are those of the first step and of ``reference``, by default of eager code, which repeats no dropout."""
    rounding = ROUNDING[dtype] if rounding is None else rounding
    module, inputs = on_card(built, dtype)
    if reference is None and not has_dropout:
        reference = run_step(module, module, inputs).gradients
    steps: list[PlannedStep] = []
    for budget in budgets:
        chosen = {} if budget is None else {"memory_budget": budget, "on_infeasible": "best_effort"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # the best effort may exceed the budget
            steps.append(step := planned_step(module, inputs, **chosen, **options))
        peak, report, gradients = step.result.peak_bytes, step.report, step.result.gradients
        assert peak == step.replayed_bytes, budget
        assert peak <= report.compiled_peak_bytes, budget
        if report.within_budget and report.budget_bytes is not None:
            assert peak <= report.budget_bytes, budget
        assert budget != 1 or report.recomputed_ops > 0
        assert relative_error(gradients, steps[0].result.gradients) <= rounding, budget
        assert reference is None or relative_error(gradients, reference) <= rounding, budget
    return steps


def has_equal_bits(one: PlannedStep, other: PlannedStep) -> bool:
    return all(map(torch.equal, one.result.gradients, other.result.gradients))


def checked_model(name: str, dtype: torch.dtype, budgets: Sequence[Budget], rounding: float | None = None) -> list[PlannedStep]:
    """Checks a small model. Where rounding decides the sign of activations behind batch norm, or the experts of a token, the
    reference is eager code in float32, at weights and inputs of ``dtype``; ours may err half as much again as eager code."""
    built, reference = build(name), None
    if name in ("resnet", "experts") and dtype is not torch.float32:
        module, inputs = on_card(on_card(build(name), dtype))
        reference = run_step(module, module, inputs).gradients
        module, inputs = on_card(build(name), dtype)
        error = relative_error(run_step(module, module, inputs).gradients, reference)
        rounding = max(ROUNDING[dtype], 1.5 * error) if rounding is None else rounding
    return checked(built, dtype, budgets, rounding, reference, has_dropout=name in HAVE_DROPOUT)
