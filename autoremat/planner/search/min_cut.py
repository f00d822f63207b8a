"""Minimum cut that decides which values to save and which to recompute.

Let ``y_v = 1`` if value ``v`` is available to the backward, and ``x_o = 1`` if op ``o`` runs again in it.

    minimise    sum of cost_o * x_o  +  sum of price_v * max(0, y_v - x_o(v))      o(v): the op of v
    subject to  y_v = 1 for every v that the backward reads;    x_o <= y_u for every input u of o

An available value is saved unless its op runs again. This problem is a minimum cut in the following network:

    source -> op            capacity: cost of running the op again
    op -> value             capacity: price of saving the value
    value -> reading op     infinite
    value -> sink           infinite, for every value that the backward reads

Values on the sink side are available, and ops on the sink side run again. A value on the sink side is saved if its op is on the
source side. The same network serves every price, because only the capacities change. OR-Tools' push-relabel ``SimpleMaxFlow``
solves it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.search.work_limit import CUT, WorkLimit

RESOLUTION = 1 << 36
"""Integer to which the sum of all finite costs and prices of a cut is scaled, because capacities are integers."""

FORBIDDEN = RESOLUTION << 1
"""Capacity of a last resort, used only if no other cut exists. An example is saving what a constraint wants recomputed."""

INFINITE = FORBIDDEN << 16


def infinite_arcs(flow: max_flow.SimpleMaxFlow, pairs: list[tuple[int, int]]) -> NDArray[np.int32]:
    """Adds arcs of infinite capacity, which no cut contains, and returns their numbers."""
    ends = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    capacities = np.full(len(ends), INFINITE, dtype=np.int64)
    arcs: NDArray[np.int32] = flow.add_arcs_with_capacity(ends[:, 0].copy(), ends[:, 1].copy(), capacities)
    return arcs


@dataclass(frozen=True)
class Cut:
    """A minimum cut."""

    saved: frozenset[int]
    bytes: float
    """Bytes of the saved values, without values that cost nothing to save."""
    seconds: float
    """Seconds of the recomputation, plus the traffic of saved values if ``traffic`` is set."""
    bound: float
    """Lower bound on the cost of any choice, in seconds plus priced bytes: that of this cut minus possible rounding errors."""


class MinCut:
    """Flow network of one graph. Its cuts count within ``limit``."""

    def __init__(self, graph: Graph, limit: WorkLimit | None = None) -> None:
        self.graph, self.limit, self.values = graph, limit or WorkLimit(), graph.forward_values
        self.index = {v: i for i, v in enumerate(self.values)}
        num_ops, traffic, ops = graph.num_forward, traffic_of(graph), graph.ops[: graph.num_forward]
        node = {v: i + num_ops for v, i in self.index.items()}
        self.source, self.sink = num_ops + len(self.values), num_ops + len(self.values) + 1
        self.producers = np.array([graph.values[v].producer for v in self.values], dtype=np.int32)
        self.bytes = np.array([graph.values[v].bytes for v in self.values], dtype=np.float64)
        self.traffic = traffic.saving_seconds[list(self.values)]
        self.costs = np.array(traffic.repeat_seconds[:num_ops])
        """Seconds of running each forward op again."""
        self.top_price = 1.0 + graph.forward_seconds
        """Price in seconds per saved byte at which a single byte costs more than the whole forward."""
        self.fixed = np.array([not op.may_run_again for op in ops], dtype=bool)
        to_recompute = [op.constraint is Constraint.RECOMPUTE and op.rematerializable for op in ops]
        self.to_recompute = np.array(to_recompute, dtype=bool)[self.producers]
        self.needs = sorted(graph.backward_needs)
        self.flow = max_flow.SimpleMaxFlow()
        self.run_again = infinite_arcs(self.flow, [(self.source, op) for op in range(num_ops)])
        self.save = infinite_arcs(self.flow, [*zip(self.producers.tolist(), node.values(), strict=True)])
        # A recomputed op needs all its inputs even if one of its results is saved, because no arc leads back to its values.
        infinite_arcs(self.flow, [(node[v], o) for o, op in enumerate(ops) for v in op.inputs if v in node])
        self.need = infinite_arcs(self.flow, [(node[v], self.sink) for v in self.needs])

    def cut(
        self,
        seconds_per_byte: float,
        free: frozenset[int] = frozenset(),
        needs: frozenset[int] | None = None,
        traffic: bool = False,
    ) -> Cut:
        """Returns the minimum cut at a price in seconds per saved byte. The ``free`` values cost nothing to save.

        With ``traffic``, the seconds of saving count as well. With ``needs``, only these values must be available, and
        constraints to recompute are ignored; lower bounds use this. Raises ``PlanInvalid`` if no cut of finite capacity exists.
        """
        with self.limit.unit(CUT * (self.sink + self.flow.num_arcs())):
            return self._cut(seconds_per_byte, free, needs, traffic)

    def _cut(self, seconds_per_byte: float, free: frozenset[int], needs: frozenset[int] | None, traffic: bool) -> Cut:
        num_forward = self.graph.num_forward
        held = [self.index[v] for v in (*self.graph.forward_outputs, *free) if v in self.index]
        counted = self.bytes.copy()
        counted[held] = 0.0
        moved = self.traffic * traffic
        moved[held] = 0.0
        prices = counted * seconds_per_byte + moved
        scale = RESOLUTION / max(prices.sum() + self.costs.sum(), 1e-30)
        costs = np.ceil(self.costs * scale).astype(np.int64)
        costs[self.fixed] = INFINITE
        capacities = np.floor(prices * scale).astype(np.int64)
        forbidden = self.to_recompute & (needs is None)
        capacities[forbidden] = FORBIDDEN
        capacities[[self.index[v] for v in self.graph.forward_outputs if v in self.index]] = 0
        self.flow.set_arcs_capacity(self.run_again, costs)
        self.flow.set_arcs_capacity(self.save, capacities)
        wanted = [INFINITE if needs is None or v in needs else 0 for v in self.needs]
        self.flow.set_arcs_capacity(self.need, np.array(wanted, dtype=np.int64))
        status = self.flow.solve(self.source, self.sink)
        if status != self.flow.OPTIMAL or self.flow.optimal_flow() >= INFINITE:
            raise PlanInvalid(
                "the constraints in the graph contradict each other: the backward needs a value that may be neither saved nor "
                "recomputed"
            )
        on_source_side = np.zeros(self.sink + 1, dtype=bool)
        on_source_side[self.flow.get_source_side_min_cut()] = True
        saved = np.flatnonzero(~on_source_side[num_forward : self.source] & on_source_side[self.producers])
        again = ~on_source_side[:num_forward]
        seconds = sum(self.costs[again].tolist()) + float(moved[saved].sum())
        bound = (self.flow.optimal_flow() - FORBIDDEN * int(forbidden[saved].sum()) - num_forward) / scale
        return Cut(frozenset(self.values[i] for i in saved.tolist()), float(counted[saved].sum()), float(seconds), float(bound))
