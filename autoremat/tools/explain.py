"""What the backend would plan for a step, without running it: ``autoremat.explain``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from autoremat.basics.progress import now, status_if_slow
from autoremat.capture.capture import Capture
from autoremat.capture.pricing import ROOFLINE, priced
from autoremat.compiler.partitioner import Partitioner, free_device_bytes
from autoremat.compiler.preparation import captured
from autoremat.compiler.torch_partition import torch_partition_peak
from autoremat.options.options import Options
from autoremat.planner.cost import Pricing
from autoremat.report.report import Report
from autoremat.tools.dry_run import refuse_step_profiles, rehearsals
from autoremat.tools.trace import Target, Visitor, trace
from autoremat.torch_private import compat

T = TypeVar("T")

NEAR = 0.05
"""By so much of the smallest peak a budget may be above it and still depend on what code generation makes of the plan."""


@dataclass(frozen=True)
class Preview:
    """One joint graph of a step, captured and priced as the backend does it."""

    captured: Capture
    pricing: Pricing
    partitioner: Partitioner
    joint_inputs: Sequence[object]
    keywords: Mapping[str, Any]
    """What AOTAutograd passes to a partitioner beside the joint graph and its inputs."""

    def report(self) -> Report:
        """Plan. Raises ``BudgetInfeasible`` as the backend does."""
        self.partitioner.choose(self.captured, self.pricing)
        assert self.partitioner.report is not None
        return self.partitioner.report

    def report_and_doubt(self) -> tuple[Report, bool]:
        """Plan; and whether only generated code can tell if the budget is kept. Raises ``BudgetInfeasible``."""
        report, options = self.report(), self.partitioner.options
        budget, least = report.budget_bytes, report.minimum_peak_bytes + report.code_headroom_bytes
        tight = budget is not None and budget < (1 + NEAR) * least and not options.wants_whole_baseline
        lowers = self.partitioner.fuses and self.partitioner.cuda_name is None
        return report, tight and lowers and options.on_infeasible == "raise"


def explain(
    model_or_fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    lower: bool = False,
    **kwargs: Any,
) -> Report:
    """The plan that the backend would make for ``model_or_fn(*args, **kwargs)``, and why, without running or allocating.

    Only a calibration of the device, if it is here and never had one, does both.

    The model and its inputs may be real, fake or on the meta device; what counts of them is shapes and types. ``options`` are
    those of the backend. ``device``: where to plan for, a device of torch or a CUDA card by name, such as "H100-80GB", here
    or not; None: where the model is. ``memory_budget="auto"`` takes what the card has beside parameters, buffers and inputs.

    After graph breaks the report is that of the graph with the highest peak, and ``Report.others`` has those of the others.
    Under Inductor it is the plan that is first compiled; the backend makes it again if the generated code needs more. With
    ``lower=True`` Inductor generates the code, for a device that is here, and compiles no kernel of it: the report is that of
    the plan that is left in the end, with the peak of its code. That takes several times as long. A budget near the smallest
    peak is decided so without being asked, since there only the code can tell; kernels without a formula for their
    workspace run once by themselves, on made-up tensors, as when compiling.

    Raises ``BudgetInfeasible`` and ``OptionsError`` as the backend does, and ``CaptureError`` if the step cannot be traced.
    """
    parsed = Options.parse(options, None, compat.inductor_config_names)
    with status_if_slow("explaining the step", shown=parsed.progress):
        return explain_by(model_or_fn, args, kwargs, parsed, device, lower)


def explain_by(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
    lower: bool = False,
) -> Report:
    """:func:`explain` for options that are parsed."""
    if not lower:
        found, notes = previews(model_or_fn, args, kwargs, options, device, Preview.report_and_doubt)
        lower = any(doubtful for _, doubtful in found)
        reports = [report for report, _ in found]
    if lower:
        reports, notes = rehearsals(model_or_fn, args, kwargs, options, device)
    main = max(range(len(reports)), key=lambda number: reports[number].baseline_peak_bytes)
    if len(reports) > 1:
        notes = (*notes, f"{len(reports)} graphs train, this is number {main + 1}; their peaks can add up")
    own = [report.notes for report in reports]
    others = tuple(dataclasses.replace(r, notes=(*own[i], *notes[:-1])) for i, r in enumerate(reports) if i != main)
    return dataclasses.replace(reports[main], notes=(*own[main], *notes), others=others)


def previews(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
    look: Callable[[Preview], T],
) -> tuple[list[T], tuple[str, ...]]:
    """What ``look`` makes of each graph of the step that trains, in order (at least one), and notes on how they were had."""
    refuse_step_profiles(options)

    def visiting(target: Target, resident: int) -> Visitor[T | None]:
        planned_by = options
        if target.cuda_name is not None:
            planned_by = dataclasses.replace(options, cost_model=ROOFLINE)

        def free(traced_on: torch.device) -> int | None:
            if target.cuda_name is None:
                return free_device_bytes(traced_on)
            return None if target.memory_bytes is None else max(0, target.memory_bytes - resident)

        def visit(joint: fx.GraphModule, inputs: Sequence[object], keywords: Mapping[str, Any]) -> T | None:
            fuses = options.compiler == "inductor"
            now("reading the joint graph")
            compat.warn_of_torchs_budgets(joint)
            prepared = compat.prepare_joint(joint, keywords["num_fwd_outputs"])
            found = captured(prepared, keywords["num_fwd_outputs"], fuses, target.cuda_name)
            if found.graph.single_phase:
                return None
            found, pricing = priced(found, planned_by.cost_model)
            must_fit = options.on_infeasible == "raise"
            partitioner = Partitioner(
                planned_by, "", fuses=fuses, must_fit=must_fit, free_bytes=free, cuda_name=target.cuda_name
            )  # fmt: skip
            partitioner.torch_partition_peak = partial(torch_partition_peak, found, inputs, keywords)
            return look(Preview(found, pricing, partitioner, inputs, keywords))

        return visit

    return trace(model_or_fn, args, kwargs, options, device, visiting).results()
