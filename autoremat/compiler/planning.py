"""The stage that plans: from a priced graph to the cheapest plan within the budget of the problem.

The graph competes with rewritten forms of itself: with a chunked loss (``passes/chunked_loss``), and in tiles
(``passes/tiles``). Both change the rounding of results. By default, they are planned only if nothing else fits the budget.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from autoremat.basics.errors import BudgetInfeasible, ChunkingUnsupported, Occupant, OptionWarning, PlanFileError
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PricedGraph, capture_and_price, note_on_sizes
from autoremat.compiler.planned_graph import WORTH, Budget, PlannedGraph, counted, headroom_of, limits_of
from autoremat.compiler.reference import find_soft_budget, layout_copies_bytes, plan_without_us, reference_of
from autoremat.passes import run_passes
from autoremat.passes.chunked_loss.chunk_loss import chunk_loss
from autoremat.passes.tile_rows import tile_rows
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import ConstrainedGraph, Constraints
from autoremat.planner.cost.datasheets import device_memory
from autoremat.planner.graph.graph import Graph
from autoremat.planner.multigraph.step import StepGraph
from autoremat.planner.plans.limits import Limits, undominated
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile, fitted
from autoremat.planner.search.planner import BoundForms, Planner
from autoremat.report.peak_snapshot import RETURN_LESS, TensorCategory, parts_of_peak, peak_of, remedies_for_model, remedy_for
from autoremat.torch_private import fake_tensors
from autoremat.torch_private.higher_order import chunked_by

OPTIMISM = 0.5
"""Excess of the simulated peak over the budget, as a share of the budget, up to which a plan's code is still generated.
Generated code often reuses more buffers than simulated, above all in unrolled loops."""

QUICK_OPS = 2000
"""Number of ops up to which code is generated whatever the budget, so that an error names bytes that suffice."""

NUMBERS_OF_CHUNKS, NUMBERS_OF_TILES = (8, 16), (4, 16)
"""Numbers that are tried, in this order, if the user gives none. A chunk costs another read of the projection's weight and
about twenty ops; a tile another read of the weights, and each op of a stretch once more."""

SHARED = "the budget of a profiled step is shared out among its graphs as they are"


def plan_graph(priced: PricedGraph, extra_headroom_bytes: int = 0) -> PlannedGraph:
    """Returns the graph with its plan for the budget of the problem, less by the extra headroom.

    Raises ``BudgetInfeasible`` if no plan fits, unless the options ask for the best effort or the generated code may still fit.
    """
    start, problem = time.perf_counter(), priced.problem
    soft = find_soft_budget(priced)  # torch's partitioner has no time limit, so it is not part of the planner's
    for _, earlier in problem.searches.planners:  # of an attempt before, since which the graph was traced again
        earlier.restart()
    planner, _ = planner_of(priced, soft)
    headroom = headroom_of(priced)
    reference = reference_of(priced, planner, headroom)
    asked = problem.request.limits.bytes_for(None if reference is None else reference.bytes)
    best = contest(priced, Budget(asked, headroom, extra_headroom_bytes, soft, reference))
    by_clock = problem.searches.ended_by_clock or (problem.told is not None and problem.told.ended_by_clock)
    planning = replace(
        best.planning,
        baseline=planner.baseline,
        interrupted=best.planning.interrupted or by_clock,
        ended_by_clock=by_clock,
    )
    planned = replace(best, planning=planning, seconds=time.perf_counter() - start)
    is_found = planning.plan is not None
    if planned.fits or (is_found and planned.plan_file is not None) or not problem.request.must_fit or priced.joint.is_region:
        return planned
    plan, assumed = planned.plan, planned.budget
    accepted = replace(limits_of(priced, assumed, planned.free_seconds), peak_bytes=None).keep(plan)
    is_tried = plan.peak_bytes <= (assumed.bytes or 0) * (1 + OPTIMISM) or len(plan.graph.ops) <= QUICK_OPS
    if is_found or not (problem.decided_by_code and accepted and is_tried):
        raise no_plan_fits(planned)
    return planned  # its code may fit, although the simulated peak exceeds the budget


# -- the contest of rewritten graphs ---------------------------------------------------------------------------------------


def contest(priced: PricedGraph, budget: Budget) -> PlannedGraph:
    """Returns the best of the graph as it is, in tiles, and with a chunked loss, each with its plan.

    The fastest one that fits is best; if none fits, the one with the minimum peak. A number of the user's is the only one that
    is tried, and "auto" ends with the first graph that fits.
    """
    tiles, chunks = (_numbers(priced, option) for option in ("tiles", "chunk_loss"))
    is_eager = priced.problem.told is None and priced.problem.request.options.chunk_loss is True
    found: list[PlannedGraph] = []
    remedy = ""
    for tile in tiles:
        graph = priced if tile == 1 else _tiled(priced, tile)
        if graph is None and len(tiles) > 1:
            break
        graph, tried = graph or priced, list[PlannedGraph]()
        try:
            for number in chunks:
                if any(one.fits for one in tried) and not is_eager:
                    break
                form = graph if number == 1 else _chunked(graph, number)
                if any(one.priced.joint.chunks == form.joint.chunks for one in tried):
                    break  # there are too few rows for more chunks
                tried.append(_candidate(form, budget, [*found, *tried]))
        except ChunkingUnsupported as reason:
            remedy = remedy or reason.remedy
            if is_eager or len(chunks) == 1:
                by = chunked_by(graph.joint.module)
                _warn("chunk_loss", f"{by} computes the loss in chunks already" if by else str(reason))
            tried = tried or [_candidate(graph, budget, found)]
        found += tried
        if any(one.fits for one in tried):
            break
    return replace(min(found, key=lambda one: one.rank), whole=found[0] if chunks[0] == 1 else None, remedy=remedy)


def _numbers(priced: PricedGraph, option: str) -> tuple[int, ...]:
    """Returns the numbers of parts to try by an option, 1 for none. A plan that is applied again has its own."""
    options, told = priced.problem.request.options, priced.problem.told
    wanted = options.tiles if option == "tiles" else options.chunk_loss
    if told is not None:
        wanted = told.tiles if option == "tiles" else told.loss_chunks
    if wanted is False or priced.joint.is_region:
        return (1,)
    if priced.share is not None:
        if wanted is True or (type(wanted) is int and wanted > 1):
            _warn(option, SHARED)
        return (1,)
    if type(wanted) is int:
        return (wanted,)
    if options.plan:
        return (1,)
    return (1, *(NUMBERS_OF_TILES if option == "tiles" else NUMBERS_OF_CHUNKS))


def _tiled(priced: PricedGraph, tiles: int) -> PricedGraph | None:
    """Returns the graph with its stretches of row-by-row ops in tiles; None if it has none, with a warning if the user asks."""
    now("tiling")
    module, rewrites = fake_tensors.copied_module(priced.captured.joint), 0
    with contextlib.suppress(ChunkingUnsupported):
        rewrites = run_passes(module, partial(tile_rows, tiles=tiles))[0]
    if rewrites:
        return capture_and_price(replace(priced.joint, module=module, tiles=tiles, stretches=rewrites), priced.problem)
    if type(priced.problem.request.options.tiles) is int:
        _warn("tiles", "it has no products that make rows wider, of fixed sizes, between ops that compute row by row")
    return None


def _chunked(priced: PricedGraph, chunks: int) -> PricedGraph:
    """Returns the graph with its loss in chunks. Raises ``ChunkingUnsupported`` if the loss cannot be chunked."""
    now("chunking the loss")
    module = fake_tensors.copied_module(priced.captured.joint)
    (made,) = run_passes(module, partial(chunk_loss, chunks=chunks))
    found = capture_and_price(replace(priced.joint, module=module, chunks=made), priced.problem)
    assert found is not None
    return found


def _warn(option: str, reason: str) -> None:
    warn_user(f"{option} has no effect on a graph: {reason}", OptionWarning)


# -- the plan of one graph -------------------------------------------------------------------------------------------------


def _candidate(priced: PricedGraph, budget: Budget, earlier: Sequence[PlannedGraph]) -> PlannedGraph:
    """Returns a graph with its best plan within the budget. The first graph that was planned sets the budget of time."""
    planner, constrained = planner_of(priced, budget.soft_bytes)
    limits, free_seconds = priced.problem.request.limits, earlier[0].free_seconds if earlier else None
    if limits.max_slowdown is not None and not earlier and not priced.joint.is_region:  # a region may run again as a whole
        free_seconds = (planner.find().plan or planner.baseline).predicted_seconds
    stored = _stored_plan(priced, constrained.graph)
    if stored is not None:
        planning = planner.judge(stored[1], budget.bytes)
    elif not limits.is_bounded and constrained.candidate is not None:  # the policy is the whole plan
        constrained.candidate.check()
        planning = planner.judge(constrained.candidate, None)
    else:
        planning = planner.find(limits_of(priced, budget, free_seconds))
    return PlannedGraph(
        priced, budget, planner, constrained, planning, planning.plan or planning.smallest,
        plan_file=None if stored is None else stored[0], free_seconds=free_seconds,
    )  # fmt: skip


def planner_of(priced: PricedGraph, soft_budget: int | None) -> tuple[Planner, ConstrainedGraph]:
    """Returns a planner of the graph under the constraints of the request, and the constrained graph.

    A planner of an earlier attempt on an equal graph starts afresh, with its starts.
    """
    request, searches = priced.problem.request, priced.problem.searches
    options, limits = request.options, Limits(soft_budget, request.limits.host_bytes)
    priced.name_planning()
    policy = policies.parse(options.policy)
    constrained = Constraints(options.save, options.recompute, policy, exact=not request.limits.is_bounded).apply(priced.graph)
    given = () if constrained.candidate is None else (constrained.candidate,)
    graph, bound = constrained.graph, constrained.bound_values
    wanted = (graph, bound, [plan.schedule for plan in given], limits, options.time_limit)
    known = next((planner for begun_for, planner in searches.planners if begun_for == wanted), None)
    if known is not None:
        return known, constrained
    if bound:
        planner: Planner = BoundForms(graph, bound, limits, time_limit=options.time_limit, given=given)
    else:
        planner = Planner(graph, options.time_limit, given=given, limits=limits)
    searches.planners.append((wanted, planner))
    return planner, constrained


def _stored_plan(priced: PricedGraph, graph: Graph) -> tuple[str, Plan] | None:
    """Returns the plan that another rank, an earlier process or the options have for this graph, with the name of its file.

    Returns None if there is none. Raises ``PlanFileError`` if a stored plan does not fit the graph.
    """
    problem, told = priced.problem, priced.problem.told
    files = problem.request.options.plan if told is None else (PlanFile(problem.told_by, "", told.plan),)
    if not files or priced.joint.is_region:
        return None
    file, plan = fitted(files, graph)
    allowed, held = problem.request.limits.host_bytes or 0, plan.timeline.host_bytes
    if held > allowed:
        raise PlanFileError(
            f"the plan in {file.name} keeps {format_bytes(held)} on the host, and host_memory allows {format_bytes(allowed)}: "
            f'raise it to "{held}B", or leave out the option `plan`'
        )
    return file.name, plan


# -- the error for a budget that nothing fits -------------------------------------------------------------------------------


NAMES = {TensorCategory.WORKSPACE: "workspace of ", TensorCategory.GRADIENT: "gradient "}
"""Words before the name of a live tensor, by category."""


def _infeasible(
    planned: PlannedGraph, minimum: int, remedies: Iterable[str], smallest: Plan | None = None, **figures: Any
) -> BudgetInfeasible:
    """Returns the error that names the budget, the ``minimum`` peak and the tensors that are live at that peak.

    That is the peak of ``smallest``, which is the smallest plan of the search if not given, with its code. The limits add what
    their origin advises. ``figures`` are further ones of the error.
    """
    request, asked = planned.problem.request, planned.budget
    limits, remedies = request.limits, [*request.limits.remedies(minimum - (asked.bytes or 0)), *remedies]
    budget, smallest = asked.bytes or 0, smallest or planned.planning.smallest
    moment, parts = peak_of(smallest), parts_of_peak(smallest)
    live = () if moment is None else moment.live
    occupants = [Occupant(NAMES.get(t.sort, "") + t.name, t.bytes, t.module, t.source) for t in live]
    if minimum > smallest.peak_bytes:
        occupants.append(Occupant("code headroom", minimum - smallest.peak_bytes))
    if parts and not (request.returned and remedy_for(parts[0][0]) == RETURN_LESS):
        remedies.append(remedy_for(parts[0][0]))
    if request.returned_bytes > WORTH * minimum:
        remedies.append(request.returned)
    device = planned.priced.captured.device.name
    figures |= {
        "budget_bytes": budget,
        "minimum_bytes": minimum,
        "lower_bound_bytes": planned.planning.lower_bound_bytes,
        "occupants": occupants,
        "device": device,
        "remedies": remedies,
        "parts": parts,
        "gradient_bytes": 0 if moment is None else dict(moment.by_sort).get(TensorCategory.GRADIENT, 0),
        "device_bytes": device_memory(device),
    }
    reference = None if asked.reference is None else asked.reference.bytes
    return BudgetInfeasible(**figures).asked_as(limits.reference_share, reference)


def no_code_fits(planned: PlannedGraph, minimum: int) -> BudgetInfeasible:
    """Returns the error for a graph whose code needs ``minimum`` bytes at least, with every plan that was tried."""
    remedies = (note_on_sizes(planned.priced.joint.module.graph),)
    return _infeasible(planned, minimum, remedies, plan_file=planned.plan_file)


def no_plan_fits(planned: PlannedGraph) -> BudgetInfeasible:
    """Returns the error that names the minimum peak found, and that without constraints if there are any."""
    problem, priced, asked, smallest = planned.problem, planned.priced, planned.budget, planned.planning.smallest
    budget, headroom = asked.bytes or 0, asked.code_headroom_bytes
    figures: dict[str, Any] = {"is_simulated": problem.request.fuses}
    if planned.constrained.graph is not priced.graph:
        now("planning without constraints")
        host = problem.request.limits.host_bytes
        alone = Planner(priced.graph, problem.request.options.time_limit, limits=Limits(host_bytes=host))
        figures["unconstrained_bytes"] = alone.lowest.peak_bytes
    # The code of earlier attempts needed so much more than simulated. At the last attempt nothing is left of the budget, so the
    # excess is unknown.
    observed = max(0, asked.extra_headroom_bytes)
    extra = observed if observed < budget else 0
    if planned.free_seconds is not None and planned.plan_file is None:
        return _no_plan_keeps_both(planned, headroom + extra, figures)
    least = smallest.peak_bytes + headroom  # the assumed peak of generated code
    share = priced.share
    if share is not None:  # the plan of the minimum peak may miss another limit
        plans = (*planned.planner.front(), smallest)
        excess = min(share.less(extra).excess_bytes(counted(plan, priced)) for plan in plans)
        least = max(least, budget + max(1, excess))
    remedies = (
        planned.remedy,
        note_on_sizes(priced.joint.module.graph),
        *remedies_for_model(smallest, priced.graph),
    )
    return _infeasible(planned, least, remedies, plan_file=planned.plan_file, loss_chunks=priced.joint.chunks, **figures)


def _no_plan_keeps_both(planned: PlannedGraph, headroom: int, figures: dict[str, Any]) -> BudgetInfeasible:
    """Returns the error that names the minimum peak within the time, and the least slow-down within the bytes."""
    graphs, plan = [one for one in (planned, planned.whole) if one is not None], planned.planning.plan
    seconds = math.inf if plan is None else plan.predicted_seconds
    found = [(one.planning.least, one) for one in graphs if one.planning.least is not None]
    least, of = min(found, key=lambda pair: pair[0].peak_bytes)
    return _infeasible(
        of,
        max(least.peak_bytes + headroom, (planned.budget.bytes or 0) + 1),  # plans within the time have failed
        (planned.remedy,),
        least,
        max_slowdown=planned.problem.request.limits.max_slowdown,
        least_slowdown=None if plan is None else seconds / planned.free_seconds - 1.0 if planned.free_seconds else math.inf,
        untimed_bytes=min(one.planning.smallest.peak_bytes for one in graphs) + planned.budget.code_headroom_bytes,
        **figures,
    )


# -- a graph of a step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmallestGraph:
    """A graph with its plan of the minimum peak, before the budget of its step is shared out."""

    priced: PricedGraph
    planner: Planner
    plan_without_us: Plan | None
    """The plan that the graph has without this package; None if it was not asked for."""
    is_binding: ClassVar[bool] = True

    @property
    def plan(self) -> Plan:
        """The plan of the minimum peak."""
        return self.planner.smallest

    def in_step(self, key: str) -> StepGraph:
        """Returns the facts that the ledger of a step needs, for one call."""
        planner, priced = self.planner, self.priced
        source = next((op.source for op in priced.graph.ops if op.source), "")
        plans = (planner.baseline, self.plan_without_us or planner.baseline)
        baseline, reference = (counted(plan, priced) for plan in plans)
        copies = layout_copies_bytes(self.priced, plans[-1])
        return StepGraph(
            key,
            source,
            1,
            tuple(undominated((counted(plan, priced) for plan in planner.front()), astuple)),
            baseline,
            self.priced.graph.step_seconds,
            reference=reference.with_more(copies, copies),
            ended_by_clock=planner.limit.ended_by_clock,
        )


def plan_for_minimum_peak(priced: PricedGraph, compares: bool = True) -> SmallestGraph:
    """Returns the graph with the plan of the minimum peak found, whatever the budget.

    With ``compares``, it also has the plan without this package, for budgets that are shares.
    """
    planner, _ = planner_of(priced, None)
    without_us = plan_without_us(priced, planner)[1] if compares else None
    return SmallestGraph(priced, planner, without_us)
