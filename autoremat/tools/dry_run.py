"""Dry run with lowering: plans a step and generates its code without compiling kernels.

``autoremat.explain(..., lower=True)`` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import OptionsError
from autoremat.compiler.compile_loop import compile_graph
from autoremat.compiler.problem import Problem
from autoremat.options.options import Options
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet
from autoremat.report.report import Report
from autoremat.request.budgets import refuse_step_profiles
from autoremat.tools.trace import CapturedVisitor, Target, trace
from autoremat.torch_private import compilers, fake_tensors, inductor_lowering, named_card


def _refuse_without_code(options: Options, target: Target) -> None:
    if options.compiler != "inductor":
        raise OptionsError(
            f'lower=True: compiler={options.compiler!r} generates no code. Accepted with it: compiler="inductor"'
        )
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


def dry_runs(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
) -> tuple[list[Report], tuple[str, ...]]:
    """Returns the reports of the step's graphs that train, in sequence (at least one), and notes on the dry run.

    Raises ``OptionsError`` if ``compiler`` generates no code, if none can be generated here for the device, or if the budget is
    a step profile.
    """
    refuse_step_profiles(options)
    asked = compilers.asked_config(options)

    def visiting(target: Target, resident_bytes: int) -> CapturedVisitor[Report | None]:
        _refuse_without_code(options, target)

        def visit(module: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Report | None]:
            inputs = fake_tensors.own_inputs(inputs)
            request = replace(target.request(options, module, inputs, resident_bytes), on_planning_error="raise")
            patches = {**asked, **fake_tensors.RUNS_NOTHING}
            on_card = target.as_on_card(module)
            problem = Problem(request, on_card, inputs, patches, target.cuda_name, may_repeat_collectives=True)
            with target.tracing(), inductor_lowering.without_kernels():
                return [compile_graph(problem).report]

        return visit

    found, notes = trace(model_or_fn, args, kwargs, device, visiting)
    if left_out := [key for key in fake_tensors.RUNS_NOTHING if asked.get(key)]:
        notes = (*notes, f"code without {', '.join(left_out)}, which would run kernels to choose among them")
    return found, notes
