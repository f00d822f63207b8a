"""The ranks that compile a graph together, as the compile loop sees them.

Every rank plans and decides by itself. Planning is a function of the graph and of what :meth:`Peers.agree` and the first call
of :meth:`Peers.plan` make equal, so all ranks find one plan. :meth:`Peers.settled` compares the plans in the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol

import torch

from autoremat.agreement.joining import session_at
from autoremat.agreement.session import Parts, Session, grouped
from autoremat.basics.errors import AgreementError, BudgetInfeasible
from autoremat.basics.progress import now
from autoremat.capture import pricing
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph, ToldPlan, capture_and_price
from autoremat.compiler.planning import BudgetedGraph, EarlierSearches, plan_graph
from autoremat.compiler.records import Record
from autoremat.measure.calibration import rates_of
from autoremat.measure.host_link import host_link_of, least_link
from autoremat.measure.interconnect import interconnects_of
from autoremat.planner.cost import Interconnect, LinkSource, Rates
from autoremat.planner.cost.host_link import HostLink
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile, graph_hash
from autoremat.request.request import Request
from autoremat.torch_private.processes import job

APART = "its ranks compile different graphs, or compute differently what the graph of each shows as equal on all of them"


@dataclass(frozen=True)
class Agreed:
    """What all ranks that compile a graph use."""

    request: Request
    record: Record | None = None
    """The record to start from: this rank's, if all ranks have one of the same compilation."""
    rates: Rates | None = None
    """The rates of the cost model; None if this rank's own ones are those of all."""
    host_link: HostLink | None = None
    """The rates of the slowest link to the host; None for those of this rank."""


class Peers(Protocol):
    """Everything that a compilation asks about other ranks."""

    @property
    def may_repeat_collectives(self) -> bool:
        """True if no rank that shares the graph follows another plan."""

    @property
    def identity(self) -> tuple[object, ...]:
        """The part of a name in torch's caches that keeps compilations under other agreements apart."""

    def agree(self, request: Request, device: torch.device, found: Record | None = None) -> Agreed:
        """Returns what all ranks use, of this rank's request, the rates of its device and the record that it has found."""

    def signed(self, record: Record) -> Record:
        """Returns ``record`` with the name of the agreement under which it was made."""

    def plan(self, priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
        """Returns the graph with the plan for its budget."""

    def settled(self) -> bool:
        """Returns True if all ranks have compiled the last plans of this one. If not, all compile again."""

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

    def agree(self, request: Request, device: torch.device, found: Record | None = None) -> Agreed:
        return Agreed(request, found)

    def signed(self, record: Record) -> Record:
        return record

    def plan(self, priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
        return plan_graph(priced, context, earlier)

    def settled(self) -> bool:
        return True

    def named(self, error: Exception) -> Exception:
        return error

    def fail(self, error: Exception) -> None:
        pass


ALONE = Alone()


@dataclass(frozen=True)
class _SameGraph:
    """The members that have one graph, and what they know of its gathers."""

    ranks: tuple[int, ...]
    may_gather_again: bool
    """True if the ranks of all gathers are among these members, which compute alike what they may keep as shards."""
    interconnects: Mapping[str, Interconnect] = field(default_factory=dict)
    """The measured rates of the groups of the gathers."""


@dataclass
class Members:
    """The members of a session."""

    session: Session
    binding: int | None = None
    """The rank with the least budget; None if the budgets are equal."""
    nonce: str = ""
    """Name of the agreement under which the code is made. All members have the same."""
    record: Record | None = None
    """The record of an earlier process, if all members have one of the same agreement. Nothing is compared then."""
    told: ToldPlan | None = None
    """The plan that is applied instead of a search."""
    is_told: bool = False
    """True once a member has told its plan to others."""
    falls_back: bool = False
    """True if torch partitions the graph on all members if one of them fails."""
    failure: AgreementError | None = None
    """The error of another member, after which this one falls back."""
    graphs: dict[str, _SameGraph] = field(default_factory=dict)
    """The graphs of this compilation by their structural hash: nested regions, and last the graph around them."""
    planned: dict[str, BudgetedGraph] = field(default_factory=dict)
    """The graphs of the last attempt with their plans, by the same hashes."""

    may_repeat_collectives = True

    @property
    def identity(self) -> tuple[object, ...]:
        # Each rank has entries of its own. Otherwise one rank could find the code that another rank has just written.
        return self.nonce, self.session.channel.rank

    def agree(self, request: Request, device: torch.device, found: Record | None = None) -> Agreed:
        limits = request.limits
        host = None if limits.host_bytes is None else 0  # bytes may differ, but all keep tensors on the host or none does
        others = replace(limits, peak_bytes=None, reference_share=None, granted_bytes=0, step_share=None, host_bytes=host)
        link = None if host is None else host_link_of(device, request.options.cost_model != pricing.ROOFLINE)
        budget: object = limits.peak_bytes if limits.reference_share is None else limits.reference_share
        is_share = limits.step_share is not None  # each rank has its own: limits of several ranks may not go together
        part = {
            "budget": "share" if is_share else budget,
            "granted": limits.granted_bytes,
            "host": limits.host_bytes,
            "link": None if link is None else [*astuple(link)],
            "options": json.loads(replace(request, limits=others).cache_key()),
            "rates": pricing.identity(request.options.cost_model, device),
            "record": "" if found is None else found.agreement,
        }

        def decide(parts: Parts) -> dict[str, Any]:
            bounds = _least_budget(parts) | _least_host(parts)
            _compare_options(parts)
            names = [*grouped(parts, "record")]
            is_warm = len(names) == 1 and names != [""]
            own = rates_of(device) if len(grouped(parts, "rates")) > 1 else None
            return bounds | {
                "nonce": names[0] if is_warm else uuid.uuid4().hex,
                "is_warm": is_warm,
                "rates": None if own is None else own.to_json(),
            }

        agreed = self.session.round("options", part, decide)
        self.binding, self.nonce, self.falls_back = agreed["binding"], agreed["nonce"], request.falls_back
        if limits.reference_share is not None:
            limits = replace(limits, reference_share=agreed["budget"], granted_bytes=agreed["granted"])
        elif not is_share:
            limits = replace(limits, peak_bytes=agreed["budget"])
        limits = replace(limits, host_bytes=agreed["host"])
        self.record = found if agreed["is_warm"] else None
        known = None if self.record is None else self.record.report
        if known is not None:
            self.told = _told("of an earlier process", known.plan.dumps(), known.loss_chunks, known.tiles, known.ended_by_clock)
        request = replace(request, limits=limits)
        rates = None if agreed["rates"] is None else Rates.from_json(agreed["rates"])
        return Agreed(request, self.record, rates, None if agreed["link"] is None else HostLink(*agreed["link"]))

    def signed(self, record: Record) -> Record:
        return replace(record, agreement=self.nonce)

    def plan(self, priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
        if self.failure is not None:
            raise self.failure
        key = graph_hash(priced.graph)
        if key not in self.graphs:
            self.graphs[key] = self._compared(key, priced, context)
        same = self.graphs[key]
        if priced.gathering_ranks and not same.may_gather_again:
            priced = priced.with_gathers_once(APART)
            context = replace(context, may_repeat_collectives=False)  # for a graph with a chunked loss
        if same.interconnects:
            context = replace(context, interconnects=same.interconnects)
            priced = capture_and_price(priced.joint, context) or priced
        try:
            planned = plan_graph(priced, replace(context, told=self.told), earlier)
        except BudgetInfeasible as error:
            raise self.named(error) from None
        if len(same.ranks) > 1:
            planned = replace(planned, report=replace(planned.report, ranks=same.ranks))
        self.planned[key] = planned
        return planned

    def _compared(self, key: str, priced: PricedGraph, context: PlanningContext) -> _SameGraph:
        """Returns the members whose graph has the hash ``key``, with the interconnects that all of them use."""
        if self.record is not None:  # a rank whose caches answer does not come here
            return _SameGraph(() if self.record.report is None else self.record.report.ranks, True)
        part = {"graph": key, "gathers": sorted(priced.gathering_ranks), "replication": priced.replication}
        found = self.session.round("graph", part, _by_graph)
        same, links = found[key], {}
        measures = (
            context.request.options.cost_model != pricing.ROOFLINE and context.request.options.interconnect_bandwidth is None
        )
        if measures and any(one["gathers"] for one in found.values()):
            now("measuring the interconnect")
            own = interconnects_of(priced.gathering_groups if same["gathers"] else ())
            part = {"graph": key, "links": [[link.bytes_per_second, link.latency_seconds] for link in own.values()]}
            slowest = self.session.round("interconnects", part, _slowest_by_graph)[key]
            pairs = zip(own, slowest, strict=True)
            links = {name: Interconnect(rate, latency, LinkSource.MEASURED) for name, (rate, latency) in pairs}
        return _SameGraph(tuple(same["ranks"]), same["gathers"], links)

    def settled(self) -> bool:
        if self.session.failed:
            return True
        planned = {} if self.record is not None else self.planned
        plans = (f"{graph_hash(one.plan.graph)} {one.plan.schedule}" for one in planned.values())
        headroom = max((one.context.extra_headroom_bytes for one in planned.values()), default=0)
        part = {"graphs": _hash(planned), "plans": _hash(plans), "headroom": headroom}
        try:
            tellers = self.session.round("end", part, self._tellers)
        except AgreementError as error:
            if not self.falls_back:
                raise
            self.failure = error
            return False
        if not tellers:
            return True
        text = None
        if self.session.channel.rank in tellers.values():
            last = list(planned.values())[-1]  # the graph around all regions
            text = [last.plan.dumps(), last.report.loss_chunks, last.report.tiles, last.report.ended_by_clock]
        texts = self.session.round("plan", text, lambda parts: {str(rank): parts[rank] for rank in tellers.values()})
        self.is_told, self.nonce = True, f"{self.nonce} told"
        teller = tellers.get(part["graphs"])
        if teller is None:
            return self.settled()  # once the others have compiled again
        plan, chunks, tiles, by_clock = texts[str(teller)]
        self.told = _told(f"of rank {teller}", plan, chunks, tiles, by_clock)
        return False

    def _tellers(self, parts: Parts) -> dict[str, int]:
        """Returns, for graphs that ranks have planned differently, the rank whose plan holds: its code needs the most headroom.

        Among equals it is the lowest one. Raises ``AgreementError`` if plans still differ after they were told.
        """
        tellers = {
            graphs: max(alike, key=lambda rank: parts[rank]["headroom"])
            for graphs, alike in grouped(parts, "graphs").items()
            if len(grouped(alike, "plans")) > 1
        }
        if tellers and self.is_told:
            raise AgreementError(
                f"ranks {', '.join(map(str, parts))} plan a nested region differently, as on different hardware. Run them on "
                'equal devices, or pass the option agreement="off"'
            )
        return tellers

    def named(self, error: Exception) -> Exception:
        if isinstance(error, BudgetInfeasible) and error.rank is None and self.binding is not None:
            error.on_rank(self.binding)
        return error

    def fail(self, error: Exception) -> None:
        self.session.fail(error)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _told(whose: str, text: str, chunks: int, tiles: int, by_clock: bool) -> ToldPlan:
    return ToldPlan(PlanFile(whose, _hash([text]), Plan.loads(text, f"the plan {whose}")), chunks, by_clock, tiles)


def _by_graph(parts: Parts) -> dict[str, Any]:
    """Returns the ranks of each graph, and whether its gathers may run again."""
    found = {}
    for graph, alike in grouped(parts, "graph").items():
        gathers = [set(part["gathers"]) for part in alike.values()]
        # A rank that gathers with others than these would wait for them in vain. A number that differs between ranks, such as
        # that of the rank, makes values differ that are equal by the graph of one rank.
        is_equal = len(grouped(alike, "replication")) == 1
        may_gather = is_equal and any(gathers) and all(one <= alike.keys() for one in gathers)
        found[graph] = {"ranks": [*alike], "gathers": may_gather}
    return found


def _slowest_by_graph(parts: Parts) -> dict[str, Any]:
    """Returns, for each graph, the least bandwidth and the longest latency of each of its groups on all ranks."""
    found = {}
    for graph, alike in grouped(parts, "graph").items():
        links = zip(*(part["links"] for part in alike.values()), strict=True)
        found[graph] = [[min(rates), max(seconds)] for rates, seconds in (zip(*same, strict=True) for same in links)]
    return found


@contextlib.contextmanager
def joined(request: Request, place: str, communicates: bool) -> Iterator[Peers]:
    """Yields the peers that compile the graph at ``place`` together.

    A process without peers compiles alone, and so does each rank unless the graph ``communicates``: only repeated gathers, and
    Inductor's messages about collectives, need the same plan on all ranks. An error of the body ends the compilation on all
    members.
    """
    with session_at(place, request.options.agreement) if communicates else contextlib.nullcontext() as session:
        yield ALONE if session is None else Members(session)


def _least_budget(parts: Parts) -> dict[str, Any]:
    """Returns the budget of all ranks, and the rank that sets it. Raises ``AgreementError`` for budgets of different kinds."""
    budgets = {rank: one["budget"] for rank, one in parts.items()}
    kinds = {type(one) for one in budgets.values()}
    if len(kinds) > 1:
        raise AgreementError(
            f"ranks compile one graph under budgets of different kinds: {_by_rank(budgets)}. Pass all ranks a budget of "
            "the same kind: in bytes, as a share or none"
        )
    least = min(budgets, key=lambda rank: budgets[rank]) if kinds & {int, float} else next(iter(budgets))
    binding = least if len(set(budgets.values())) > 1 else None
    return {"budget": budgets[least], "binding": binding, "granted": min(one["granted"] for one in parts.values())}


def _least_host(parts: Parts) -> dict[str, Any]:
    """Returns the bytes that every rank may keep on the host, and the link of the slowest rank; None for a rank without."""
    hosts, links = ([part[name] for part in parts.values()] for name in ("host", "link"))
    least = None if None in links else [*astuple(least_link([HostLink(*link) for link in links]))]
    return {"host": None if None in hosts else min(hosts), "link": least}


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
