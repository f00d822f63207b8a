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
from autoremat.compiler.compile_loop import Compiled, CompileLoop, with_bytes
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.records import Record
from autoremat.options.options import Options
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.report.report import Report
from autoremat.tools.trace import Target, Visitor, trace
from autoremat.torch_private import compat, fake_tensors, lowering


class _DryRun(CompileLoop):
    """Compiles one graph as the backend does, up to its kernels. It saves no record and publishes no report."""

    report: Report | None = None

    def finish(self, compiled: Compiled, partitioner: Partitioner, record: Record | None, replans: int) -> Compiled:
        self.report = self.completed(partitioner, record, replans)
        return compiled


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

    def visiting(target: Target, resident: int) -> Visitor[Report | None]:
        if target.cuda_name is not None:
            raise OptionsError(
                f"lower=True: code is generated for a device that is here, and {target.cuda_name} is known by name only. "
                "Accepted with it: lower=False"
            )

        def visit(module: fx.GraphModule, inputs: Sequence[object], _: Mapping[str, Any]) -> Report | None:
            dry_run = _DryRun(module, inputs, with_bytes(options, device_of_inputs(module, inputs)), patches)
            with lowering.without_kernels():
                dry_run.run()
            return dry_run.report

        return visit

    found, notes = trace(model_or_fn, args, kwargs, options, device, visiting, joint=False).results()
    if left_out:
        notes = (*notes, f"code without {', '.join(left_out)}, which would run kernels to choose among them")
    return found, notes
