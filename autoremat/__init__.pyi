# The public interface, for type checkers and for `__init__.py`, which finds the module of each name here.

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
from autoremat.basics.errors import TransferError as TransferError
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
from autoremat.report.registry import reports as reports
from autoremat.report.report import Report as Report
from autoremat.step_profile.blocks import CompiledBlocks as CompiledBlocks
from autoremat.step_profile.blocks import compile_blocks as compile_blocks
from autoremat.step_profile.profile import profile_step as profile_step
from autoremat.tools.best_batch import best_batch as best_batch
from autoremat.tools.explain import explain as explain
from autoremat.tools.gather_reports import RankReports as RankReports
from autoremat.tools.gather_reports import gather_reports as gather_reports
from autoremat.tools.max_batch import max_batch as max_batch
from autoremat.tools.pareto import pareto as pareto
from autoremat.torch_private.pipelining import in_flight as in_flight

__version__: str
