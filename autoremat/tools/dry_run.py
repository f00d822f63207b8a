"""Dry run with lowering: plans a step and generates its code without compiling kernels.

``autoremat.explain(..., lower=True)`` uses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import OptionsError
from autoremat.capture.capture import device_of_inputs
from autoremat.compiler.compile_loop import compile_graph, with_bytes
from autoremat.compiler.lowering import GraphSource
from autoremat.options.options import Options
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.report.report import Report
from autoremat.tools.trace import CapturedVisitor, Target, trace_captured
from autoremat.torch_private import compat, fake_tensors, inductor_lowering


def refuse_step_profiles(options: Options) -> None:
    """Raises ``OptionsError`` if the budget is a step profile."""
    if isinstance(options.memory_budget, StepProfile):
        raise OptionsError(
            "memory_budget: a step profile shares its budget out among the graphs that are compiled; here each graph is "
            "planned by itself. Accepted here: bytes, a share or None; printing the profile shows the whole step"
        )


def dry_runs(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    device: str | torch.device | None,
) -> tuple[list[Report], tuple[str, ...]]:
    """Returns the reports of the step's graphs that train, in sequence (at least one), and notes on the dry run.

    Raises ``OptionsError`` if ``compiler`` generates no code, if the device is not present, or if the budget is a step profile.
    """
    refuse_step_profiles(options)
    if options.compiler != "inductor":
        raise OptionsError(
            f'lower=True: compiler={options.compiler!r} generates no code. Accepted with it: compiler="inductor"'
        )
    options = dataclasses.replace(options, on_planning_error="raise")
    asked = {**compat.mode_config(options.mode), **dict(options.inductor)}
    patches = {**asked, **fake_tensors.RUNS_NOTHING}
    left_out = [key for key in fake_tensors.RUNS_NOTHING if asked.get(key)]

    def visiting(target: Target, resident: int) -> CapturedVisitor[Report | None]:
        if target.cuda_name is not None:
            raise OptionsError(
                f"lower=True: code is generated for a device that is here, and {target.cuda_name} is known by name only. "
                "Accepted with it: lower=False"
            )

        def visit(module: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Report | None]:
            inputs = fake_tensors.own_inputs(inputs)
            by_bytes = with_bytes(options, device_of_inputs(module, inputs))
            with inductor_lowering.without_kernels():
                return [compile_graph(GraphSource(module, inputs, patches), by_bytes).report]

        return visit

    found, notes = trace_captured(model_or_fn, args, kwargs, device, visiting).results()
    if left_out:
        notes = (*notes, f"code without {', '.join(left_out)}, which would run kernels to choose among them")
    return found, notes
