"""A torch.compile backend that makes a training step fit a memory budget by recomputing activations.

    compiled = torch.compile(model, backend="autoremat", options={"memory_budget": "6GiB"})

    plan = autoremat.plan(autoremat.Graph.from_dag(seconds, sizes, edges), memory_budget=0.5)

The table below is the public interface. Names are looked up on first use, so that importing one of the pure modules
(`autoremat.graph`, ...) does not import torch.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import policies as policies
    from .comparison import pareto as pareto
    from .declarations import declare_pure as declare_pure
    from .dynamo_backend import backend as backend
    from .errors import AutorematError as AutorematError
    from .errors import BudgetInfeasible as BudgetInfeasible
    from .errors import BudgetWarning as BudgetWarning
    from .errors import OptionsError as OptionsError
    from .errors import OrderWarning as OrderWarning
    from .errors import PlanFileError as PlanFileError
    from .errors import PlanInvalid as PlanInvalid
    from .errors import SurveyError as SurveyError
    from .errors import UnplannedError as UnplannedError
    from .errors import UnplannedWarning as UnplannedWarning
    from .errors import UnsupportedTorchError as UnsupportedTorchError
    from .graph import Graph as Graph
    from .measure import track_peak as track_peak
    from .naming import name as name
    from .options import Options as Options
    from .options import configure as configure
    from .planning import plan as plan
    from .plans import Plan as Plan
    from .preview import explain as explain
    from .report import Report as Report
    from .report import reports as reports
    from .sizing import max_batch as max_batch
    from .steps.survey import survey as survey
    from .steps.surveyed import Survey as Survey

try:
    __version__ = version("autoremat")
except PackageNotFoundError:  # used from a clone that is not installed
    __version__ = "0+unknown"

_MODULE_OF = {
    "AutorematError": "errors",
    "BudgetInfeasible": "errors",
    "BudgetWarning": "errors",
    "Graph": "graph",
    "Options": "options",
    "OptionsError": "errors",
    "OrderWarning": "errors",
    "Plan": "plans",
    "PlanFileError": "errors",
    "PlanInvalid": "errors",
    "Report": "report",
    "Survey": "steps.surveyed",
    "SurveyError": "errors",
    "UnplannedError": "errors",
    "UnplannedWarning": "errors",
    "UnsupportedTorchError": "errors",
    "backend": "dynamo_backend",
    "configure": "options",
    "declare_pure": "declarations",
    "explain": "preview",
    "max_batch": "sizing",
    "name": "naming",
    "pareto": "comparison",
    "plan": "planning",
    "reports": "report",
    "survey": "steps.survey",
    "track_peak": "measure",
}

__all__ = [
    "AutorematError",
    "BudgetInfeasible",
    "BudgetWarning",
    "Graph",
    "Options",
    "OptionsError",
    "OrderWarning",
    "Plan",
    "PlanFileError",
    "PlanInvalid",
    "Report",
    "Survey",
    "SurveyError",
    "UnplannedError",
    "UnplannedWarning",
    "UnsupportedTorchError",
    "__version__",
    "backend",
    "configure",
    "declare_pure",
    "explain",
    "max_batch",
    "name",
    "pareto",
    "plan",
    "policies",
    "reports",
    "survey",
    "track_peak",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULE_OF.get(name, name)}", __name__)
    value: object = getattr(module, name) if name in _MODULE_OF else module
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    import_module(".naming", __name__)  # so that `torch.ops.autoremat.named` is there without a look-up here
