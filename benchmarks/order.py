"""What another order of the ops would be worth: the peak of a plan before and after its executions are reordered.

    python benchmarks/order.py              # some minutes
    python benchmarks/order.py --only hrnet unet

Twelve models, planned for an A100 by name with Inductor's fusion: at the least peak found, and at 40 % of the step without
recomputation. The planner itself computes gradients of weights early at the least peak, if that lowers it. The executions of
each half are then reordered by local search, with the recomputation of the plan. A move delays the op of an idle value to its
next reader, or runs a reader of an idle value, with all that it needs, before the fullest execution. So gradients of weights
come early and branches run one after the other, where that lowers the peak. Where random draws and effects stand is free here,
so the gain is rather too large.

``recomputation`` is the peak if only recomputations move, which the planner decides already. ``lower`` is what lies below that.
At 40 %, the budget holds already, and a lower peak is worth the seconds that it spares. ``faster`` is the recomputation that
the freed memory makes needless, as a share of the step. ``bound`` is proven for any order of the backward's own ops.

Under budgets, the planner runs gradients of weights later where fused kernels then share work. ``later`` is the share of the
predicted step that this saves, beside the plan that the planner finds in the traced order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["AUTOREMAT_PROGRESS"] = "0"

import least_peak
import model_zoo
import numpy as np
import plan_hashes
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat import Graph, Plan
from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.live_ranges import Buffers
from autoremat.planner.search.least_peak import relaxed
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.strategies import IN_SEQUENCE
from autoremat.planner.search.work_limit import WorkLimit

RESULTS = Path(__file__).resolve().parent / "results" / "order.json"
SHARE = 0.4
LEAST = "least"
STEP = 0.01
"""Share of the peak by which the next target of the local search is lower."""
SIMULATIONS = 300
"""Number of schedules that the local search simulates."""
LONGEST = 12
"""Number of executions that one move brings forward at most."""
PATIENCE = 4
"""Number of random changes in a row, each with a descent, after which the local search ends."""


class HighResolution(nn.Module):
    """An HRNet-like network: three branches of falling resolution, which exchange their features after each stage."""

    def __init__(self, width: int = 8, stages: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = model_zoo.convolve(3, width)
        self.down = nn.ModuleList(model_zoo.convolve(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Sequential(model_zoo.convolve(w, w), model_zoo.convolve(w, w)) for w in widths)
            for _ in range(stages)
        )
        self.exchange = nn.ModuleList(
            nn.ModuleList(nn.ModuleList(nn.Conv2d(a, b, 1) for a in widths) for b in widths) for _ in range(stages)
        )
        self.head = nn.Linear(sum(widths), 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        branches = [self.stem(images)]
        for down in self.down:
            branches.append(down(F.avg_pool2d(branches[-1], 2)))
        for blocks, exchange in zip(self.blocks, self.exchange, strict=True):
            branches = [block(branch) for block, branch in zip(blocks, branches, strict=True)]
            sizes = [branch.shape[-2:] for branch in branches]
            branches = [
                sum(F.interpolate(mix(b), size) for mix, b in zip(mixes, branches, strict=True))
                for mixes, size in zip(exchange, sizes, strict=True)
            ]
        return F.cross_entropy(self.head(torch.cat([branch.mean((2, 3)) for branch in branches], 1)), labels)


plan_hashes.MODELS["hrnet"] = lambda: (HighResolution(), model_zoo.images(32))
MODELS = [name for name in plan_hashes.MODELS if name != "mlp"]


@dataclass
class Simulations:
    """The schedules that a local search may still simulate."""

    count: int
    keeps: bool
    """True if only recomputations may move."""


@dataclass(frozen=True)
class Row:
    """One plan, and what its executions need in another order."""

    name: str
    budget: str
    ops: int
    peak_bytes: int
    moved_bytes: int
    """If only recomputations move."""
    reordered_bytes: int
    bound_bytes: int
    faster: float
    """The share of the step that the plan in the other order saves within the same budget; 0 at the least peak."""
    later: float
    """The share of the predicted seconds of the step that the planner saves by its own order; 0 at the least peak."""

    @property
    def lower(self) -> float:
        """The share of the peak that the order of the ops saves beyond that of recomputations."""
        return max(0.0, 1.0 - self.reordered_bytes / self.moved_bytes)

    @property
    def gain(self) -> float:
        """What the order is worth: bytes at the least peak, and seconds under a budget that is kept without it."""
        return self.lower if self.budget == LEAST else self.faster


def reordered(plan: Plan, keeps: bool = False) -> Plan:
    """Returns the plan of the least peak that a local search finds by reordering the executions of ``plan``.

    With ``keeps``, the forward and the backward's own ops keep their sequence.
    """
    generator, best, failures, left = random.Random(0), plan, 0, Simulations(SIMULATIONS, keeps)
    found = plan
    while left.count > 0 and failures < PATIENCE:
        found = descend(found, best.peak_bytes, left)
        failures = 0 if found.peak_bytes < best.peak_bytes else failures + 1
        best = min(best, found, key=lambda one: one.peak_bytes)
        shaken = [one for one in moved(best, generator.randrange(len(best.sequence)), generator)]
        found = simulated(best, generator.choice(shaken), left) or best if shaken else best
    return best


def descend(plan: Plan, level: int, left: Simulations) -> Plan:
    """Returns the best plan on a descent by moves that each lower the bytes over a target, summed over the executions."""
    best = plan
    while left.count > 0:
        target = int(level * (1.0 - STEP))
        excess = over(plan, target)
        while excess and left.count > 0:
            bytes_at, found = plan.timeline.bytes_at, None
            for position in np.argsort(-bytes_at, kind="stable")[:4].tolist():
                for schedule in moved(plan, position):
                    tried = simulated(plan, schedule, left)
                    if tried is not None and over(tried, target) < excess:
                        found, excess = tried, over(tried, target)
                if found is not None:
                    break
            if found is None:
                break
            plan = found
            best = min(best, plan, key=lambda one: one.peak_bytes)
        if excess:
            break
        level = best.peak_bytes
    return best


def own(graph: Graph, schedule: Schedule) -> list[int]:
    """Returns the executions of the forward, and those of the backward's own ops."""
    return [*schedule.forward, *(index for index in schedule.backward if index >= graph.num_forward)]


def over(plan: Plan, target: int) -> int:
    return int(np.maximum(plan.timeline.bytes_at - target, 0).sum())


def simulated(plan: Plan, schedule: Schedule, left: Simulations) -> Plan | None:
    """Returns the simulated plan; None if it reads what is computed later, or moves own ops that keep their order."""
    if left.keeps and own(plan.graph, schedule) != own(plan.graph, plan.schedule):
        return None
    left.count -= 1
    try:
        return Plan.of(plan.graph, schedule, "reordered")
    except PlanInvalid:
        return None


def moved(plan: Plan, position: int, generator: random.Random | None = None) -> Iterator[Schedule]:
    """Yields the schedules after one move that may free memory at ``position``."""
    schedule, graph = plan.schedule, plan.graph
    buffers, border = Buffers(graph, schedule), len(schedule.forward)
    half = range(border) if position < border else range(border, len(schedule.sequence))
    sources: list[list[int]] = [[] for _ in schedule.sequence]
    readers: list[list[int]] = [[] for _ in buffers.value]
    start = buffers.start.tolist()
    for source, reader in zip(buffers.source.tolist(), buffers.reader.tolist(), strict=True):
        sources[reader].append(start[source])
        readers[source].append(reader)
    live = np.flatnonzero((buffers.start < position) & (buffers.last > position) & ~buffers.kept).tolist()
    for live_range in sorted(live, key=lambda one: -int(buffers.bytes[one]))[:12]:
        later = [reader for reader in readers[live_range] if reader > position]
        if not later:
            continue
        if start[live_range] in half and min(readers[live_range]) > position and min(later) in half:
            yield with_sequence(schedule, delayed(schedule.sequence, start[live_range], min(later)))
        for reader in later[:3]:
            block = needed(sources, reader, position) if reader in half else set()
            if block and len(block) <= LONGEST:
                yield with_sequence(schedule, brought_forward(schedule.sequence, block, position))


def needed(sources: list[list[int]], reader: int, position: int) -> set[int]:
    """Returns the executions from ``position`` on that must run for ``reader``; none if ``position`` is one of them."""
    block, stack = {reader}, [reader]
    while stack:
        for source in sources[stack.pop()]:
            if source >= position and source not in block:
                block.add(source)
                stack.append(source)
    return set() if position in block else block


def delayed(sequence: tuple[int, ...], begin: int, end: int) -> list[int]:
    return [*sequence[:begin], *sequence[begin + 1 : end], sequence[begin], *sequence[end:]]


def brought_forward(sequence: tuple[int, ...], block: set[int], position: int) -> list[int]:
    rest = [index for place, index in enumerate(sequence[position:], position) if place not in block]
    return [*sequence[:position], *(sequence[place] for place in sorted(block)), *rest]


def with_sequence(schedule: Schedule, sequence: list[int]) -> Schedule:
    border = len(schedule.forward)
    return Schedule(tuple(sequence[:border]), tuple(sequence[border:]))


def rows_of(name: str) -> Iterator[Row]:
    """Yields the rows of a model."""
    graph = least_peak.captured(name)
    planner = Planner(graph, least_peak.WORK)
    lowest, bound, limit = planner.lowest, planner.moments.peak_bytes(), int(SHARE * planner.baseline.peak_bytes)
    plans = [(LEAST, lowest.peak_bytes, lowest)]
    found = Planner(graph, least_peak.WORK).find(limit).plan  # with all its time
    traced = Planner(graph, least_peak.WORK, IN_SEQUENCE).find(limit).plan
    later = 0.0 if found is None or traced is None else 1.0 - found.predicted_seconds / traced.predicted_seconds
    if found is not None:
        plans.append((f"{SHARE:.0%}", limit, found))
    for name_of_budget, budget, plan in plans:
        moved_alone, other = reordered(plan, keeps=True), reordered(plan)
        costs = [relaxed(one, budget, WorkLimit(least_peak.WORK)).cost_seconds for one in (moved_alone, other)]
        faster = 0.0 if plan is lowest else max(0.0, costs[0] - costs[1]) / graph.step_seconds
        yield Row(
            name, name_of_budget, len(graph.ops), plan.peak_bytes, moved_alone.peak_bytes, other.peak_bytes, bound, faster,
            0.0 if plan is lowest else later,
        )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Returns the rows as text."""
    lines = [
        f"{'model':<9}{'budget':>7}{'ops':>5}{'peak':>11}{'recomputation':>15}{'reordered':>11}{'lower':>7}{'faster':>8}"
        f"{'bound':>11}{'later':>7}"
    ]
    for row in rows:
        lines.append(
            f"{row.name:<9}{row.budget:>7}{row.ops:>5}{row.peak_bytes:>11}{row.moved_bytes:>15}{row.reordered_bytes:>11}"
            f"{row.lower:>7.1%}{row.faster:>8.1%}{row.bound_bytes:>11}{row.later:>7.1%}"
        )
    worth = sorted({row.name for row in rows if row.gain >= 0.02})
    count = len({row.name for row in rows})
    lines.append(f"another order is worth 2 % or more for {len(worth)} of {count}: {', '.join(worth) or '-'}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="names of models; nothing is stored then")
    chosen = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    rows: list[Row] = []
    for name in chosen or MODELS:
        rows += rows_of(name)
        print(table(rows), flush=True)
    if chosen is None:
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        RESULTS.with_suffix(".txt").write_text(table(rows))


if __name__ == "__main__":
    main()
