"""Seconds of executions as fused, of saving and of running again: against an independent count, and in cases by hand."""

import math
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_oracle import Buffer, Fusion
from oracles import recompute_seconds, saving_seconds
from strategies import changed, graphs, saved_sets

from autoremat.planner.cost.durations import durations, traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind, Op
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.search.planner import Planner

T = TypeVar("T")


@st.composite
def fused_schedules(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """Graphs that fuse, at a rate that gives traffic and seconds alone about the same size, with a schedule."""
    graph = changed(draw(graphs(fuses=True)), saving_seconds_per_byte=draw(st.sampled_from([1e-6, 1e-4, 1e-2])))
    return graph, build_schedule(graph, draw(saved_sets(graph)))


def in_one_group(graph: Graph, schedule: Schedule, one: int, other: int) -> bool:
    """Whether no extern kernel and no border of the halves separates two executions."""
    sequence, (first, last) = schedule.sequence, sorted((one, other))
    extern = any(graph.ops[index].kind is Kind.EXTERN for index in sequence[first : last + 1])
    return not extern and not first < len(schedule.forward) <= last


def largest(*found: dict[T, float]) -> dict[T, float]:
    """The largest number of each key."""
    return {key: max(one.get(key, 0.0) for one in found) for key in {key for one in found for key in one}}


class Passes:
    """The passes of fusion groups, and what they compute and read, by their definition."""

    def __init__(self, graph: Graph, schedule: Schedule, fusion: Fusion) -> None:
        self.graph, self.schedule, self.fusion, self.absent = graph, schedule, fusion, fusion.absent()

    def op(self, at: int) -> Op:
        return self.graph.ops[self.schedule.sequence[at]]

    def made_in_group(self, at: int) -> list[Buffer]:
        behind = (self.fusion.read.get((value, at)) for value in self.op(at).inputs)
        return [b for b in behind if b is not None and in_one_group(self.graph, self.schedule, b.computed_at, at)]

    def before(self, at: int) -> int:
        makers = [b.computed_at for b in self.made_in_group(at)]
        ended = max((self.before(maker) + self.op(maker).ends_pass for maker in makers), default=0)
        return ended + (self.op(at).ends_pass and ended in self.stored(at))

    def stored(self, at: int) -> set[int]:
        """The passes that store a pointwise result that an execution reads."""
        found = set[int]()
        for b in self.made_in_group(at):
            if b in self.absent:
                found |= self.stored(b.computed_at)
            elif self.op(b.computed_at).kind is Kind.POINTWISE:
                found.add(self.before(b.computed_at))
        return found

    def share(self, one: int, other: int) -> bool:
        """Whether two executions run in one pass."""
        return in_one_group(self.graph, self.schedule, one, other) and self.before(one) == self.before(other)

    def made(self, at: int) -> float:
        """The bytes that limit what an execution reads of a tensor."""
        sizes = (self.graph.values[value].bytes for value in self.op(at).outputs)
        return sum(sizes) if self.op(at).kind is Kind.POINTWISE else math.inf

    def computed(self, at: int, most: float = math.inf) -> dict[int, float]:
        """The share of each execution that runs in the kernel of another one."""
        made = self.made(at)
        found = {at: min(1.0, most / made) if 0 < made < math.inf else 1.0}
        for b in (self.fusion.read.get((value, at)) for value in self.op(at).inputs):
            if b in self.absent:
                found = largest(found, self.computed(b.computed_at, min(most, 8 * made)))
        return found

    def read(self, at: int, anchor: int, most: float = math.inf) -> dict[Buffer | int, float]:
        """The bytes that an execution reads of each tensor as part of the kernel at `anchor`."""
        found, most = dict[Buffer | int, float](), min(most, 8 * self.made(at))
        for value in self.op(at).inputs:
            b = self.fusion.read.get((value, at))
            if b in self.absent:
                found = largest(found, self.read(b.computed_at, anchor, most))
            elif b is None or not self.share(b.computed_at, anchor):
                found = largest(found, {value if b is None else b: min(most, self.graph.values[value].bytes)})
        return found


def count_of_kernels(graph: Graph, schedule: Schedule) -> list[float]:
    """The seconds of executions, by what each pass of a fusion group has computed and moved up to each of them."""
    fusion, sequence, per_byte = Fusion(graph, schedule), schedule.sequence, graph.machine.saving_seconds_per_byte
    passes, absent = Passes(graph, schedule, fusion), fusion.absent()
    makes = [[b for b in fusion.buffers if b.computed_at == at] for at in range(len(sequence))]

    def beside_traffic(index: int) -> float:
        op = graph.ops[index]
        bound = not op.memory_bound_seconds and op.seconds <= op.bytes_moved * per_byte / 2 * (1 + 1e-9)
        return 0.0 if bound else op.seconds - op.memory_bound_seconds

    found, done = [], list[int]()
    for at, index in enumerate(sequence):
        if graph.ops[index].kind is Kind.EXTERN:
            found.append(graph.ops[index].seconds)
        elif makes[at] and absent.issuperset(makes[at]):
            found.append(0.0)
        else:
            before = [other for other in done if passes.share(other, at)]
            ran, seen = largest(*map(passes.computed, before)), largest(*(passes.read(one, one) for one in before))
            new = {one: share - ran.get(one, 0.0) for one, share in largest(ran, passes.computed(at)).items()}
            moved = 0.0
            for one, size in largest(seen, passes.read(at, at)).items():
                moved += (size - seen.get(one, 0.0)) * (1 - graph.machine.write_share) * per_byte
            for b in makes[at]:
                moved += graph.values[b.value].bytes * graph.machine.write_share * per_byte * (b not in absent)
            alone = sum(share * graph.ops[sequence[one]].seconds for one, share in new.items())
            busy = sum(share * beside_traffic(sequence[one]) for one, share in new.items())
            both = max if graph.machine.overlaps_wholly else math.hypot
            found.append(min(alone, both(moved, busy)))
            done.append(at)
    return found


@settings(max_examples=300)
@given(fused_schedules())
def test_seconds_are_those_of_an_independent_count(case):
    assert durations(*case) == pytest.approx(count_of_kernels(*case))


@settings(max_examples=120)
@given(graphs())
def test_traffic_is_that_of_an_independent_count(graph):
    forward = range(graph.num_forward)
    assert traffic_of(graph).recompute_seconds[: graph.num_forward] == pytest.approx(
        [recompute_seconds(graph, op) for op in forward]
    )
    assert traffic_of(graph).saving_seconds == pytest.approx([saving_seconds(graph, v) for v in range(len(graph.values))])


@given(graphs())
def test_a_plan_costs_what_it_runs_again_and_saves(graph):
    plan = Planner(graph).find().plan
    assert plan is not None
    recomputed, saved = (
        (recompute_seconds(graph, op) for op in plan.recomputed),
        (saving_seconds(graph, v) for v in plan.saved),
    )
    assert plan.cost_seconds == pytest.approx(sum(recomputed) + sum(saved))
