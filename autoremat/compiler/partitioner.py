"""The partitioner that AOTAutograd calls with the joint graph: capture, plan, rewrite, report."""

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
"""By how much the simulated peak may be over the budget for the generated code to be tried: it reuses more than is simulated,
in unrolled loops most of all."""


def free_device_bytes(device: torch.device) -> int | None:
    """Bytes that the step could allocate on ``device`` now (free, or held by torch's allocator unused); None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    usable = int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    # In steps, so that compiling again finds the same budget, and so the same plan, in the caches.
    return usable // FREE_STEP * FREE_STEP


@dataclass(repr=False, eq=False)
class Partitioner(compat.CustomPartitionerFn):
    """One compilation's partitioner. ``extra_headroom_bytes`` is how far below the budget to plan, because the code generator's
    schedule of an earlier plan turned out so much larger than simulated.

    After the call, ``report`` holds what was planned; while it is None the graph was answered from a cache or has no
    backward.
    """

    options: Options
    fingerprint: str
    extra_headroom_bytes: int = 0
    fuses: bool = True
    must_fit: bool = True
    """Whether to raise if nothing fits; else the plan of least memory is taken."""
    free_bytes: Callable[[torch.device], int | None] = free_device_bytes
    """What an "auto" budget is taken from: bytes free on the device; None where that is not known."""
    cuda_name: str | None = None
    """The CUDA device that is planned for, if the one at hand only stands for it: then no code decides what fits."""
    report: Report | None = field(default=None, init=False)
    plan: Plan | None = field(default=None, init=False)
    planning: PlanningResult | None = field(default=None, init=False)
    planner: Planner | None = field(default=None, init=False)
    replay_context: ReplayContext = field(default_factory=ReplayContext, init=False)
    exhausted: bool = field(default=False, init=False)
    """Whether there is no other plan to try: it is stored, or the one of least memory, because none fits by the simulator's
    count."""
    memory_first: bool = field(default=False, init=False)
    """Whether the code generator is to put the planned memory before speed: a plan of least time needs no such thing."""

    is_region: bool = field(default=False, init=False)
    """Whether the graph at hand is a nested compile region, which torch has partitioned first, without inputs. The graph around
    it may recompute it whole, so alone it only has to fit the budget if it can, and a share of its own peak means nothing."""
    inputs_kept: frozenset[int] = field(default=frozenset(), init=False)
    """The values of the graph that are inputs, but not parameters."""
    code_headroom_bytes: int = field(default=0, init=False)
    """What generated code may need beside what is simulated."""
    fell_back: bool = field(default=False, init=False)
    """Whether planning failed and the graph was left to torch's partitioner."""
    plan_file: str | None = field(default=None, init=False)
    """The stored plan that is applied instead of planning."""
    torch_partition_peak: Callable[[], int | None] | None = field(default=None, init=False)
    """What tells the peak of torch's own partition of the graph at hand, until planning begins."""
    soft_budget_bytes: int | None = field(default=None, init=False)
    """That peak, if it stands for a budget: a plan without one is not to exceed it."""
    captured: Capture | None = field(default=None, init=False)
    """The graph that was chosen, until it is rewritten: the one at hand, or the same with its loss in parts."""

    def __post_init__(self) -> None:
        self.identity = ("autoremat", source_hash(), self.fingerprint, self.extra_headroom_bytes, self.must_fit)

    def uuid(self) -> Any:
        """All that a compiled artifact depends on beside what torch hashes itself."""
        return self.identity

    # Torch copies, prints and hashes the configuration that holds this object: only its identity matters there.

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
        except Exception as error:  # models and torch's ops are open-ended: what we fail on must train all the same
            if isinstance(error, AutorematError) and not self.options.falls_back:
                raise
            if not self.options.falls_back:
                raise planning_error(error, source_info.place_of(untouched)) from error
            joint.graph = untouched
            self.leave_to_torch(error, source_info.place_of(untouched))
        return compat.partition_as_torch_does(joint, joint_inputs, **kwargs)

    def plan_and_split(self, captured: Capture, static_inputs: Collection[int]) -> compat.PartitionedModules:
        """Plan under the budget; the forward and the backward that the plan asks for."""
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
        """Say that no budget holds for this graph, and why."""
        self.fell_back, self.report, self.planning, self.exhausted = True, None, None, False
        log.info("planning failed", exc_info=error)
        warnings.warn(fallback_message(error, place), FallbackWarning, stacklevel=2)

    def worth_trying(self, plan: Plan, budget: int) -> bool:
        """Whether the code generator may make ``plan`` fit though the simulator or an earlier try says that it does not."""
        return self.fuses and self.cuda_name is None and plan.peak_bytes <= budget * (1 + OPTIMISM)

    def plan_for(self, simulated_bytes: int | None) -> Plan | None:
        """What would be planned for a simulated peak of at most so many bytes (None: no bound). None if nothing fits or nothing
        was planned."""
        if self.planner is None:
            return None
        if simulated_bytes is None:
            return self.planner.fastest(self.accepts())
        return self.planner.choose(simulated_bytes - self.code_headroom_bytes, accepts=self.accepts())

    def accepts(self) -> Callable[[Plan], bool] | None:
        """What a plan must hold to beside the peak; None for nothing."""
        share = self.share
        if share is None:
            return None
        return lambda plan: share.holds(self.point_of(plan), self.extra_headroom_bytes)

    @property
    def share(self) -> Share | None:
        """The graph's share of a step's budget, if it has none of its own."""
        budget = self.options.memory_budget
        return budget if isinstance(budget, Share) and not self.is_region else None

    def point_of(self, plan: Plan) -> PlanPoint:
        """``plan`` as the ledger of the step has it."""
        return point_of(plan, self.inputs_kept if self.share is not None and self.share.borders else None)

    def limit_bytes(self, backward: bool) -> int | None:
        """What the code of one half may need; None for no bound."""
        if self.report is None or self.options.wants_whole_baseline:
            return None
        if self.plan is None or self.share is None:
            return self.report.budget_bytes
        if not backward:
            return self.share.forward_peak_bytes
        on_borders = self.point_of(self.plan).backward_peak_bytes - point_of(self.plan).backward_peak_bytes
        return self.share.backward_peak_bytes - on_borders

    def choose(self, captured: Capture, pricing: Pricing) -> Plan:
        """Plan under the budget and write the report. Raises ``BudgetInfeasible`` if nothing fits and that is asked for."""
        start = time.perf_counter()
        self.find_soft_budget()  # before the planner's time begins: torch's partitioner has no limit
        now(f"planning {len(captured.graph.ops):,} ops, at most {self.options.time_limit:g} s")
        first = self.planner_of(captured)
        baseline = first[0].baseline
        device = compat.device_of(captured.joint)
        copies = layout_copies_bytes(captured.op_nodes, captured.runs_on)
        self.code_headroom_bytes = code_headroom_bytes(captured.graph) + copies if self.fuses else 0
        # Code without recomputation needs the reserve too: so it is part of what a share is of.
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
                least = planning.smallest.peak_bytes + self.code_headroom_bytes  # what generated code is taken to need
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
        """Where nothing else says what to do, ask for the peak of torch's partition; forget the graph that it was had of."""
        options, look = self.options, self.torch_partition_peak
        told = options.memory_budget is not None or options.plan or options.policy
        if look is not None and self.fuses and not (told or self.is_region):
            now("asking for torch's own partition")
            self.soft_budget_bytes = look()
        self.torch_partition_peak = None

    def whole_or_in_parts(
        self, captured: Capture, pricing: Pricing, budget: int | None, planner_at_hand: tuple[Planner, ConstrainedGraph]
    ) -> Choice:
        """The graph to take, at hand or with its loss in parts, with what was planned for it, and for the one at hand."""

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
        """A planner of the graph with what the options order."""
        ordered = constraints_of(self.options).apply(captured.graph)
        given = () if ordered.candidate is None else (ordered.candidate,)
        return Planner(ordered.graph, self.options.time_limit, given=given, soft_budget_bytes=self.soft_budget_bytes), ordered

    def search_or_apply(self, planner: Planner, budget: int | None, ordered: ConstrainedGraph) -> PlanningResult:
        """Look for the best plan, or take the stored one or the policy's, which nothing then replaces. Raises
        ``PlanFileError``."""
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
        """The smallest peak found if the options order nothing; None if they do not."""
        if ordered.graph is captured.graph:
            return None
        return Planner(captured.graph, self.options.time_limit).search.smallest.peak_bytes


def constraints_of(options: Options) -> Constraints:
    """What the options order. With a budget, a policy only says what is recomputed."""
    return Constraints(options.save, options.recompute, policies.parse(options.policy), exact=options.memory_budget is None)


def kept_inputs(captured: Capture, static_inputs: Collection[int]) -> frozenset[int]:
    """The graph's inputs, by value number, that are no parameters or buffers: saving one may keep it alive."""
    placeholders = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    static = {placeholders[index] for index in static_inputs}
    values = zip(captured.graph.values, captured.value_nodes, strict=True)
    return frozenset(
        number
        for number, (value, node) in enumerate(values)
        if value.role is Role.INPUT and node is not None and node.op == "placeholder" and node not in static
    )


def occupants_of(plan: Plan, minimum: int | None) -> list[Occupant]:
    """What is alive at the peak of ``plan``, and what the step needs besides, if that is ``minimum`` bytes."""
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
    """The error that says what was asked, what is possible and what is in the way."""
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
