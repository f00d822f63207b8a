"""The ranks that compile a graph together, as the compile loop sees them.

Every rank plans and decides by itself. Planning is a function of the graph and of what :meth:`Peers.agree` and
:meth:`Peers.compare` make equal, so all ranks find one plan. :meth:`Peers.settled` compares the plans in the end.
"""

import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from autoremat.basics.codec import plain
from autoremat.basics.errors import AgreementError, BudgetInfeasible, BudgetWarning, best_effort_message, find_cause
from autoremat.basics.warn import warn_user
from autoremat.capture import pricing
from autoremat.compiler.exchange import Session, session_at
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.problem import Problem
from autoremat.measure.calibration import host_link_of, least_link, rates_of
from autoremat.planner.cost.device import Rates
from autoremat.planner.cost.links import HostLink
from autoremat.planner.multigraph.step import Step
from autoremat.planner.multigraph.step_profile import StepProfile, share_out
from autoremat.planner.plans.plan_file import graph_hash
from autoremat.report.data import CODEC
from autoremat.report.report import Report
from autoremat.request.request import Request
from autoremat.torch_private.process_groups import job

APART = "its ranks compile different graphs, or compute differently what the graph of each shows as equal on all of them"


@dataclass(frozen=True)
class _SameGraph:
    """The members that have one graph, and what they know of its gathers."""

    ranks: tuple[int, ...]
    may_gather_again: bool
    """True if the ranks of all gathers are among these members, which compute alike what they may keep as shards."""


@dataclass
class Peers:
    """The ranks that compile a graph together: the members of a session, or a process by itself."""

    session: Session | None = None
    agreement: str = ""
    """Name of the agreement under which the code is made. All ranks have the same."""
    binding: int | None = None
    """The rank with the least budget; None if the budgets are equal."""
    is_warm: bool = False
    """True if all members have a record of one agreement. Nothing is compared then."""
    is_told: bool = False
    """True once a member has told its plan to others."""
    graphs: dict[str, _SameGraph] = field(default_factory=dict)
    """The graphs of this compilation by their structural hash: nested regions, and last the graph around them."""
    planned: dict[str, PlannedGraph] = field(default_factory=dict)
    """The graphs of the last attempt with their plans, by the same hashes."""

    @property
    def may_repeat_collectives(self) -> bool:
        """True if no rank that shares the graph follows another plan, as it may without an agreement."""
        return self.session is not None or job() is None

    @property
    def identity(self) -> tuple[object, ...]:
        """The part of a name in torch's caches that keeps compilations under other agreements, and other ranks, apart."""
        return () if self.session is None else (self.agreement, self.session.job.rank)

    def agree(self, problem: Problem, device: torch.device) -> Problem:
        """Returns the problem of all ranks, of this rank's one for a device."""
        if self.session is None:
            return problem
        request, found = problem.request, problem.record
        limits, model = request.limits, request.options.cost_model
        host = None if limits.host_bytes is None else 0  # bytes may differ, but all keep tensors on the host or none does
        others = replace(limits, peak_bytes=None, reference_share=None, granted_bytes=0, step_share=None, host_bytes=host)
        link = None if host is None else host_link_of(device, model != pricing.ROOFLINE)
        rates = None if model == pricing.ROOFLINE else rates_of(device)
        budget: object = limits.peak_bytes if limits.reference_share is None else limits.reference_share
        is_share = limits.step_share is not None  # each rank has its own: limits of several ranks may not go together
        terms = self.session.exchange(
            "options",
            {
                "options": json.loads(replace(request, limits=others).cache_key()),
                "budget": "share" if is_share else budget,
                "granted": limits.granted_bytes,
                "host": limits.host_bytes,
                "link": None if link is None else [*astuple(link)],
                "rates": None if rates is None else rates.to_json(),
                "record": "" if found is None else found.agreement,
                "name": uuid.uuid4().hex,
            },
        )
        least, self.binding = _least_budget({rank: one["budget"] for rank, one in terms.items()})
        _compare_options(terms)
        (first, *_), hosts = terms.values(), [one["host"] for one in terms.values()]
        links = [one["link"] for one in terms.values()]
        limits = replace(limits, host_bytes=None if None in hosts else min(hosts))
        if limits.reference_share is not None:
            granted = min(one["granted"] for one in terms.values())
            limits = replace(limits, reference_share=least, granted_bytes=granted)
        elif not is_share:
            limits = replace(limits, peak_bytes=least)
        self.is_warm = first["record"] != "" and all(one["record"] == first["record"] for one in terms.values())
        self.agreement = first["record" if self.is_warm else "name"]
        record = found if self.is_warm else None
        return replace(
            problem,
            request=replace(request, limits=limits),
            rates=None if first["rates"] is None else Rates.from_json(first["rates"]),
            host_link=None if None in links else least_link([HostLink(*one) for one in links]),
            record=record,
            told=None if record is None else record.report,
            told_by="the report of an earlier process",
        )

    def compare(self, priced: PricedGraph) -> PricedGraph:
        """Returns a joint graph as all ranks that have it plan it."""
        if self.session is None:
            return priced
        key, record = graph_hash(priced.graph), priced.problem.record
        same = self.graphs.get(key)
        if same is None and record is not None:  # a rank whose caches answer does not come here
            same = _SameGraph(() if record.report is None else record.report.ranks, True)
        elif same is None:
            own = {"graph": key, "gathers": sorted(priced.gathering_ranks), "replication": priced.replication}
            same = _same_graph(self.session.exchange("graph", own), key)
        self.graphs[key] = same
        problem = replace(priced.problem, ranks=same.ranks if len(same.ranks) > 1 else ())
        if priced.gathering_ranks and not same.may_gather_again:
            # Also for the graph with a chunked loss
            priced, problem = priced.with_gathers_once(APART), replace(problem, may_repeat_collectives=False)
        return replace(priced, problem=problem)

    def note(self, priced: PricedGraph, planned: object) -> None:
        """Notes the plan for a graph that was compared."""
        if self.session is not None and isinstance(planned, PlannedGraph):
            self.planned[graph_hash(priced.graph)] = planned

    def settled(self, problem: Problem) -> Problem | None:
        """Returns the problem that all ranks compile again, for one rank's plan; None once all have compiled equal plans."""
        if self.session is None or self.session.failed:
            return None
        planned = {} if self.is_warm else self.planned
        plans = (f"{graph_hash(one.plan.graph)} {one.plan.schedule}" for one in planned.values())
        headroom = max((one.budget.extra_headroom_bytes for one in planned.values()), default=0)
        own: dict[str, Any] = {"graphs": _hash(planned), "plans": _hash(plans), "headroom": headroom}
        tellers = self._tellers(self.session.exchange("plans", own))
        if not tellers:
            return None
        is_teller = self.session.job.rank in tellers.values()  # tells of the graph around all regions
        texts = self.session.exchange("told plan", plain([*planned.values()][-1].report) if is_teller else None)
        self.is_told, self.agreement = True, f"{self.agreement} told"
        teller = tellers.get(own["graphs"])
        if teller is None:
            return self.settled(problem)  # once the others have compiled again
        return replace(problem, told=CODEC.read(Report, texts[teller]), told_by=f"the report of rank {teller}")

    def _tellers(self, terms: Mapping[int, Any]) -> dict[str, int]:
        """Returns, for graphs that ranks have planned differently, the rank whose plan holds: its code needs the most headroom.

        Among equals it is the lowest one. Raises ``AgreementError`` if plans still differ after they were told.
        """
        tellers = {}
        for graphs in {one["graphs"]: None for one in terms.values()}:
            alike = {rank: one for rank, one in terms.items() if one["graphs"] == graphs}
            if len({one["plans"] for one in alike.values()}) > 1:
                tellers[graphs] = max(alike, key=lambda rank: terms[rank]["headroom"])
        if tellers and self.is_told:
            raise AgreementError(
                f"ranks {', '.join(map(str, terms))} plan a nested region differently, as on different hardware. Run them on "
                'equal devices, or pass the option agreement="off"'
            )
        return tellers

    def fail(self, error: Exception) -> None:
        """Ends the compilation on all other ranks with ``error``."""
        if self.session is not None:
            self.session.fail(error)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _same_graph(terms: Mapping[int, Any], graph: str) -> _SameGraph:
    """Returns the ranks of a graph, and whether its gathers may run again.

    A rank that gathers with others than these would wait for them in vain. A number that differs between ranks, such as that of
    the rank, makes values differ that are equal by the graph of one rank.
    """
    alike = {rank: one for rank, one in terms.items() if one["graph"] == graph}
    gathers = [set(one["gathers"]) for one in alike.values()]
    is_equal = len({one["replication"] for one in alike.values()}) == 1
    return _SameGraph(tuple(alike), is_equal and any(gathers) and all(one <= alike.keys() for one in gathers))


@contextlib.contextmanager
def joined(problem: Problem, place: str, communicates: bool) -> Iterator[Peers]:
    """Yields the peers that compile the graph at ``place`` together.

    A process without peers compiles alone, and so does each rank unless the graph ``communicates``: only repeated gathers, and
    Inductor's messages about collectives, need the same plan on all ranks. An error of the body ends the compilation on all
    members.
    """
    with session_at(place, problem.request.options.agreement if communicates else "off") as session:
        peers = Peers(session)
        try:
            yield peers
        except Exception as error:
            infeasible = find_cause(error, BudgetInfeasible)
            if infeasible is not None and infeasible.rank is None and peers.binding is not None:
                infeasible.restate(rank=peers.binding)
            raise


def _least_budget(budgets: Mapping[int, Any]) -> tuple[Any, int | None]:
    """Returns the budget of all ranks, and the rank that sets it. Raises ``AgreementError`` for budgets of different kinds."""
    kinds = {type(one) for one in budgets.values()}
    if len(kinds) > 1:
        raise AgreementError(
            f"ranks compile one graph under budgets of different kinds: {_by_rank(budgets)}. Pass all ranks a budget of "
            "the same kind: in bytes, as a share or none"
        )
    least = min(budgets, key=lambda rank: budgets[rank]) if kinds & {int, float} else next(iter(budgets))
    return budgets[least], least if len(set(budgets.values())) > 1 else None


def _compare_options(terms: Mapping[int, Any]) -> None:
    """Raises ``AgreementError`` with the first option that differs between ranks."""
    first, *rest = (one["options"] for one in terms.values())
    for name, value in first.items():
        if any(one.get(name) != value for one in rest):
            values = {rank: one["options"].get(name) for rank, one in terms.items()}
            raise AgreementError(
                f"ranks compile one graph under different options: {name} is {_by_rank(values)}. Pass all ranks the same value"
            )


def _by_rank(values: Mapping[int, Any]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in values.items())


# -- several graphs of a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathers:
    """The gathers that the plans of a step may run again."""

    ranks: frozenset[int]
    """The ranks that gather together. All of them have to share the plans."""
    run_once: Callable[[], Step]
    """Returns the step with plans that run each gather once."""


def agreed_profile(step: Step, request: Request, place: str, gathers: Gathers | None = None) -> StepProfile:
    """Returns the profile under the limits of the request, for all ranks whose steps have the same graphs in the same order.

    The ranks meet at ``place``; each has a profile of its own if its graphs do not communicate. If ranks of ``gathers`` do not
    come, the plans run each gather once. Otherwise each moment has the base bytes of the rank with the most, and the budgets of
    device and host are the least of all ranks.

    Raises ``BudgetInfeasible`` if no choice of plans fits. If the request asks for the best effort, the step gets the minimum
    peak found instead.
    """
    limits = request.limits
    share, device = limits.reference_share, limits.ledger
    budget = limits.bytes_for(step.reference_peak_bytes)
    kind = _hash([*(f"{graph.key} {graph.block}" for graph in step.graphs), *step.order, str(len(step.moments))])
    terms = [kind, budget, step.host_bytes, [moment.base_bytes for moment in step.moments]]
    communicates = step.communicates or gathers is not None
    with session_at(place, request.options.agreement if communicates else "off") as session:
        found = {} if session is None else session.exchange("profile", terms)
    alike = {rank: own for rank, (other, *own) in found.items() if other == kind}
    if gathers is not None and not gathers.ranks <= alike.keys():
        step = gathers.run_once()
    elif alike:
        budgets, hosts, bases = zip(*alike.values(), strict=True)
        moments = zip(step.moments, map(max, zip(*bases, strict=True)), strict=True)
        most = tuple(replace(moment, base_bytes=base) for moment, base in moments)
        host = min(one or 0 for one in hosts) if any(one is not None for one in hosts) else None
        step = replace(step, moments=most, host_bytes=host)
        budget = min((one for one in budgets if one is not None), default=None)
    try:
        profile = share_out(step, budget, limits.advice, share, device)
    except BudgetInfeasible as error:
        if request.must_fit:
            raise
        reference = step.reference_peak_bytes
        message = best_effort_message(f"the step ({place})", error.minimum_bytes, error.budget_bytes, share, reference)
        warn_user(message, BudgetWarning)
        profile = share_out(step, error.minimum_bytes, device=device)
    return replace(profile, must_fit=request.must_fit)
