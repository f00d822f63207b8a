"""Several plans for the calls of one graph, if the blocks that call it can be told apart.

    x[e, k] = 1: entry e gets plan k            y[g, k] = 1: a block that calls graph g gets plan k
    x[e, k] <= y[g(e), k]                       sum over k of y[g, k] <= variants

An *entry* is one block that calls one graph. The rest of the program is that of the ledger, with entries in place of graphs.

With one binding moment two plans per graph suffice but for rounding, because a basic solution of the linear relaxation has
two fractional weights. So the relaxation selects a few plans of each graph, and CP-SAT chooses among them. The result is at
least as good as the best single plan per graph. Of equal blocks, those with fewer saved bytes come first, because their saved
tensors stay live while the gradients of later blocks accumulate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.mip import linear_optimum
from autoremat.planner.multigraph import ledger
from autoremat.planner.multigraph.ledger import Allocation, Front, Model, Moment
from autoremat.planner.settings import SETTINGS

Vector = NDArray[np.float64]

ROUNDING = 1e-12
"""Seconds that two sums of equal seconds may differ by."""


@dataclass(frozen=True)
class Entries:
    """The entries of a step: blocks and the graphs that they call. Moments refer to entries."""

    fronts: Sequence[Front]
    """For each entry, the plans of its graph. Entries of one graph have the same."""
    calls: Sequence[int]
    moments: Sequence[Moment]
    graph_of: Sequence[int]
    """For each entry, the number of its graph. The numbers begin at 0, in the sequence of the first entries."""
    variants: int = 1
    """Maximum number of different plans of one graph."""
    graph_seconds: float = 0.0
    """Seconds of all calls without recomputation."""
    host_bytes: int | None = None
    """The most bytes that the step may hold on the host; None for no bound."""

    @cached_property
    def members(self) -> list[list[int]]:
        """For each graph, its entries."""
        found: list[list[int]] = [[] for _ in range(max(self.graph_of, default=-1) + 1)]
        for entry, graph in enumerate(self.graph_of):
            found[graph].append(entry)
        return found

    @property
    def mixes(self) -> bool:
        """True if a graph may have several plans."""
        return self.variants > 1 and any(len(members) > 1 and len(self.fronts[members[0]]) > 1 for members in self.members)

    def least_memory(self) -> Allocation:
        """Returns the assignment with the smallest peak that was found."""
        single = self._expanded(self._least_by_graph)
        assert single is not None
        return self._mixed(single, None) if self.mixes else single

    def allocate(self, budget: int | None) -> Allocation | None:
        """Returns the assignment of least seconds that was found for a peak of at most ``budget`` bytes (None: no bound).

        A further plan per graph must save a share of the added seconds and of the step, because it costs a compilation. Returns
        None if no choice fits.
        """
        single = self._expanded(ledger.allocate(*self._by_graph, budget, self._least_by_graph, self.host_bytes))
        if budget is None or not self.mixes or (single is not None and self._added(single) <= 0.0):
            return single
        start = single or self.least_memory()
        return None if start.peak_bytes > budget else self._with_variants(single, start, budget)

    def _with_variants(self, single: Allocation | None, start: Allocation, budget: int) -> Allocation | None:
        """Returns the assignment of the fewest plans per graph that are worth their compilations."""
        if self.variants == 1:
            return single
        found, worth = self._mixed(start, budget), SETTINGS.ledger
        added = self._added(found)
        tolerated = added + max(added * worth.worth_of_a_plan, self.graph_seconds * worth.worth_in_the_step) + ROUNDING
        for variants in range(1, self.variants):
            fewer = replace(self, variants=variants)._with_variants(single, start, budget)
            if fewer is not None and self._added(fewer) <= tolerated:
                return fewer
        return found

    @cached_property
    def _least_by_graph(self) -> Allocation:
        return ledger.least_memory(*self._by_graph, self.host_bytes)

    @cached_property
    def _by_graph(self) -> tuple[list[Front], list[int], list[Moment]]:
        moments = [
            replace(
                moment,
                open=tuple(self.graph_of[entry] for entry in moment.open),
                running=None if moment.running is None else self.graph_of[moment.running],
            )
            for moment in self.moments
        ]
        calls = [sum(self.calls[entry] for entry in members) for members in self.members]
        return [self.fronts[members[0]] for members in self.members], calls, moments

    def _expanded(self, found: Allocation | None) -> Allocation | None:
        """Returns the assignment to graphs as one to entries."""
        return None if found is None else replace(found, choice=tuple(found.choice[graph] for graph in self.graph_of))

    def _added(self, found: Allocation) -> float:
        fastest = [count * min(p.seconds for p in front) for count, front in zip(self.calls, self.fronts, strict=True)]
        return found.seconds - sum(fastest)

    def _mixed(self, start: Allocation, budget: int | None) -> Allocation:
        """Returns an assignment of several plans per graph that is at least as good as ``start``."""
        kept = self._promising(budget, start)
        fronts = [[self.fronts[entry][k] for k in plans] for entry, plans in enumerate(kept)]
        model = Model(fronts, self.moments, self.host_bytes)
        for members in self.members:
            self._limit(model, members)
        gap = 0.0
        if budget is None:
            model.minimize_peak()
        else:
            model.keep_within(budget)
            model.minimize_seconds(self.calls)
            gap = SETTINGS.ledger.gap
        hint = [plans.index(k) for plans, k in zip(kept, start.choice, strict=True)]
        choice = model.solve(hint, SETTINGS.ledger.effort_of_variants, gap)
        if choice is None:
            return start
        found = ledger.outcome(self.fronts, self.calls, self.moments, [plans[k] for plans, k in zip(kept, choice, strict=True)])
        found = self._lean_first(found, found.peak_bytes if budget is None else budget)
        figures = [(one.peak_bytes if budget is None else one.seconds) for one in (start, found)]
        return found if figures[1] < figures[0] else start

    def _limit(self, model: Model, members: Sequence[int]) -> None:
        plans = range(len(model.chosen[members[0]]))
        used = [model.model.new_bool_var(f"y[{members[0]},{k}]") for k in plans]
        model.model.add(sum(used) <= self.variants)
        for entry in members:
            for x, y in zip(model.chosen[entry], used, strict=True):
                model.model.add_implication(x, y)

    def _lean_first(self, found: Allocation, limit: int) -> Allocation:
        """Returns the assignment with the leaner plans first among equal blocks, if its peak is at most ``limit`` bytes."""
        choice = list(found.choice)
        for members in self.members:
            for count in sorted({self.calls[entry] for entry in members}):
                equal = [entry for entry in members if self.calls[entry] == count]
                plans = sorted((found.choice[entry] for entry in equal), key=lambda k: self.fronts[equal[0]][k].saved_bytes)
                for entry, plan in zip(equal, plans, strict=True):
                    choice[entry] = plan
        ordered = ledger.outcome(self.fronts, self.calls, self.moments, choice)
        held = ledger.host_peak(self.moments, [front[k] for front, k in zip(self.fronts, choice, strict=True)])
        fits = ordered.peak_bytes <= limit and (self.host_bytes is None or held <= self.host_bytes)
        return ordered if fits else found

    def _promising(self, budget: int | None, start: Allocation) -> list[list[int]]:
        """Returns, for each entry, the plans to choose from: those with the least reduced costs in the linear relaxation."""
        sizes = [len(front) for front in self.fronts]
        begins = [0, *np.cumsum(sizes).tolist()]
        costs, weights = self._relaxed(budget, sizes, begins)
        kept: list[list[int]] = [[] for _ in self.fronts]
        for members in self.members:
            stretches = [slice(begins[entry], begins[entry + 1]) for entry in members]
            least = np.min([costs[stretch] for stretch in stretches], axis=0).round(9)
            weight = np.max([weights[stretch] for stretch in stretches], axis=0)
            best = np.lexsort((-weight, least))[: SETTINGS.ledger.plans_of_variants].tolist()
            plans = sorted({*best, *(start.choice[entry] for entry in members)})
            for entry in members:
                kept[entry] = plans
        return kept

    def _relaxed(self, budget: int | None, sizes: list[int], begins: list[int]) -> tuple[Vector, Vector]:
        """Returns the reduced costs and the weights of all plans in the relaxation; zeros if it has no solution."""
        rows = np.zeros((len(self.moments), begins[-1]))
        for row, moment in zip(rows, self.moments, strict=True):
            for entry, count in Counter(moment.open).items():
                row[begins[entry] : begins[entry + 1]] += [count * p.saved_bytes for p in self.fronts[entry]]
            if moment.running is not None:
                peaks = [p.peak_bytes(moment.backward) for p in self.fronts[moment.running]]
                row[begins[moment.running] : begins[moment.running + 1]] += peaks
        base = np.array([moment.base_bytes for moment in self.moments], dtype=float)
        each = np.repeat(np.eye(len(sizes)), sizes, axis=1)
        scale = float(rows.max(initial=1.0))
        if budget is None:
            rows = np.hstack([rows, np.full((len(rows), 1), -scale)])
            each = np.hstack([each, np.zeros((len(each), 1))])
            objective, room = np.array([0.0] * begins[-1] + [1.0]), -base
        else:
            seconds = [count * p.seconds for count, front in zip(self.calls, self.fronts, strict=True) for p in front]
            objective, room = np.array(seconds) / (max(seconds) or 1.0), budget - base
        rows, room = np.vstack([rows / scale, *self._held_on_host(begins, rows.shape[1])]), room / scale
        room = np.append(room, np.ones(len(rows) - len(room)))
        found = linear_optimum(objective, rows, room, each, np.ones(len(sizes)))
        if found is None:
            return np.zeros(begins[-1]), np.zeros(begins[-1])
        reduced_costs, weights = found
        return reduced_costs[: begins[-1]], weights[: begins[-1]]

    def _held_on_host(self, begins: list[int], columns: int) -> list[Vector]:
        """Returns, for each moment, the bytes on the host under each plan as a share of their bound; empty without a bound."""
        if not self.host_bytes:
            return []
        rows = np.zeros((len(self.moments), columns))
        for row, moment in zip(rows, self.moments, strict=True):
            for entry in moment.calls:
                row[begins[entry] : begins[entry + 1]] += [p.host_bytes / self.host_bytes for p in self.fronts[entry]]
        return list(rows)
