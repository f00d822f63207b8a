"""A torch.compile backend that makes a training step fit a memory budget by recomputing activations.

    compiled = torch.compile(model, backend="autoremat", options={"memory_budget": "6GiB"})

    plan = autoremat.plan(autoremat.Graph.from_dag(seconds, sizes, edges), memory_budget=0.5)

The table below is the public interface. Names are looked up on first use, so that a program that only plans graphs does not
import torch.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from autoremat import deprecated

if TYPE_CHECKING:
    from autoremat import policies as policies
    from autoremat.basics.errors import AgreementError as AgreementError
    from autoremat.basics.errors import AutorematError as AutorematError
    from autoremat.basics.errors import BudgetInfeasible as BudgetInfeasible
    from autoremat.basics.errors import BudgetWarning as BudgetWarning
    from autoremat.basics.errors import CaptureError as CaptureError
    from autoremat.basics.errors import ConstraintWarning as ConstraintWarning
    from autoremat.basics.errors import DeviceTooSmall as DeviceTooSmall
    from autoremat.basics.errors import FallbackWarning as FallbackWarning
    from autoremat.basics.errors import OptimizerUnpredictable as OptimizerUnpredictable
    from autoremat.basics.errors import OptionsError as OptionsError
    from autoremat.basics.errors import OptionWarning as OptionWarning
    from autoremat.basics.errors import PlanFileError as PlanFileError
    from autoremat.basics.errors import PlanInvalid as PlanInvalid
    from autoremat.basics.errors import PlanningError as PlanningError
    from autoremat.basics.errors import StepProfileError as StepProfileError
    from autoremat.basics.errors import UnsupportedTorchError as UnsupportedTorchError
    from autoremat.capture.tensor_names import name as name
    from autoremat.compiler.dynamo_backend import backend as backend
    from autoremat.device_memory.budget import device_budget as device_budget
    from autoremat.measure.peak import track_peak as track_peak
    from autoremat.ops.declarations import declare_pure as declare_pure
    from autoremat.options.options import Options as Options
    from autoremat.options.options import configure as configure
    from autoremat.planner.api import plan as plan
    from autoremat.planner.graph.graph import Graph as Graph
    from autoremat.planner.multigraph.device_budget import DeviceBudget as DeviceBudget
    from autoremat.planner.multigraph.device_budget import OptimizerMemory as OptimizerMemory
    from autoremat.planner.multigraph.step_profile import StepProfile as StepProfile
    from autoremat.planner.plans.plan import Plan as Plan
    from autoremat.report.rank_reports import RankReports as RankReports
    from autoremat.report.registry import reports as reports
    from autoremat.report.report import Report as Report
    from autoremat.step_profile.blocks import CompiledBlocks as CompiledBlocks
    from autoremat.step_profile.blocks import compile_blocks as compile_blocks
    from autoremat.step_profile.profile import profile_step as profile_step
    from autoremat.tools.best_batch import best_batch as best_batch
    from autoremat.tools.eager_checkpoint import selective_checkpoint_context as selective_checkpoint_context
    from autoremat.tools.explain import explain as explain
    from autoremat.tools.gather_reports import gather_reports as gather_reports
    from autoremat.tools.max_batch import max_batch as max_batch
    from autoremat.tools.pareto import pareto as pareto
    from autoremat.tools.pipelines import in_flight as in_flight

try:
    __version__ = version("autoremat")
except PackageNotFoundError:  # used from a clone that is not installed
    __version__ = "0+unknown"

_PUBLIC = {
    "basics.errors": (
        "AgreementError",
        "AutorematError",
        "BudgetInfeasible",
        "BudgetWarning",
        "CaptureError",
        "OptionsError",
        "OptionWarning",
        "ConstraintWarning",
        "PlanFileError",
        "PlanInvalid",
        "StepProfileError",
        "DeviceTooSmall",
        "OptimizerUnpredictable",
        "PlanningError",
        "FallbackWarning",
        "UnsupportedTorchError",
    ),
    "planner.graph.graph": ("Graph",),
    "planner.plans.plan": ("Plan",),
    "planner.api": ("plan",),
    "planner.multigraph.step_profile": ("StepProfile",),
    "planner.multigraph.device_budget": ("DeviceBudget", "OptimizerMemory"),
    "device_memory.budget": ("device_budget",),
    "options.options": (
        "Options",
        "configure",
    ),
    "report.report": ("Report",),
    "report.rank_reports": ("RankReports",),
    "report.registry": ("reports",),
    "ops.declarations": ("declare_pure",),
    "measure.peak": ("track_peak",),
    "capture.tensor_names": ("name",),
    "compiler.dynamo_backend": ("backend",),
    "step_profile.blocks": ("CompiledBlocks", "compile_blocks"),
    "step_profile.profile": ("profile_step",),
    "tools.explain": ("explain",),
    "tools.pareto": ("pareto",),
    "tools.gather_reports": ("gather_reports",),
    "tools.pipelines": ("in_flight",),
    "tools.max_batch": ("max_batch",),
    "tools.best_batch": ("best_batch",),
    "tools.eager_checkpoint": ("selective_checkpoint_context",),
}
"""The public names by module."""

_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(["__version__", "policies", *_MODULE_OF])


def __getattr__(name: str) -> object:
    if name in deprecated.NAMES:
        new = deprecated.NAMES[name]
        deprecated.warn_of(name, new)
        return getattr(import_module(f"autoremat.{_MODULE_OF[new]}"), new)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"autoremat.{_MODULE_OF.get(name, name)}")
    value: object = getattr(module, name) if name in _MODULE_OF else module
    deprecated.install()
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    import_module("autoremat.capture.tensor_names")  # so that `torch.ops.autoremat.named` is there without a look-up here
