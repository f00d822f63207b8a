"""Slow, simple answers to compare with: liveness, optima and gradients, none of them by the code under test.

The torch half is imported on first use, so that the tests of the pure half do without torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Inlining, Kind, Role
from autoremat.planner.graph.schedule import Schedule

if TYPE_CHECKING:
    import torch
    from torch import nn

# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """One materialisation of `value` by the execution at `computed_at`; `readers` are the executions that read it."""

    value: int
    computed_at: int
    readers: tuple[int, ...]
    to_the_end: bool


def buffers_of(graph: Graph, schedule: Schedule) -> list[Buffer]:
    """What each execution makes. A read goes to the latest execution before it that makes the value."""
    sequence = schedule.forward + schedule.backward
    makers = {
        value: [at for at, op in enumerate(sequence) if value in graph.ops[op].outputs] for value in range(len(graph.values))
    }
    found = []
    for value, made in makers.items():
        in_forward = [at for at in made if at < len(schedule.forward)]
        for at, following in zip(made, [*made[1:], math.inf], strict=False):
            readers = tuple(r for r, op in enumerate(sequence) if at < r <= following and value in graph.ops[op].inputs)
            with_caller = value in graph.forward_outputs and at == in_forward[-1]
            gradient = value in graph.backward_outputs and following == math.inf
            found.append(Buffer(value, at, readers, with_caller or gradient))
    return found


class Fusion:
    """The buffers that a code generator never makes which inlines pointwise chains, by definition.

    It makes results of reductions and extern kernels, what an extern kernel reads, what is saved, and outputs. What has
    several readers it makes if it is computed from more than a few buffers or from something heavy, random numbers in any
    case, unless one loop may hold the maker and all readers: no extern kernel separates them, and none is a reduction.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.sequence, self.start_of_backward = schedule.forward + schedule.backward, len(schedule.forward)
        self.ops, self.most_reads = [graph.ops[op] for op in self.sequence], graph.most_reads
        self.buffers = buffers_of(graph, schedule)
        self.read = {(b.value, reader): b for b in self.buffers for reader in b.readers}
        self.inlined, self.computed_from, self.work_of = cache(self._inlined), cache(self._computed_from), cache(self._work_of)

    def fusible(self, b: Buffer) -> bool:
        last_reader = max(b.readers, default=-1)
        crosses = b.computed_at < self.start_of_backward <= last_reader
        extern = any(self.ops[reader].kind is Kind.EXTERN for reader in b.readers)
        return self.ops[b.computed_at].kind is Kind.POINTWISE and bool(b.readers) and not (b.to_the_end or extern or crosses)

    def _computed_from(self, execution: int) -> tuple[frozenset[Buffer | int], bool]:
        """The buffers and inputs of the step that an expression reads, and whether there is something heavy in it."""
        op = self.ops[execution]
        found: set[Buffer | int] = set()
        heavy = op.inlining is Inlining.ONCE
        for value in op.inputs:
            b = self.read.get((value, execution))
            if b is not None and self.inlined(b):
                behind, heavy_behind = self.computed_from(b.computed_at)
                found, heavy = found | behind, heavy or heavy_behind
            else:
                found.add(value if b is None else b)
        return frozenset(found), heavy

    def _inlined(self, b: Buffer) -> bool:
        if not self.fusible(b) or self.ops[b.computed_at].inlining is Inlining.NEVER:
            return False
        if len(b.readers) == 1:
            return True
        reads, heavy = self.computed_from(b.computed_at)
        return len(reads) <= self.most_reads and not heavy

    def _work_of(self, execution: int) -> frozenset[int]:
        """The executions at whose time the work of this one is done: its own, and those that compute its inlined results."""
        found = {execution}
        for b in self.buffers:
            if b.computed_at == execution and self.inlined(b):
                found |= {e for reader in b.readers for e in self.work_of(reader)}
        return frozenset(found)

    def in_one_loop(self, b: Buffer) -> bool:
        if not self.fusible(b):
            return False
        loops = {e for reader in b.readers for e in self.work_of(reader)}
        extern = any(op.kind is Kind.EXTERN for op in self.ops[b.computed_at : max(loops)])
        return not extern and not any(self.ops[e].kind is Kind.REDUCTION for e in loops)

    def absent(self) -> set[Buffer]:
        return {b for b in self.buffers if self.inlined(b) or self.in_one_loop(b)}


def in_one_call(graph: Graph, schedule: Schedule, moment: int) -> range:
    """The executions of the one call that runs the execution at `moment`: those around it without an extern kernel."""
    sequence, start_of_backward = schedule.forward + schedule.backward, len(schedule.forward)
    extern = [at for at, op in enumerate(sequence) if graph.ops[op].kind is Kind.EXTERN]
    if not (graph.fuses and graph.fusion_groups_hold_buffers) or moment in extern:
        return range(moment, moment + 1)
    half = range(start_of_backward) if moment < start_of_backward else range(start_of_backward, len(sequence))
    before = [at for at in extern if half.start <= at < moment]
    after = [at for at in extern if moment < at < half.stop]
    return range(max(before, default=half.start - 1) + 1, min(after, default=half.stop))


def recompute_seconds(graph: Graph, index: int) -> float:
    """What a second run of an op takes. Within fused kernels: its arithmetic, and a read of what kernels of their own have made
    and no fused backward op reads, in each stretch between kernels of their own that comes to need it."""
    op, num_forward = graph.ops[index], graph.num_forward
    if not op.memory_bound_seconds or any(graph.ops[r].kind is Kind.EXTERN for v in op.outputs for r in graph.readers[v]):
        return op.seconds
    stretches, unseen, seen, late_fused_readers = set(), [index], set(), set()
    while unseen:
        current = unseen.pop()
        for reader in (r for v in graph.ops[current].outputs for r in graph.readers[v]):
            if reader >= num_forward:
                stretches.add(sum(other.kind is Kind.EXTERN for other in graph.ops[num_forward : reader + 1]))
                if graph.ops[reader].kind is not Kind.EXTERN:
                    late_fused_readers.add(reader)
            elif graph.ops[reader].kind is Kind.POINTWISE and reader not in seen:
                seen.add(reader)
                unseen.append(reader)
    extra = 0
    for value in op.inputs:
        maker = graph.values[value].producer
        if maker is not None and graph.ops[maker].kind is not Kind.POINTWISE and not fused_backward_readers(graph, value):
            extra += graph.values[value].bytes
    own = made_bytes(graph, index)
    late = [iterated_bytes(graph, reader) for reader in late_fused_readers]
    larger = max([own, *late, *(made_bytes(graph, i) for i in seen if reaches_the_backward(graph, i))])
    times = larger / own if own and op.inputs and larger > 8 * own else 1.0
    arithmetic = (op.seconds - op.memory_bound_seconds) * times
    return max(len(stretches), 1) * (arithmetic + extra * graph.saving_seconds_per_byte / 2)


def reaches_the_backward(graph: Graph, index: int) -> bool:
    """Whether the backward reads what a forward op makes, itself or through pointwise ops."""
    readers = [r for v in graph.ops[index].outputs for r in graph.readers[v]]
    pointwise = (r for r in readers if r < graph.num_forward and graph.ops[r].kind is Kind.POINTWISE)
    return any(r >= graph.num_forward for r in readers) or any(reaches_the_backward(graph, r) for r in pointwise)


def made_bytes(graph: Graph, index: int) -> int:
    return sum(graph.values[v].bytes for v in graph.ops[index].outputs)


def iterated_bytes(graph: Graph, index: int) -> int:
    """The bytes over which a fused op goes: of what it makes, or of what it reads if it reduces."""
    read = [graph.values[v].bytes for v in graph.ops[index].inputs]
    return max([made_bytes(graph, index), *(read if graph.ops[index].kind is Kind.REDUCTION else [])])


def fused_backward_readers(graph: Graph, value: int) -> list[int]:
    """The backward ops that read ``value`` and are no kernels of their own."""
    return [r for r in graph.readers[value] if r >= graph.num_forward and graph.ops[r].kind is not Kind.EXTERN]


def saving_seconds(graph: Graph, value: int) -> float:
    """What saving ``value`` takes beside its memory: a write unless it exists anyway, a read unless it is read anyway."""
    maker, readers = graph.values[value].producer, graph.readers[value]
    if maker is None:
        return 0.0
    by_its_own_kernel = any(r < graph.num_forward and graph.ops[r].kind is Kind.EXTERN for r in readers)
    exists = graph.ops[maker].kind is not Kind.POINTWISE or by_its_own_kernel or value in graph.forward_outputs
    for_repeats = graph.ops[maker].kind is Kind.POINTWISE and all(r < graph.num_forward for r in readers)
    moves = 0 if not graph.fuses else (not exists) + (for_repeats or bool(fused_backward_readers(graph, value)))
    return graph.values[value].bytes * moves * graph.saving_seconds_per_byte / 2


def replay_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Bytes alive during each execution, counted moment by moment."""
    sequence = schedule.forward + schedule.backward
    buffers = buffers_of(graph, schedule)
    absent = Fusion(graph, schedule).absent() if graph.fuses else set()
    made_by: dict[int, list[Buffer]] = {}
    for b in buffers:
        made_by.setdefault(b.computed_at, []).append(b)

    @cache
    def needed_until(execution: int) -> int:
        """When the last kernel runs that does this execution's work: its own, or that of whoever inlines a result."""
        inlining = [needed_until(r) for b in made_by.get(execution, []) if b in absent for r in b.readers]
        return max([execution, *inlining])

    def last_moment(b: Buffer) -> int:
        return len(sequence) - 1 if b.to_the_end else max([b.computed_at, *map(needed_until, b.readers)])

    def read_where_written(moment: int) -> Iterator[Buffer]:
        op = graph.ops[sequence[moment]]
        for value in op.inputs:
            for b in (b for b in buffers if moment in b.readers and b.value == value and value in op.in_place):
                made = b not in absent or graph.ops[sequence[b.computed_at]].inlining is Inlining.NEVER
                yield from [b] if made else read_where_written(b.computed_at)

    kinds = [graph.ops[op].kind for op in sequence]

    def in_one_run(first: int, last: int) -> bool:
        same_half = (first < len(schedule.forward)) == (last < len(schedule.forward))
        return same_half and Kind.EXTERN not in kinds[first + 1 : last]

    overwritten, overwriting = set(), set()
    for moment, op in enumerate(sequence if graph.fuses else ()):
        for result in made_by.get(moment, []) if len(graph.ops[op].outputs) == 1 else []:
            reduced = [r for r in result.readers if kinds[r] is Kind.REDUCTION and in_one_run(moment, r)]
            ending = [b for b in read_where_written(moment) if not b.to_the_end and last_moment(b) == moment]
            same = [b for b in ending if graph.values[b.value].bytes == graph.values[result.value].bytes]
            if same and same[0] not in absent and result not in absent and not reduced:
                overwritten.add(same[0])
                overwriting.add(result)

    def alive(b: Buffer, moment: int) -> bool:
        first = b.computed_at if b in overwriting else in_one_call(graph, schedule, b.computed_at).start
        last = last_moment(b) - 1 if b in overwritten else in_one_call(graph, schedule, last_moment(b)).stop - 1
        return first <= moment <= last

    tangents = sum(value.bytes for value in graph.values if value.role is Role.TANGENT)
    return [
        sum(graph.values[b.value].bytes for b in buffers if b not in absent and alive(b, moment))
        + (tangents if moment >= len(schedule.forward) else 0)
        + graph.ops[op].workspace_bytes
        for moment, op in enumerate(sequence)
    ]


# -- optima ------------------------------------------------------------------------------------------------------------


def subsets(items: Sequence[int]) -> Iterator[frozenset[int]]:
    """All subsets, small ones first."""
    for size in range(len(items) + 1):
        yield from map(frozenset, combinations(items, size))


def run_again(graph: Graph, saved: frozenset[int]) -> set[int]:
    """The forward ops that the backward must run again if exactly `saved` is kept for it."""
    pending = [v for v in graph.backward_needs if v not in saved]
    again: set[int] = set()
    while pending:
        producer = graph.values[pending.pop()].producer
        if producer is not None and producer not in again:
            again.add(producer)
            pending += [v for v in graph.ops[producer].inputs if v not in saved]
    return again


def cut_cost(graph: Graph, saved: frozenset[int], seconds_per_byte: float, forbidden: float, traffic: bool = False) -> float:
    """Seconds of recomputation, and of saved bytes at a price, with what saving them takes if ``traffic``; infinite where an
    op would run twice that may not.

    An op that only the backward needs runs once anyway. Outputs of the forward are there for nothing. Saving what was
    ordered to be recomputed costs `forbidden`.
    """
    total = 0.0
    for index in run_again(graph, saved):
        op = graph.ops[index]
        if not op.rematerializable or op.constraint is Constraint.SAVE:
            return math.inf
        total += recompute_seconds(graph, index) if index in graph.required_forward else 0.0
    for value in saved:
        producer = graph.values[value].producer
        if value in graph.forward_outputs or producer is None:
            continue
        ordered_away = graph.ops[producer].constraint is Constraint.RECOMPUTE
        total += forbidden if ordered_away else graph.values[value].bytes * seconds_per_byte
        total += saving_seconds(graph, value) if traffic and not ordered_away else 0.0
    return total


def cheapest_cut(graph: Graph, seconds_per_byte: float, forbidden: float, traffic: bool = False) -> float:
    """The least `cut_cost` over all saved sets."""
    return min(cut_cost(graph, saved, seconds_per_byte, forbidden, traffic) for saved in subsets(graph.forward_values))


def least_added_seconds(graph: Graph, budget: int) -> float:
    """The least recomputation of any plan of a graph made by `Graph.from_dag`, infinite if none fits: the cheapest path
    from nothing done to all done. A state is the values alive and the first op that has not run.

    Of two phases only if the forward has no outputs: no caller holds them here.
    """
    done = len(graph.ops)
    distance = {(frozenset[int](), 0): 0.0}
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    outputs = {*graph.forward_outputs, *graph.backward_outputs}
    while queue:
        seconds, following, kept = heapq.heappop(queue)
        alive = frozenset(kept)
        if seconds > distance[alive, following]:
            continue
        if following == done and outputs <= alive:
            return seconds
        moves = [(seconds, alive - {value}, following) for value in alive]
        for index in range(min(following + 1, done)):
            op, again = graph.ops[index], index < following
            with_results = alive.union(op.outputs)
            may_run = not again or (op.forward and op.rematerializable)
            if may_run and alive.issuperset(op.inputs) and sum(graph.values[v].bytes for v in with_results) <= budget:
                moves.append((seconds + again * recompute_seconds(graph, index), with_results, max(following, index + 1)))
        for cost, values, next_op in moves:
            if cost < distance.get((values, next_op), math.inf):
                distance[values, next_op] = cost
                heapq.heappush(queue, (cost, next_op, tuple(sorted(values))))
    return math.inf


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a training step leaves behind, by name: outputs, inputs, gradients and buffers."""

    tensors: dict[str, torch.Tensor | None]


def train_step(compiled: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor], seed: int = 0) -> Outcome:
    """One forward and backward of `compiled`, the compiled form of `model`, with fixed random numbers.

    Every floating output takes part in the backward with a weight of its own, so that their gradients differ.
    """
    import torch

    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs = compiled(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(
        output.mul(torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).sum()
        for output in outputs
        if isinstance(output, torch.Tensor) and output.requires_grad
    )
    total.backward()
    found: dict[str, torch.Tensor | None] = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    found |= {f"input {i}": leaf.detach().clone() for i, leaf in enumerate(leaves)}
    found |= {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(found)


def measured_step(compiled: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """The measured peak of a step of which only the first output, a scalar loss, is differentiated."""
    from autoremat.measure.peak import track_peak

    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    model.zero_grad(set_to_none=True)
    with track_peak("cpu") as peak:
        compiled(*leaves)[0].backward()
    return peak.bytes


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors agree in type, shape and every bit; NaN equals NaN, 0 is not -0."""
    import torch

    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """The names under which two outcomes differ in any bit."""
    assert found.tensors.keys() == expected.tensors.keys()
    return [name for name, tensor in found.tensors.items() if not same_bits(tensor, expected.tensors[name])]
