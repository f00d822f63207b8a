"""``autoremat.explain``: plans a step as the backend would, without running it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError
from autoremat.basics.progress import now, status_if_slow
from autoremat.basics.warn import warn_user
from autoremat.compiler.compile_loop import compile_graph
from autoremat.compiler.joint_graph import PricedGraph, warn_of_unused_forms
from autoremat.compiler.lowering import visited
from autoremat.compiler.planning import plan_graph
from autoremat.compiler.problem import Problem
from autoremat.compiler.reference import find_reference
from autoremat.options.options import Options
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet
from autoremat.report.report import Report
from autoremat.request.budgets import card_of
from autoremat.tools.advice import advise
from autoremat.tools.trace import Target, trace
from autoremat.torch_private import compilers, fake_tensors, inductor_lowering, named_card

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
    is_wish = isinstance(parsed.memory_budget, float) and parsed.on_infeasible is None
    strict = replace(parsed, on_infeasible="raise") if is_wish else parsed
    begin = time.perf_counter()
    with status_if_slow("explaining the step", shown=parsed.progress):
        try:
            return explain_by(model_or_fn, args, kwargs, strict, device, lower)
        except BudgetInfeasible as error:
            if advice:
                again, seconds = partial(explain_by, model_or_fn, device=device), time.perf_counter() - begin
                error.restate(advice=advise(again, strict, args, kwargs, error, seconds))
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
        reports, notes = trace(model_or_fn, args, kwargs, options, device, _lowered)
        if left_out := [key for key in fake_tensors.RUNS_NOTHING if compilers.asked_config(options).get(key)]:
            notes = (*notes, f"code without {', '.join(left_out)}, which would run kernels to choose among them")
    for report in reports:
        warn_of_unused_forms(report.unused_forms)
    main = max(range(len(reports)), key=lambda number: reports[number].baseline_peak_bytes)
    if len(reports) > 1:
        notes = (*notes, f"{len(reports)} graphs train, this is number {main + 1}; their peaks can add up")
    own = [report.notes for report in reports]
    others = tuple(replace(r, notes=(*own[i], *notes[:-1])) for i, r in enumerate(reports) if i != main)
    return replace(reports[main], notes=(*own[main], *notes), others=others)


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
    """Returns the results of ``look`` for the step's graphs that train, in sequence (at least one), and notes on the trace."""

    def visit(target: Target, problem: Problem, module: fx.GraphModule) -> T | None:
        problem = replace(problem, lowers=target.cuda_name is None)
        with target.tracing():
            find_reference(problem)
        now("tracing forward and backward")
        with target.tracing():
            return visited(problem, target.as_on_card(module), problem.inputs, look)

    return trace(model_or_fn, args, kwargs, options, device, visit)


def _lowered(target: Target, problem: Problem, module: fx.GraphModule) -> Report | None:
    """Returns the report of a graph whose code is generated. Raises ``OptionsError`` if none can be generated here."""
    name, sheet = target.cuda_name or "", datasheet(target.cuda_name or "") or UNKNOWN_GPU
    why = ""
    if problem.request.options.compiler != "inductor":
        why = f'compiler={problem.request.options.compiler!r} generates no code. Accepted with it: compiler="inductor"'
    elif name and target.traced_on.type == "cuda":
        if datasheet(name) is not datasheet(torch.cuda.get_device_name(target.traced_on)):
            why = (
                f"{name} is another CUDA device than the one here, and Inductor generates code for that one. Possible: "
                'device="cuda", or CUDA_VISIBLE_DEVICES= (empty) in the environment, which hides the device'
            )
    elif name and sheet.is_of_rocm:
        why = f"Inductor generates code for {name} only beside such a card. Possible here: lower=False"
    elif name and not named_card.generates_triton():
        why = (
            f"code for {name} is Triton code, and the package triton is not installed. Possible: pip install triton, or "
            "lower=False"
        )
    if why:
        raise OptionsError(f"lower=True: {why}")
    request = replace(problem.request, on_planning_error="raise")
    problem = replace(problem, request=request, module=target.as_on_card(module))
    with target.tracing(), inductor_lowering.without_kernels():
        return compile_graph(problem).report
