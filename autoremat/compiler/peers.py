"""The ranks that compile a graph together, as the compile loop sees them.

A process by itself plans and decides alone. Under an agreement one rank, the leader, plans. The others take its plan, check it
on their own graph and send the peaks of their own code. One verdict per attempt holds for all, so all compile equally often.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autoremat.agreement.joining import session_at
from autoremat.agreement.session import Parts, Session
from autoremat.basics.errors import AgreementError, BudgetInfeasible
from autoremat.basics.progress import now
from autoremat.compiler.attempts import Accept, Again, Attempt, Infeasible, Purpose, Rules, Verdict, verdict_on
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph, capture_and_price
from autoremat.compiler.planning import BudgetedGraph, EarlierSearches, plan_graph
from autoremat.compiler.records import Record
from autoremat.compiler.told_plan import TOLD, ToldPlan, plan_as_told, told
from autoremat.measure.interconnect import interconnects_of
from autoremat.planner.plans.plan_file import graph_hash
from autoremat.request.request import Request
from autoremat.torch_private.pipelining import running_stage
from autoremat.torch_private.processes import job


class Peers(Protocol):
    """Everything that a compilation asks about other ranks."""

    @property
    def may_repeat_collectives(self) -> bool:
        """True if no rank that shares the graph follows another plan."""

    @property
    def identity(self) -> tuple[object, ...]:
        """The part of a name in torch's caches that keeps compilations under other agreements apart."""

    def agreed_record(self, found: Record | None) -> Record | None:
        """Returns the record to start from: ``found``, or None if not all ranks have one of the same compilation."""

    def signed(self, record: Record) -> Record:
        """Returns ``record`` with the name of the agreement under which it was made."""

    def plan(self, priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
        """Returns the graph with the plan for its budget."""

    def verdict(self, attempts: Sequence[Attempt], rules: Rules, gain_of: Callable[[int], float]) -> Verdict | None:
        """Returns the verdict on the last attempt; None if Inductor shall go on with it. See :func:`verdict_on`."""

    def named(self, error: Exception) -> Exception:
        """Returns ``error`` with the rank that it comes from."""

    def fail(self, error: Exception) -> None:
        """Ends the compilation on all other ranks with ``error``."""


class Alone:
    """A process that compiles by itself."""

    identity: tuple[object, ...] = ()

    @property
    def may_repeat_collectives(self) -> bool:
        return job() is None  # other ranks may plan this graph too, without an agreement

    def agreed_record(self, found: Record | None) -> Record | None:
        return found

    def signed(self, record: Record) -> Record:
        return record

    def plan(self, priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
        return plan_graph(priced, context, earlier)

    def verdict(self, attempts: Sequence[Attempt], rules: Rules, gain_of: Callable[[int], float]) -> Verdict | None:
        return verdict_on(attempts, rules, gain_of)

    def named(self, error: Exception) -> Exception:
        return error

    def fail(self, error: Exception) -> None:
        pass


ALONE = Alone()


@dataclass
class Members:
    """The members of a session."""

    session: Session
    binding: int | None = None
    """The rank with the least budget; None if the budgets are equal."""
    nonce: str = ""
    """Name of the agreement under which the code is made. All members have the same."""
    record: Record | None = None
    """The record of an earlier process, if all members have one of the same agreement. Nothing is decided again then."""
    joint: dict[int, Attempt] = field(default_factory=dict)
    """The attempts by their number, with the largest peaks of all members. Only the leader has them."""

    may_repeat_collectives = True

    @property
    def identity(self) -> tuple[object, ...]:
        # Each rank has entries of its own. Otherwise one rank could find the code that another rank has just written.
        return self.nonce, self.session.channel.rank

    def agreed_record(self, found: Record | None) -> Record | None:
        def compare(parts: Parts) -> dict[str, Any]:
            names = set(parts.values())
            is_warm = len(names) == 1 and "" not in names
            return {"nonce": names.pop() if is_warm else uuid.uuid4().hex, "is_warm": is_warm}

        result = self.session.round("record", "" if found is None else found.agreement, compare)
        self.nonce, self.record = result["nonce"], found if result["is_warm"] else None
        return self.record

    def signed(self, record: Record) -> Record:
        return replace(record, agreement=self.nonce)

    def plan(self, priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
        if self.record is not None:
            report = self.record.report
            known = None if report is None or report.plan is None else ToldPlan.of_report(report)
            return self._signed(
                plan_graph(priced, context, earlier) if known is None else plan_as_told(priced, context, known, earlier)
            )
        self.session = self.session.split("graph", graph_hash(priced.graph))
        if priced.gathering_ranks:
            # A rank that gathers with others than the members would wait for them in vain.
            inside = priced.gathering_ranks <= set(self.session.members)
            if self.session.round("gathers", inside, lambda parts: all(parts.values())):
                priced = _with_measured_links(priced, context)
            else:
                priced = priced.with_gathers_once()
        found: list[BudgetedGraph] = []

        def compute() -> str:
            try:
                found.append(plan_graph(priced, context, earlier))
            except BudgetInfeasible as error:
                raise self.named(error) from None
            return told(found[0]).to_json()

        if not self.session.leads:
            now(f"waiting for the plan of rank {self.session.leader}")
        text = self.session.from_leader("plan", compute)
        if found:
            return self._signed(found[0])
        return self._signed(plan_as_told(priced, context, TOLD.read(ToldPlan, json.loads(text)), earlier))

    def _signed(self, planned: BudgetedGraph) -> BudgetedGraph:
        """Returns ``planned`` with the members in its report, if there are several."""
        members = self.session.members
        if len(members) == 1:
            return planned
        return replace(planned, report=replace(planned.report, ranks=members))

    def verdict(self, attempts: Sequence[Attempt], rules: Rules, gain_of: Callable[[int], float]) -> Verdict | None:
        if self.record is not None:
            return verdict_on(attempts, rules, gain_of)
        last = attempts[-1]
        part = {"peaks": {str(int(half)): peak for half, peak in last.code_peaks.items()}, "is_complete": last.is_complete}

        def decide(parts: Parts) -> dict[str, Any] | None:
            self.joint[len(attempts)] = _with_largest_peaks(last, parts)
            return _written(verdict_on([self.joint[number + 1] for number in range(len(attempts))], rules, gain_of))

        return _read(self.session.round("verdict", part, decide))

    def named(self, error: Exception) -> Exception:
        if isinstance(error, BudgetInfeasible) and error.rank is None and self.binding is not None:
            error.on_rank(self.binding)
        return error

    def fail(self, error: Exception) -> None:
        self.session.fail(error)


def _with_measured_links(priced: PricedGraph, context: PlanningContext) -> PricedGraph:
    """Returns the graph with its gathers priced by the measured interconnects of their groups, which all members measure now.

    Data sheets and options come instead where the cost model is "roofline" or the bandwidth is given.
    """
    if context.request.cost_model == "roofline" or context.request.interconnect_bandwidth is not None:
        return priced
    now("measuring the interconnect")
    again = capture_and_price(priced.joint, replace(context, interconnects=interconnects_of(priced.gathering_groups)))
    return priced if again is None else again


def _with_largest_peaks(attempt: Attempt, parts: Parts) -> Attempt:
    """Returns ``attempt`` with the largest peak of each half on all members."""
    peaks: dict[bool, int] = {}
    for part in parts.values():
        for half, peak in part["peaks"].items():
            peaks[half == "1"] = max(peak, peaks.get(half == "1", 0))
    return replace(attempt, code_peaks=peaks, is_complete=all(part["is_complete"] for part in parts.values()))


def _written(verdict: Verdict | None) -> dict[str, Any] | None:
    match verdict:
        case Again(headroom, purpose):
            return {"again": headroom, "purpose": purpose.name}
        case Infeasible(minimum):
            return {"infeasible": minimum}
        case Accept():
            return {}
    return None


def _read(data: dict[str, Any] | None) -> Verdict | None:
    if data is None:
        return None
    if "again" in data:
        return Again(data["again"], Purpose[data["purpose"]])
    return Infeasible(data["infeasible"]) if "infeasible" in data else Accept()


@contextlib.contextmanager
def joined(request: Request, place: str | None, communicates: bool) -> Iterator[tuple[Peers, Request]]:
    """Yields the peers that compile the graph at ``place`` together, and the request that all of them have.

    A process without peers compiles alone, and so does one whose graph needs no plan (``place`` is None). A rank may compile a
    graph again by itself unless it ``communicates``: only repeated gathers, and Inductor's messages about collectives, need the
    same plan on all ranks. An error of the body ends the compilation on all members.
    """
    stage = None if place is None else running_stage()
    if stage is not None:
        place = f"{place}, stage {stage.index} of a pipeline"
    elsewhere = () if stage is None else stage.group_ranks
    with session_at(place, request.agreement, elsewhere, communicates) as session:
        if session is None:
            yield ALONE, request
            return
        members = Members(session)
        yield members, _agreed(members, request)


def _agreed(members: Members, request: Request) -> Request:
    """Returns ``request`` with the least budget of all members. Raises ``AgreementError`` if anything else differs."""
    limits, granted = request.limits, request.limits.granted_bytes
    budget: object = limits.peak_bytes if limits.reference_share is None else limits.reference_share
    if limits.step_share is not None:  # the leader's, because limits of several ranks may not go together
        budget = "share"
    others = replace(limits, peak_bytes=None, reference_share=None, granted_bytes=0, step_share=None)
    same = json.loads(replace(request, limits=others).cache_key())
    part = {"budget": budget, "granted": granted, "options": same}

    def decide(parts: Parts) -> dict[str, Any]:
        _compare_options(parts)
        budgets = {rank: one["budget"] for rank, one in parts.items()}
        kinds = {type(one) for one in budgets.values()}
        granted = min(one["granted"] for one in parts.values())
        if len(kinds) > 1:
            raise AgreementError(
                f"ranks compile one graph under budgets of different kinds: {_by_rank(budgets)}. Pass all ranks a budget of "
                "the same kind: in bytes, as a share or none"
            )
        if kinds & {int, float} and len(set(budgets.values())) > 1:
            least = min(budgets, key=lambda rank: budgets[rank])
            return {"budget": budgets[least], "binding": least, "granted": granted}
        return {"budget": budgets[members.session.leader], "binding": None, "granted": granted}

    agreed = members.session.round("options", part, decide)
    members.binding = agreed["binding"]
    if limits.step_share is not None:
        return request
    least, granted = agreed["budget"], agreed["granted"]
    if limits.reference_share is not None:
        return replace(request, limits=replace(limits, reference_share=least, granted_bytes=granted))
    return replace(request, limits=replace(limits, peak_bytes=least))


def _compare_options(parts: Parts) -> None:
    """Raises ``AgreementError`` with the first option that differs between ranks."""
    (_, first), *rest = parts.items()
    for name, value in first["options"].items():
        if any(part["options"].get(name) != value for _, part in rest):
            values = {rank: part["options"].get(name) for rank, part in parts.items()}
            raise AgreementError(
                f"ranks compile one graph under different options: {name} is {_by_rank(values)}. Pass all ranks the same value"
            )


def _by_rank(values: dict[int, Any]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in values.items())
