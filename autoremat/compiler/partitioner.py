"""The partitioner that AOTAutograd calls with the joint graph: captures, plans, rewrites and reports."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import (
    AutorematError,
    BudgetInfeasible,
    BudgetWarning,
    ConstraintWarning,
    FallbackWarning,
    Occupant,
    OptionsError,
    fallback_message,
    planning_error,
)
from autoremat.basics.progress import now
from autoremat.capture import source_info
from autoremat.capture.capture import Capture, capture
from autoremat.capture.pricing import priced
from autoremat.compiler.cache_key import source_hash
from autoremat.compiler.loss_chunking import Choice, ChunkingCandidate, Parts
from autoremat.compiler.preparation import captured
from autoremat.compiler.replay_context import code_headroom_bytes, replay_context
from autoremat.compiler.torch_partition import torch_partition_peak
from autoremat.options.options import Options
from autoremat.passes import apply_plan
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import ConstrainedGraph, Constraints
from autoremat.planner.cost import Pricing
from autoremat.planner.graph.graph import Kind, Role
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.planner.multigraph.fronts import point_of
from autoremat.planner.multigraph.ledger import PlanPoint, Share
from autoremat.planner.plans import plan_file
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.report.peak_snapshot import TensorCategory, peak_of
from autoremat.report.report import Report
from autoremat.torch_private import compat
from autoremat.workspaces.formulas import layout_copies_bytes

log = logging.getLogger("autoremat")

FREE_STEP = 64 * 2**20
OPTIMISM = 0.5
"""Excess of the simulated peak over the budget, as a share of the budget, up to which a plan's code is still generated.
Generated code often reuses more buffers than simulated, above all in unrolled loops."""


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the bytes that the step could allocate on ``device`` now; None on the CPU.

    The number counts free memory and the unused memory that torch's allocator holds.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    usable = int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    # Round down, so that a second compilation finds the same budget, and so the same plan, in the caches.
    return usable // FREE_STEP * FREE_STEP


@dataclass(repr=False, eq=False)
class Partitioner(compat.CustomPartitionerFn):
    """The partitioner of one attempt.

    ``extra_headroom_bytes`` lowers the budget of the plan, because the code of an earlier plan needed more memory than
    simulated. After the call, ``report`` describes the plan. It stays None if a cache answered for the graph, or if the graph
    has no backward.
    """

    options: Options
    fingerprint: str
    extra_headroom_bytes: int = 0
    fuses: bool = True
    must_fit: bool = True
    """True: raise an error if no plan fits. False: take the plan with the minimum peak."""
    free_bytes: Callable[[torch.device], int | None] = free_device_bytes
    """Bytes free on a device, from which an "auto" budget is derived; None if they are unknown."""
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for, if another device stands in for it. Generated code then decides nothing."""
    report: Report | None = field(default=None, init=False)
    plan: Plan | None = field(default=None, init=False)
    planning: PlanningResult | None = field(default=None, init=False)
    planner: Planner | None = field(default=None, init=False)
    replay_context: ReplayContext = field(default_factory=ReplayContext, init=False)
    exhausted: bool = field(default=False, init=False)
    """True if no other plan can be tried: the plan is stored, or it has the minimum peak because none fits in simulation."""
    memory_first: bool = field(default=False, init=False)
    """True if Inductor must keep the backward's sequence of ops and free each buffer after its last use. The plan of least time
    needs neither."""

    is_region: bool = field(default=False, init=False)
    """True if the graph is a nested compile region, which torch partitions first and without inputs. The surrounding graph may
    recompute the whole region. The budget is therefore no hard limit for it, and a share of its own peak has no meaning."""
    inputs_kept: frozenset[int] = field(default=frozenset(), init=False)
    """Numbers of the values that are inputs of the graph, but not parameters or buffers."""
    code_headroom_bytes: int = field(default=0, init=False)
    """Code headroom: bytes that generated code may need above the simulated peak."""
    fell_back: bool = field(default=False, init=False)
    """True if planning failed and torch's partitioner takes the graph (fallback)."""
    plan_file: str | None = field(default=None, init=False)
    """Name of the plan file that is applied instead of a search."""
    torch_partition_peak: Callable[[], int | None] | None = field(default=None, init=False)
    """Computes the peak of torch's own partition of the graph; set until planning begins."""
    soft_budget_bytes: int | None = field(default=None, init=False)
    """Peak of torch's own partition in bytes, if it serves as a soft budget: without a budget the plan should not exceed it."""
    captured: Capture | None = field(default=None, init=False)
    """Capture of the graph that was chosen, with or without a chunked loss. It is set until the graph is rewritten."""

    def __post_init__(self) -> None:
        self.identity = ("autoremat", source_hash(), self.fingerprint, self.extra_headroom_bytes, self.must_fit)

    def uuid(self) -> Any:
        """Returns all that a compiled artifact depends on and that torch does not hash itself."""
        return self.identity

    # Torch copies, prints and hashes the configuration that contains this object. Only its identity matters there.

    def __getstate__(self) -> dict[str, Any]:
        return {"identity": self.identity}

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def __repr__(self) -> str:
        return f"Partitioner{self.identity}"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> compat.PartitionedModules:
        now("reading the joint graph")
        compat.warn_of_torchs_budgets(gm)
        joint = compat.prepare_joint(gm, kwargs["num_fwd_outputs"])
        untouched = copy.deepcopy(joint.graph)
        try:
            found = captured(joint, kwargs["num_fwd_outputs"], self.fuses, self.cuda_name)
            if found.graph.num_forward < len(found.graph.ops):
                self.torch_partition_peak = partial(torch_partition_peak, found, joint_inputs, kwargs)
                self.is_region = not joint_inputs
                return self.plan_and_split(found, kwargs.get("static_lifetime_input_indices") or ())
        except (BudgetInfeasible, OptionsError, ConstraintWarning, BudgetWarning):
            raise
        except Exception as error:  # models and ops are open-ended, so any error may occur; the graph shall train all the same
            if isinstance(error, AutorematError) and not self.options.falls_back:
                raise
            if not self.options.falls_back:
                raise planning_error(error, source_info.place_of(untouched)) from error
            joint.graph = untouched
            self.leave_to_torch(error, source_info.place_of(untouched))
        return compat.partition_as_torch_does(joint, joint_inputs, **kwargs)

    def plan_and_split(self, captured: Capture, static_inputs: Collection[int]) -> compat.PartitionedModules:
        """Returns the forward and the backward module of the plan for this graph."""
        captured, pricing = priced(captured, self.options.cost_model)
        self.inputs_kept = kept_inputs(captured, static_inputs)
        plan = self.choose(captured, pricing)
        now("writing forward and backward")
        captured, self.captured = self.captured or captured, None
        modules = apply_plan(captured, plan.schedule, static_inputs)
        self.replay_context = replay_context(captured)
        fastest = self.plan_for(None)
        binding = fastest is not None and plan.cost_seconds > fastest.cost_seconds
        self.memory_first = binding or any(captured.graph.ops[op].kind is Kind.EXTERN for op in plan.recomputed)
        self.plan = plan
        log.debug("%s", self.report.summary() if self.report else "")
        return modules

    def leave_to_torch(self, error: Exception, place: str) -> None:
        """Warns that no budget holds for this graph, and records the fallback."""
        self.fell_back, self.report, self.planning, self.exhausted = True, None, None, False
        log.info("planning failed", exc_info=error)
        warnings.warn(fallback_message(error, place), FallbackWarning, stacklevel=2)

    def worth_trying(self, plan: Plan, budget: int) -> bool:
        """Returns True if Inductor's code for ``plan`` may fit, although the simulated peak exceeds the budget."""
        return self.fuses and self.cuda_name is None and plan.peak_bytes <= budget * (1 + OPTIMISM)

    def plan_for(self, simulated_bytes: int | None) -> Plan | None:
        """Returns the plan for a simulated peak of at most ``simulated_bytes``, code headroom included (None: no limit).

        Returns None if no plan fits or nothing has been planned.
        """
        if self.planner is None:
            return None
        if simulated_bytes is None:
            return self.planner.fastest(self.accepts())
        return self.planner.choose(simulated_bytes - self.code_headroom_bytes, accepts=self.accepts())

    def accepts(self) -> Callable[[Plan], bool] | None:
        """Returns the condition that plans must meet beside the peak; None if there is none."""
        share = self.share
        if share is None:
            return None
        return lambda plan: share.holds(self.point_of(plan), self.extra_headroom_bytes)

    @property
    def share(self) -> Share | None:
        """The graph's share of a step's budget; None if the graph has a budget of its own."""
        budget = self.options.memory_budget
        return budget if isinstance(budget, Share) and not self.is_region else None

    def point_of(self, plan: Plan) -> PlanPoint:
        """Returns ``plan`` as a point in the ledger of the step."""
        return point_of(plan, self.inputs_kept if self.share is not None and self.share.borders else None)

    def limit_bytes(self, backward: bool) -> int | None:
        """Returns the limit in bytes on the code of one half; None for no limit."""
        if self.report is None or self.options.wants_whole_baseline:
            return None
        if self.plan is None or self.share is None:
            return self.report.budget_bytes
        if not backward:
            return self.share.forward_peak_bytes
        on_borders = self.point_of(self.plan).backward_peak_bytes - point_of(self.plan).backward_peak_bytes
        return self.share.backward_peak_bytes - on_borders

    def choose(self, captured: Capture, pricing: Pricing) -> Plan:
        """Returns the plan for the budget and sets the report.

        Raises ``BudgetInfeasible`` if no plan fits, ``must_fit`` is set, and the generated code is not expected to fit either.
        """
        start = time.perf_counter()
        self.find_soft_budget()  # do this before the planner's time begins, because torch's partitioner has no time limit
        now(f"planning {len(captured.graph.ops):,} ops, at most {self.options.time_limit:g} s")
        first = self.planner_of(captured)
        baseline = first[0].baseline
        device = compat.device_of(captured.joint)
        copies = layout_copies_bytes(captured.op_nodes, captured.runs_on)
        self.code_headroom_bytes = code_headroom_bytes(captured.graph) + copies if self.fuses else 0
        # The baseline's code needs the code headroom too, so a share is a share of both.
        budget = self.options.resolve_budget(baseline.peak_bytes + self.code_headroom_bytes, self.free_bytes(device))
        if self.is_region and isinstance(self.options.memory_budget, float):
            budget = None
        self.exhausted = False
        choice = self.whole_or_in_parts(captured, pricing, budget, first)
        chosen, whole = choice.taken, choice.whole
        captured, ordered, planning = chosen.captured, chosen.ordered, chosen.planning
        self.captured, self.planning, plan = captured, planning, planning.plan
        if plan is None:
            assert budget is not None
            plan = planning.smallest
            self.exhausted = True
            accepts = self.accepts()
            worth_trying = (accepts is None or accepts(plan)) and self.worth_trying(plan, budget)
            if self.must_fit and not self.is_region and not worth_trying:
                relaxed = self.smallest_unconstrained(captured, ordered)
                least = planning.smallest.peak_bytes + self.code_headroom_bytes  # the assumed peak of generated code
                raise infeasible(planning, budget, captured.device.name, least, self.plan_file, relaxed, choice.remedy)
        self.report = Report.of(
            dataclasses.replace(planning, baseline=baseline),
            plan,
            self.code_headroom_bytes + self.extra_headroom_bytes,
            budget_bytes=budget,
            soft_budget_bytes=self.soft_budget_bytes,
            planning_seconds=time.perf_counter() - start,
            compiler=self.options.compiler,
            device=captured.device.name,
            loss_chunks=chosen.parts,
            code_headroom_bytes=self.code_headroom_bytes,
            minimum_unchunked_bytes=None if whole is None else whole.planning.smallest.peak_bytes,
            unknown_workspaces=captured.unknown_workspaces,
            **dataclasses.asdict(chosen.pricing),
        )
        return plan

    def find_soft_budget(self) -> None:
        """Sets the soft budget to the peak of torch's partition if neither a budget, a stored plan nor a policy is given.

        Drops the function that computes it, and with it the graph that the function holds.
        """
        options, look = self.options, self.torch_partition_peak
        told = options.memory_budget is not None or options.plan or options.policy
        if look is not None and self.fuses and not (told or self.is_region):
            now("asking for torch's own partition")
            self.soft_budget_bytes = look()
        self.torch_partition_peak = None

    def whole_or_in_parts(
        self, captured: Capture, pricing: Pricing, budget: int | None, planner_at_hand: tuple[Planner, ConstrainedGraph]
    ) -> Choice:
        """Returns the choice between this graph and the same graph with a chunked loss, with the plans of both."""

        def recapture(joint: fx.GraphModule) -> tuple[Capture, Pricing]:
            again = capture(joint, captured.num_fwd_outputs, self.fuses, self.cuda_name)
            return priced(again, self.options.cost_model)

        def contend(form: Capture, its_pricing: Pricing, parts: int) -> ChunkingCandidate:
            planner, ordered = planner_at_hand if form is captured else self.planner_of(form)
            planning = self.search_or_apply(planner, budget, ordered)
            return ChunkingCandidate(form, its_pricing, planner, ordered, planning, parts)

        options = dataclasses.replace(self.options, chunk_loss=False) if self.is_region else self.options
        choice = Parts(options, recapture, contend).best(captured, pricing, self.share is None)
        if self.planner is not None:
            self.planner = choice.taken.planner
        return choice

    def planner_of(self, captured: Capture) -> tuple[Planner, ConstrainedGraph]:
        """Returns a planner of the graph under the constraints of the options, and the constrained graph."""
        ordered = constraints_of(self.options).apply(captured.graph)
        given = () if ordered.candidate is None else (ordered.candidate,)
        return Planner(ordered.graph, self.options.time_limit, given=given, soft_budget_bytes=self.soft_budget_bytes), ordered

    def search_or_apply(self, planner: Planner, budget: int | None, ordered: ConstrainedGraph) -> PlanningResult:
        """Returns the best plan found, or the stored plan or the policy's plan, which no search then replaces.

        Raises ``PlanFileError`` if the stored plan does not fit the graph.
        """
        if self.options.plan and not self.is_region:
            file, plan = plan_file.fitted(self.options.plan, planner.graph)
            self.plan_file, self.exhausted = file.name, True
            return planner.judge(plan, budget)
        self.planner = planner
        if self.options.memory_budget is None and ordered.candidate is not None:
            ordered.candidate.plan.check()
            return planner.judge(ordered.candidate.plan, None)
        return planner.find(
            None if budget is None else budget - self.code_headroom_bytes - self.extra_headroom_bytes, self.accepts()
        )

    def smallest_unconstrained(self, captured: Capture, ordered: ConstrainedGraph) -> int | None:
        """Returns the minimum peak found without constraints, in bytes; None if the options set no constraints."""
        if ordered.graph is captured.graph:
            return None
        return Planner(captured.graph, self.options.time_limit).search.smallest.peak_bytes


def constraints_of(options: Options) -> Constraints:
    """Returns the constraints of the options. With a budget, a policy only demands recomputation."""
    return Constraints(options.save, options.recompute, policies.parse(options.policy), exact=options.memory_budget is None)


def kept_inputs(captured: Capture, static_inputs: Collection[int]) -> frozenset[int]:
    """Returns the numbers of the graph's inputs that are neither parameters nor buffers. A saved input may stay live longer."""
    placeholders = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    static = {placeholders[index] for index in static_inputs}
    values = zip(captured.graph.values, captured.value_nodes, strict=True)
    return frozenset(
        number
        for number, (value, node) in enumerate(values)
        if value.role is Role.INPUT and node is not None and node.op == "placeholder" and node not in static
    )


def occupants_of(plan: Plan, minimum: int | None) -> list[Occupant]:
    """Returns the tensors and workspaces that are live at the peak of ``plan``.

    If ``minimum`` bytes exceed that peak, a last entry holds the difference, which is headroom for generated code.
    """
    moment = peak_of(plan, None)
    found = [] if moment is None else [
        Occupant(t.name if t.sort is not TensorCategory.WORKSPACE else f"workspace of {t.name}", t.bytes, t.module, t.source)
        for t in moment.alive
    ]  # fmt: skip
    rest = (minimum or 0) - plan.peak_bytes
    return [*found, Occupant("code headroom", rest)] if rest > 0 else found


def infeasible(
    planning: PlanningResult,
    budget: int,
    device: str,
    minimum: int | None = None,
    plan_file: str | None = None,
    without_orders: int | None = None,
    remedy: str = "",
) -> BudgetInfeasible:
    """Returns the error that names the budget, the minimum peak and the tensors that are live at that peak."""
    smallest = planning.smallest
    return BudgetInfeasible(
        budget_bytes=budget,
        minimum_bytes=smallest.peak_bytes if minimum is None else minimum,
        lower_bound_bytes=planning.lower_bound_bytes,
        occupants=occupants_of(smallest, minimum),
        device=device,
        plan_file=plan_file,
        unconstrained_bytes=without_orders,
        remedy=remedy,
    )
