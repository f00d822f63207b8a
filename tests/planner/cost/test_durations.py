"""Seconds of executions as fused, of saving and of running again: against an independent count, and in cases by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_oracle import Buffer, Fusion
from oracles import recompute_seconds, saving_seconds
from strategies import GraphBuilder, changed, graphs, saved_sets

from autoremat.planner.cost.durations import durations, traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind, Op, Role
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule
from autoremat.planner.memory import fusion
from autoremat.planner.memory.fusion import fusion_of
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner

T = TypeVar("T")

SIZE, PER_BYTE = 100, 2e-6
MOVED = SIZE * PER_BYTE / 2
"""Seconds to write or to read a value of these graphs."""

SLOW = 1.0
"""Seconds of an op alone that no kernel of these graphs reaches."""


def streamed(build: GraphBuilder, *inputs: int, size: int = SIZE, arithmetic: float = 0.0, **fields: object) -> int:
    """A pointwise op."""
    fields = {"seconds": SLOW, "memory_bound_seconds": SLOW - arithmetic} | fields
    return build.op(inputs, size, kind=Kind.POINTWISE, **fields)


def product(build: GraphBuilder, *inputs: int, **fields: object) -> int:
    return build.op(inputs, SIZE, **{"kind": Kind.EXTERN, "seconds": 3.0} | fields)


def saving_all(build: GraphBuilder, **ends: tuple[int, ...]) -> tuple[Graph, Schedule]:
    graph = build.graph(**ends, fuses=True, saving_seconds_per_byte=PER_BYTE)
    return graph, build_schedule(graph, graph.backward_needs)


def test_each_fused_kernel_takes_a_launch():
    build = GraphBuilder()
    first = product(build, streamed(build, streamed(build, build.source(SIZE))))
    result = streamed(build, first)
    graph, schedule = saving_all(build, forward_outputs=(result,))
    launched = changed(graph, launch_seconds=0.25)
    added = durations(launched, schedule) - durations(graph, schedule)
    assert sum(added > 0) == 2
    assert added.sum() == pytest.approx(0.5)


def reduced(build: GraphBuilder, *inputs: int, ends_pass: bool) -> int:
    """A sum without arithmetic, to a value that is read and written in no time."""
    return build.op(inputs, 0, kind=Kind.REDUCTION, seconds=SLOW, memory_bound_seconds=SLOW, ends_pass=ends_pass)


@pytest.mark.parametrize("ends_pass", [False, True])
def test_what_depends_on_a_result_that_ends_a_pass_reads_its_operand_again(ends_pass):
    """As a batch norm does behind a convolution, and a layer norm does not. Each pass has a kernel."""
    build = GraphBuilder()
    first = product(build, build.source(SIZE))
    scaled = streamed(build, first, build.source(2 * SIZE))
    total = reduced(build, scaled, ends_pass=ends_pass)
    result = product(build, streamed(build, scaled, total))
    graph, schedule = saving_all(build, forward_outputs=(result,))
    again = 3 * MOVED if ends_pass else 0.0
    assert durations(graph, schedule) == pytest.approx([3.0, 0.0, 3 * MOVED, again + MOVED, 3.0])
    launched = durations(changed(graph, launch_seconds=0.25), schedule)
    assert launched == pytest.approx([3.0, 0.0, 0.25 + 3 * MOVED, 0.25 * ends_pass + again + MOVED, 3.0])


@pytest.mark.parametrize(("longer", "expected"), [(1.0, 3 * MOVED), (1.5, 1.5 * 3 * MOVED)])
def test_an_op_that_is_no_stream_has_arithmetic_if_it_takes_longer_than_its_traffic(longer, expected):
    """As a sum that counts elements. It reads what is inlined: one tensor instead of three."""
    build = GraphBuilder()
    sum_ = {"kind": Kind.REDUCTION, "bytes_moved": 3 * SIZE, "seconds": longer * 3 * MOVED}
    total = build.op([streamed(build, build.source(3 * SIZE), size=3 * SIZE)], 0, **sum_)
    graph, schedule = saving_all(build, forward_outputs=(total,))
    assert durations(graph, schedule) == pytest.approx([0.0, expected])


def trained(arithmetic: float = 0.0) -> tuple[Graph, int, int]:
    """A product and a chain of two pointwise results behind it."""
    build = GraphBuilder()
    first = product(build, build.source(SIZE))
    last = streamed(build, streamed(build, first, arithmetic=arithmetic), arithmetic=arithmetic)
    loss = build.op([last], 0, kind=Kind.REDUCTION, seconds=0.0)
    gradient = streamed(build, build.source(SIZE, Role.TANGENT), last, first, forward=False)
    ends = {"forward_outputs": (loss,), "backward_outputs": (gradient,)}
    return build.graph(**ends, fuses=True, saving_seconds_per_byte=PER_BYTE), first, last


def test_seconds_do_not_depend_on_stays():
    graph, first, last = trained()
    schedule = build_schedule(graph, {first, last})
    stored = replace(schedule, stays=(Stay(last, "host", 2, 3, 4, 4),))
    assert durations(graph, stored).tolist() == durations(graph, schedule).tolist()


def test_a_schedule_is_fused_once_for_its_bytes_and_its_seconds(monkeypatch):
    counted = []
    monkeypatch.setattr(fusion, "fusion_of", lambda buffers: counted.append(buffers) or fusion_of(buffers))
    graph, first, last = trained()
    plans = [Plan.of(graph, build_schedule(graph, {first, last})) for _ in range(2)]
    found, again = (durations(graph, plan.schedule) for plan in plans)
    assert found is again
    assert plans[0].timeline.bytes_at.tolist() == plans[1].timeline.bytes_at.tolist()
    assert len(counted) == 1
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0.0


@given(graphs())
def test_a_plan_predicts_the_seconds_of_its_executions(graph):
    plan = Planner(graph).find().plan
    assert plan is not None
    assert plan.predicted_seconds == pytest.approx(durations(graph, plan.schedule).sum())
    if not graph.machine.fuses:
        assert plan.predicted_seconds == pytest.approx(sum(graph.ops[index].seconds for index in plan.sequence))


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


TRAFFIC_PER_BYTE = 1e-6
TRAFFIC = 100 * TRAFFIC_PER_BYTE / 2
"""Seconds to write or to read a value of these graphs."""


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


def normalised() -> tuple[Graph, int, int, int]:
    """Returns a graph, its product, the scaled product and the op that scales, as in a layer norm."""
    build = GraphBuilder()
    product = build.op([build.source(SIZE)], SIZE, kind=Kind.EXTERN)
    scaled = build.op([product], SIZE, kind=Kind.POINTWISE, seconds=1e-3, memory_bound_seconds=9e-4)
    loss = build.op([scaled], SIZE, kind=Kind.EXTERN)
    gradient = build.op([build.source(SIZE, Role.TANGENT), scaled], SIZE, kind=Kind.EXTERN, forward=False)
    result = build.op([gradient, product], SIZE, kind=Kind.POINTWISE, forward=False)
    ends = {"forward_outputs": (loss,), "backward_outputs": (result,)}
    graph = build.graph(**ends, fuses=True, saving_seconds_per_byte=TRAFFIC_PER_BYTE)
    maker = graph.values[scaled].producer
    assert maker is not None
    return graph, product, scaled, maker


def test_what_kernels_of_their_own_read_in_both_halves_is_saved_for_nothing():
    """It is written for the forward's reader, and the backward's reads it whoever has made it. A second run writes it again."""
    graph, product, scaled, maker = normalised()
    assert traffic_of(graph).saving_seconds[scaled] == 0.0
    assert traffic_of(graph).saving_seconds[product] == pytest.approx(TRAFFIC)
    assert traffic_of(graph).recompute_seconds[maker] == pytest.approx(1e-4 + TRAFFIC)
    assert scaled in Planner(graph).find().plan.saved


@pytest.mark.parametrize(("inlining", "runs"), [(Inlining.CHEAP, (3, 2, 1)), (Inlining.NEVER, (1, 1, 1))])
def test_a_result_that_several_runs_need_is_computed_in_each(inlining, runs):
    """As a residual stream that each layer's backward reads: each adds it up anew, from the products that it is a sum of."""
    fused = {"seconds": 1e-3, "memory_bound_seconds": 9e-4, "inlining": inlining}
    build = GraphBuilder()
    stream = build.source(SIZE)
    sums = []
    for _ in range(3):
        product = build.op([build.source(SIZE)], SIZE, kind=Kind.EXTERN)
        stream = build.op([stream, product], SIZE, kind=Kind.POINTWISE, **fused)
        sums.append(stream)
    gradient = build.source(SIZE, Role.TANGENT)
    for value in reversed(sums):
        gradient = build.op([gradient, value], SIZE, kind=Kind.POINTWISE, forward=False)
        gradient = build.op([gradient], SIZE, kind=Kind.EXTERN, forward=False)
    graph = build.graph(backward_outputs=(gradient,), fuses=True, saving_seconds_per_byte=TRAFFIC_PER_BYTE)
    again = [traffic_of(graph).recompute_seconds[graph.values[value].producer] for value in sums]
    assert again == pytest.approx([number * (1e-4 + TRAFFIC) for number in runs])


def test_what_is_spread_over_columns_is_saved_and_not_computed_for_each():
    """As the logarithm of the sum of each row in a log-softmax."""
    build, columns = GraphBuilder(), 1000
    logits = build.op([build.source(SIZE)], SIZE * columns, kind=Kind.EXTERN)
    total = build.op([logits], SIZE, kind=Kind.REDUCTION)
    log = build.op([total], SIZE, kind=Kind.POINTWISE, seconds=2e-5, memory_bound_seconds=1e-5)
    result = build.op([logits, log], SIZE * columns, kind=Kind.POINTWISE, seconds=2e-2, memory_bound_seconds=1e-2)
    loss = build.op([result], 0, kind=Kind.REDUCTION)
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([tangent, result], SIZE * columns, kind=Kind.POINTWISE, forward=False)
    ends = {"forward_outputs": (loss,), "backward_outputs": (gradient,)}
    graph = build.graph(**ends, fuses=True, saving_seconds_per_byte=TRAFFIC_PER_BYTE)
    maker = graph.values[log].producer
    assert traffic_of(graph).recompute_seconds[maker] == pytest.approx(columns * 1e-5 + TRAFFIC)
    assert set(Planner(graph).find().plan.saved) == {logits, log}
