"""Cells: a model in a data type under a budget on the emulated card, with its peaks and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

from autoremat.basics.errors import BudgetWarning
from emulated_cuda.small_models import HAVE_DROPOUT, build
from emulated_cuda.steps import on_card, planned_step, relative_error, run_step

Budget = float | int | None

BUDGETS: tuple[Budget, ...] = (None, 0.7, 1)
"""No budget, a share of the baseline's peak, and one byte: the smallest plan there is."""


@dataclass(frozen=True)
class Cell:
    """A step as planned and as run. Sizes are in bytes."""

    model: str
    data_type: str
    budget: Budget
    """As asked for."""
    budget_bytes: int | None
    within_budget: bool | None
    predicted_bytes: int
    compiled_bytes: int
    """The peak in the report: the replayed one with workspaces and code headroom."""
    replayed_bytes: int
    measured_bytes: int
    recomputed_ops: int
    error_to_torch: float | None
    """Largest relative error of a gradient, to eager code or to plain Inductor. None with dropout."""
    error_to_first: float
    """The same to the step without a budget."""
    has_equal_bits: bool
    """True if all gradients have the bits of the step without a budget."""


def inductors_gradients(built: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the gradients of plain Inductor, the reference where the rounding that fused kernels omit decides."""
    module, inputs = on_card(built, dtype)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, shape_padding=False):
        return run_step(torch.compile(module), module, inputs).gradients


def cells_of(
    name: str,
    built: Any,
    dtype: torch.dtype,
    budgets: Sequence[Budget] = BUDGETS,
    reference: tuple[Tensor, ...] | None = None,
    has_dropout: bool = False,
    **options: Any,
) -> Iterator[Cell]:
    """Runs a model under each budget. ``reference`` are gradients to compare with, by default those of eager code."""
    module, inputs = on_card(built, dtype)
    if reference is None and not has_dropout:
        reference = run_step(module, module, inputs).gradients
    first: tuple[Tensor, ...] | None = None
    for budget in budgets:
        chosen = {} if budget is None else {"memory_budget": budget, "on_infeasible": "best_effort"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # the best effort may exceed the budget
            step = planned_step(module, inputs, **chosen, **options)
        gradients, report = step.result.gradients, step.report
        first = first or gradients
        assert report.compiled_peak_bytes is not None
        yield Cell(
            model=name, data_type=str(dtype).removeprefix("torch."), budget=budget, budget_bytes=report.budget_bytes,
            within_budget=report.within_budget, predicted_bytes=report.predicted_peak_bytes,
            compiled_bytes=report.compiled_peak_bytes, replayed_bytes=step.replayed_bytes,
            measured_bytes=step.result.peak_bytes, recomputed_ops=report.recomputed_ops,
            error_to_torch=None if reference is None else relative_error(gradients, reference),
            error_to_first=relative_error(gradients, first), has_equal_bits=all(map(torch.equal, gradients, first)),
        )  # fmt: skip


def cells_of_model(name: str, dtype: torch.dtype, budgets: Sequence[Budget] = BUDGETS) -> Iterator[Cell]:
    """Runs a small model under the budgets."""
    # In 16 bits, rounding decides the sign of activations behind batch norm, and the experts that a token takes.
    rounds = name in ("resnet", "experts") and dtype is not torch.float32
    reference = inductors_gradients(build(name), dtype) if rounds else None
    return cells_of(name, build(name), dtype, budgets, reference=reference, has_dropout=name in HAVE_DROPOUT)


ROUNDING = {torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""Largest relative error of a gradient against another order of the same arithmetic, by data type."""

FLIP = 5e-3
"""The same for networks with ReLU: one activation of a million that rounds to the other side of zero."""


def check(cell: Cell, rounding: float, flips: bool = False) -> None:
    """Asserts that measured and replayed peak agree to the byte, that the budget holds, and that gradients are right."""
    assert cell.measured_bytes == cell.replayed_bytes, cell
    assert cell.measured_bytes <= cell.compiled_bytes, cell
    if cell.within_budget and cell.budget_bytes is not None:
        assert cell.measured_bytes <= cell.budget_bytes, cell
    assert cell.budget != 1 or cell.recomputed_ops > 0, cell
    assert cell.error_to_first <= rounding, cell
    assert (cell.error_to_torch or 0.0) <= max(rounding, FLIP * flips), cell
