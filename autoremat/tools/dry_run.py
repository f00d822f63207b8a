"""Dry run with lowering: plans a step and generates its code without compiling kernels.

``autoremat.explain(..., lower=True)`` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import OptionsError
from autoremat.compiler.compile_loop import compile_graph
from autoremat.compiler.lowering import GraphSource
from autoremat.options.options import Options
from autoremat.planner.cost import UNKNOWN_GPU, datasheet
from autoremat.report.report import Report
from autoremat.request.budgets import refuse_step_profiles
from autoremat.tools.target import Target
from autoremat.tools.trace import CapturedVisitor, trace
from autoremat.torch_private import compilers, fake_tensors, inductor_lowering, named_card


def refuse_without_code(target: Target) -> None:
    """Raises ``OptionsError`` if no code can be generated here for the target."""
    if target.cuda_name is None:
        return
    if target.traced_on.type == "cuda":
        if datasheet(target.cuda_name) is datasheet(torch.cuda.get_device_name(target.traced_on)):
            return
        raise OptionsError(
            f"lower=True: {target.cuda_name} is another CUDA device than the one here, and Inductor generates code for that "
            'one. Possible: device="cuda", or CUDA_VISIBLE_DEVICES= (empty) in the environment, which hides the device'
        )
    if (datasheet(target.cuda_name) or UNKNOWN_GPU).is_of_rocm:
        raise OptionsError(
            f"lower=True: Inductor generates code for {target.cuda_name} only beside such a card. Possible here: lower=False"
        )
    if not named_card.generates_triton():
        raise OptionsError(
            f"lower=True: code for {target.cuda_name} is Triton code, and the package triton is not installed. Possible: "
            "pip install triton, or lower=False"
        )


@dataclass(frozen=True)
class DryRun:
    """Generates the code of a step's captured graphs for one target, and compiles no kernel."""

    options: Options
    target: Target
    resident_bytes: int
    """Bytes of the parameters, buffers and inputs."""

    def report(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Report | None:
        """Returns the report of the final plan with the peak of its code; None if the graph has no backward."""
        inputs = fake_tensors.own_inputs(inputs)
        request = self.target.request(self.options, module, inputs, self.resident_bytes)
        request = replace(request, on_planning_error="raise")
        patches = {**compilers.asked_config(self.options), **fake_tensors.RUNS_NOTHING}
        source = GraphSource(self.target.as_on_card(module), inputs, patches, self.target.cuda_name, True)
        with self.target.tracing(), inductor_lowering.without_kernels():
            return compile_graph(source, request).report


def dry_run(options: Options, target: Target, resident_bytes: int) -> DryRun:
    """Returns the dry run for the target.

    Raises ``OptionsError`` if ``compiler`` generates no code, or if none can be generated here for the target.
    """
    if options.compiler != "inductor":
        raise OptionsError(
            f'lower=True: compiler={options.compiler!r} generates no code. Accepted with it: compiler="inductor"'
        )
    refuse_without_code(target)
    return DryRun(options, target, resident_bytes)


def dry_runs(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
) -> tuple[list[Report], tuple[str, ...]]:
    """Returns the reports of the step's graphs that train, in sequence (at least one), and notes on the dry run.

    Raises ``OptionsError`` if no code can be generated, or if the budget is a step profile.
    """
    refuse_step_profiles(options)

    def visiting(target: Target, resident: int) -> CapturedVisitor[Report | None]:
        lowered = dry_run(options, target, resident)
        return lambda module, inputs: [lowered.report(module, inputs)]

    found, notes = trace(model_or_fn, args, kwargs, device, visiting)
    if left_out := [key for key in fake_tensors.RUNS_NOTHING if compilers.asked_config(options).get(key)]:
        notes = (*notes, f"code without {', '.join(left_out)}, which would run kernels to choose among them")
    return found, notes
