"""``autoremat.explain``: plans a step as the backend would, without running it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from autoremat.basics.errors import BudgetInfeasible, BudgetWarning
from autoremat.basics.progress import now, status_if_slow
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PricedGraph, warn_of_unused_forms
from autoremat.compiler.lowering import visited
from autoremat.compiler.planning import plan_graph
from autoremat.compiler.reference import find_reference
from autoremat.options.options import Options
from autoremat.report.report import Report
from autoremat.request.budgets import card_of, refuse_step_profiles
from autoremat.tools.advice import advise
from autoremat.tools.trace import CapturedVisitor, Target, dry_runs, trace
from autoremat.torch_private import compilers

T = TypeVar("T")

NEAR = 0.05
"""Share of the minimum peak by which a budget may exceed it and still need generated code to decide."""


def explain(
    model_or_fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    lower: bool = False,
    advice: bool = True,
    **kwargs: Any,
) -> Report:
    """Returns the report of the plan that the backend would choose for ``model_or_fn(*args, **kwargs)``.

    The step is traced without running it or allocating its tensors, which may be real, fake or on the meta device. Only kernels
    without a formula for their workspace run, once, on synthetic tensors, as in compilation. ``options`` are those of the
    backend. ``device`` is a device of torch, or a CUDA GPU by name, such as "H100-80GB", present or not. None means the card
    that a device budget names, else the device of the model; for the meta device CUDA if present, else the CPU.
    ``memory_budget="auto"`` is the free memory of a present device, or that of a named GPU without parameters, buffers and
    inputs. After graph breaks the report describes the graph with the highest peak without recomputation, and
    ``Report.others`` the other graphs. All peaks are in bytes.

    Under Inductor the report describes the first plan that is compiled. With ``lower=True`` Inductor generates the code and
    compiles no kernel, and the report describes the final plan with the peak of its code. This takes several times as long, and
    for a GPU by name needs the package triton. It happens by itself on a present device for a budget within 5 % of the minimum
    peak, where only the code can decide.

    Raises ``BudgetInfeasible`` and ``OptionsError`` as the backend does, and ``CaptureError`` if the step cannot be traced. An
    infeasible share is a ``BudgetWarning``. With ``advice``, other plans of a step that does not fit follow, for as long as the
    first one took. The text ends with the fastest that fits, and ``BudgetInfeasible.advice`` has all of them.
    """
    parsed = Options.parse(options, None, compilers.inductor_config_names)

    def explained(options: Options, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Report:
        return explain_by(model_or_fn, args, kwargs, options, device)

    is_wish = isinstance(parsed.memory_budget, float) and parsed.on_infeasible is None
    strict = replace(parsed, on_infeasible="raise") if is_wish else parsed
    begin = time.perf_counter()
    with status_if_slow("explaining the step", shown=parsed.progress):
        try:
            return explain_by(model_or_fn, args, kwargs, strict, device, lower)
        except BudgetInfeasible as error:
            if advice:
                error.restate(advice=advise(explained, strict, args, kwargs, error, time.perf_counter() - begin))
            if not is_wish:
                raise
            warn_user(f"{error}", BudgetWarning)
        return explain_by(model_or_fn, args, kwargs, parsed, device, lower)


def explain_by(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
    lower: bool = False,
) -> Report:
    """Returns the result of :func:`explain` for parsed options."""
    device = card_of(options) if device is None else device
    if not lower:
        found, notes = previews(model_or_fn, args, kwargs, options, device, _report_and_doubt)
        lower = any(doubtful for _, doubtful in found)
        reports = [report for report, _ in found]
    if lower:
        reports, notes = dry_runs(model_or_fn, args, kwargs, options, device)
    for report in reports:
        warn_of_unused_forms(report.unused_forms)
    main = max(range(len(reports)), key=lambda number: reports[number].baseline_peak_bytes)
    if len(reports) > 1:
        notes = (*notes, f"{len(reports)} graphs train, this is number {main + 1}; their peaks can add up")
    own = [report.notes for report in reports]
    others = tuple(dataclasses.replace(r, notes=(*own[i], *notes[:-1])) for i, r in enumerate(reports) if i != main)
    return dataclasses.replace(reports[main], notes=(*own[main], *notes), others=others)


def _report_and_doubt(priced: PricedGraph) -> tuple[Report, bool]:
    """Returns the report of the plan with the least peak found, and True if only generated code can tell that the budget holds.

    Raises ``BudgetInfeasible`` as the backend does.
    """
    planned, problem = plan_graph(priced), priced.problem
    report, planner = planned.report, planned.planner
    known = report.minimum_is_searched or report.minimum_peak_bytes <= report.lower_bound_bytes
    if planned.plan_file is None and not known and report.max_slowdown is None:
        planner.restart()
        smallest = min(planner.lowest.peak_bytes, report.minimum_peak_bytes)
        report = replace(report, smallest_peak_bytes=smallest, minimum_is_searched=True)
    budget, least = report.budget_bytes, report.minimum_peak_bytes + report.code_headroom_bytes
    tight = budget is not None and budget < (1 + NEAR) * least and not problem.request.limits.takes_whole_reference
    return report, tight and problem.request.must_fit and problem.decided_by_code


def previews(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
    look: Callable[[PricedGraph], T],
) -> tuple[list[T], tuple[str, ...]]:
    """Returns the results of ``look`` for the step's graphs that train (at least one, in sequence), and notes on the tracing.

    Raises ``OptionsError`` if the budget is a step profile.
    """
    refuse_step_profiles(options)

    def visiting(target: Target, resident_bytes: int) -> CapturedVisitor[T | None]:
        def visit(module: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[T | None]:
            problem = replace(target.problem(options, module, inputs, resident_bytes), lowers=target.cuda_name is None)
            with target.tracing():
                find_reference(problem)
            now("tracing forward and backward")
            with target.tracing():
                return [visited(problem, target.as_on_card(module), problem.inputs, look)]

        return visit

    return trace(model_or_fn, args, kwargs, device, visiting)
