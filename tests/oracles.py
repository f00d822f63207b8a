"""Slow, simple answers to compare with, none of them by the code under test. Torch is imported on first use."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Inlining, Kind

if TYPE_CHECKING:
    import torch
    from torch import nn


def recompute_seconds(graph: Graph, index: int) -> float:
    """What a second run of an op takes. Within fused kernels: its arithmetic, and a read of what kernels of their own have made
    and no fused backward op reads, in each stretch between kernels of their own that comes to need it. A result that is larger
    than these reads would be read there instead, so they count once. What a kernel of its own reads is made once, and
    written."""
    op, num_forward = graph.ops[index], graph.num_forward
    if not op.memory_bound_seconds:
        return op.seconds
    written = 0.0
    for value in op.outputs:
        if any(graph.ops[reader].kind is Kind.EXTERN for reader in graph.readers[value]):
            written += graph.values[value].bytes
    divides = [other.kind is Kind.EXTERN for other in graph.ops]
    stretches, unseen, seen, late_fused_readers = set(), [index], set(), set()
    while unseen:
        current = unseen.pop()
        for reader in (r for v in graph.ops[current].outputs for r in graph.readers[v]):
            if reader >= num_forward:
                stretches.add(sum(divides[num_forward : reader + 1]))
                if graph.ops[reader].kind is not Kind.EXTERN:
                    late_fused_readers.add(reader)
            elif graph.ops[reader].kind is Kind.POINTWISE and reader not in seen:
                seen.add(reader)
                unseen.append(reader)
    extra = 0
    for value in op.inputs:
        maker = graph.values[value].producer
        is_read = bool(fused_backward_readers(graph, value))
        if maker is not None and graph.ops[maker].kind is not Kind.POINTWISE and not is_read:
            extra += graph.values[value].bytes
    own = made_bytes(graph, index)
    late = [iterated_bytes(graph, reader) for reader in late_fused_readers]
    larger = max([own, *late, *(made_bytes(graph, i) for i in seen if reaches_the_backward(graph, i))])
    times = larger / own if own and op.inputs and larger > 8 * own else 1.0
    arithmetic = (op.seconds - op.memory_bound_seconds) * times
    runs = 1 if written or op.inlining is Inlining.NEVER else max(len(stretches), 1)  # what no reader inlines is stored
    moved = (1 if extra < own else runs) * extra * (1 - graph.machine.write_share) + written * graph.machine.write_share
    return (
        runs * arithmetic + moved * graph.machine.saving_seconds_per_byte + (graph.machine.launch_seconds if written else 0.0)
    )


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
    if not graph.machine.fuses:
        return 0.0
    is_read = for_repeats or bool(fused_backward_readers(graph, value))
    moves = (not exists) * graph.machine.write_share + is_read * (1 - graph.machine.write_share)
    return graph.values[value].bytes * moves * graph.machine.saving_seconds_per_byte


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
    ordered to be recomputed, and can be, costs `forbidden`.
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
        ordered_away = graph.ops[producer].constraint is Constraint.RECOMPUTE and graph.ops[producer].rematerializable
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


NO_RECOMPUTATION = "aot_eager_default_partitioner"
"""Torch's debugging backend, whose default partition recomputes nothing."""

Outcome = dict[str, Any]
"""What a training step leaves behind, by name: the tensors of outputs, inputs, gradients (or None) and buffers."""


def train_step(compiled: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor], seed: int = 0) -> Outcome:
    """One forward and backward of `compiled`, the compiled form of `model`; each floating output has a weight of its own."""
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
    found: Outcome = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    found |= {f"input {i}": leaf.detach().clone() for i, leaf in enumerate(leaves)}
    found |= {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def measured_step(compiled: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """The measured peak of a step of which only the loss is differentiated, its first or only output."""
    from autoremat.measure.peak import track_peak

    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    model.zero_grad(set_to_none=True)
    with track_peak("cpu") as peak:
        loss = compiled(*leaves)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
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
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not same_bits(tensor, expected[name])]
