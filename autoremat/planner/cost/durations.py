"""Computes the seconds of each execution of a schedule, and those that saving a value or recomputing an op adds.

Where the code generator fuses, an execution that materialises a result stands for a kernel. It computes the results inlined
into it as well, and these executions take no seconds of their own.

    seconds of a kernel  =  launch  +  min(seconds of its ops alone, arithmetic and traffic together)

Arithmetic and traffic overlap: on a card the longer one counts, on a CPU the root of the sum of squares.

The traffic is what the kernel materialises, and each materialised tensor or input of the step that it reads. A pass reads a
tensor once, and reads nothing that it makes itself. So a saved value costs its write in the forward and its reads in the
backward, and a recomputed value that is inlined costs its arithmetic. Extern kernels have the seconds of their op.

A fusion group has one pass, and one more behind each result that is known only when a pass has ended (``Op.ends_pass``). The
statistics of a batch norm are such results: the kernel that normalises reads again what they were computed from.

A pointwise op reads no more elements of a tensor than it makes, such as a gather. What is inlined into it computes no more.

Searches compare plans by what each decision adds (:class:`FusedTraffic`):

- A *saved* value costs a write unless the forward materialises it anyway. It costs a read if a fused kernel of the backward
    reads it.
- A *recomputed* pointwise op that is fused into its readers costs its arithmetic. It also costs one read of each input that an
    extern kernel or reduction computes and no fused kernel of the backward reads anyway.
- These costs of recomputation occur once per fusion group that needs the result, because each group computes it again. A
    result that is never inlined, such as a random number, is computed once.
- A result may be wider than what is read for it, as a float32 copy of 16-bit numbers. It costs that read once: if it were
    saved, each further group would read more.
- If the result is broadcast to a larger one, such as a logarithm per row, its arithmetic runs for each larger element.
- A pointwise op whose result an extern kernel reads runs once. It also costs a launch and the write of the result.

Without fusion, every op is a kernel that writes its result and reads its inputs in any case, so saving costs no time.

The rest of the file computes how long the compute stream waits for the transfers of stays. The stream runs the executions in
sequence. Every other engine is a queue: it carries out one transfer after the other,
in the sequence of their issue. Four events of a stay meet the compute stream:

| Event | Moment | The compute stream |
| load  | before the execution ``load``  | issues the load |
| need  | before the execution ``need``  | waits for the end of the load |
| store | after the execution ``store``  | issues the store |
| free  | after the execution ``free``   | waits for the end of the store |

Of transfers that are issued at the same moment, the one whose end is awaited first goes first. ``Engine.COMPUTE`` is the
compute stream itself, so its transfers only add their seconds. A store has ended before its load is issued, because the stream
waits for it at ``free``. So no load waits for its store.

Copies in the two directions do not slow each other down here, because they hardly run at once.
"""

import math
from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.arrays import EXTERN, POINTWISE, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Inlining
from autoremat.planner.graph.schedule import RECENT, Schedule
from autoremat.planner.memory.fusion import fusion_in

ROUNDING = 1e-9
"""Relative error of seconds that are computed in two ways."""


def durations(graph: Graph, schedule: Schedule) -> NDArray[np.float64]:
    """Returns the seconds of each execution of ``schedule``. They do not depend on its stays."""
    return graph.derived(_recent)(schedule.without_stays) if graph.machine.fuses else _alone(graph, schedule)


def _recent(graph: Graph) -> Callable[[Schedule], NDArray[np.float64]]:
    @lru_cache(RECENT)
    def of_kernels(schedule: Schedule) -> NDArray[np.float64]:
        found = _Kernels(graph, schedule).seconds(_alone(graph, schedule))
        found.setflags(write=False)  # callers share it
        return found

    return of_kernels


def _alone(graph: Graph, schedule: Schedule) -> NDArray[np.float64]:
    """Returns the seconds of each execution as a kernel of its own."""
    return np.array([graph.ops[index].seconds for index in schedule.sequence], dtype=np.float64)


class _Kernels:
    """The kernels of a schedule: executions that materialise a result, with those that are inlined into them."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.sequence = graph, schedule.sequence
        found = fusion_in(graph, schedule)
        buffers, absent, group = found.buffers, found.absent, found.group
        self.start: list[int] = buffers.start.tolist()
        self.bytes: list[int] = buffers.bytes.tolist()
        self.absent: list[bool] = absent.tolist()
        self.reads, length = buffers.reads, len(self.sequence)
        self.written: list[float] = np.bincount(buffers.start[~absent], buffers.bytes[~absent], length).tolist()
        """For each execution, the bytes that it materialises."""
        touched = graph.derived(_touched)
        self.touched = [touched[index] for index in self.sequence]
        """For each execution, the most bytes that it reads of a tensor."""
        made = arrays_of(graph).outputs.counts[buffers.sequence]
        self.inlined: list[bool] = ((made > 0) & (np.bincount(buffers.start[absent], minlength=length) == made)).tolist()
        self.passes = self._passes(group.tolist(), group[buffers.start].tolist())
        """For each execution, the number of its pass."""
        self.made_in = [self.passes[start] for start in self.start]
        """For each live range, the pass that computes it."""

    def seconds(self, alone: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the seconds of each execution. ``alone`` are those that its op takes as a kernel of its own."""
        graph, given, arithmetic = self.graph, self.graph.derived(_given), self.graph.derived(_arithmetic)
        kinds: list[int] = arrays_of(graph).kinds[list(self.sequence)].tolist()
        unfused, found = alone.tolist(), [0.0] * len(alone)
        seen = dict[int, tuple[dict[int, float], dict[int, float]]]()
        for position, kind in enumerate(kinds):
            if kind == EXTERN:
                found[position] = unfused[position]
            elif not self.inlined[position]:
                if self.passes[position] not in seen:
                    seen[self.passes[position]] = {}, {}
                    found[position] = graph.machine.launch_seconds
                kernel, read = self._kernel(position, *seen[self.passes[position]], given)
                longest = busy = 0.0
                for execution, share in kernel.items():
                    busy += share * arithmetic[self.sequence[execution]]
                    longest += share * unfused[execution]
                found[position] += min(longest, graph.machine.fused_seconds(busy, read, self.written[position]))
        return np.array(found, dtype=np.float64)

    def _passes(self, group: list[int], made_by: list[int]) -> list[int]:
        """Returns the number of the pass of each execution, from the fusion groups of executions and live ranges.

        What ends a pass has loops of its own, so it does not run in the pass that stores what it reads.
        """
        most = 2 * len(group)  # passes of a group: an op has one before it and one behind it
        ends = [self.graph.ops[index].ends_pass for index in self.sequence]
        kinds = arrays_of(self.graph).kinds[list(self.sequence)].tolist()
        found, stored = [most * number for number in group], [-1] * len(group)
        if not any(ends):
            return found
        for position, number in enumerate(group):
            for source in self.reads[position]:
                if made_by[source] == number:
                    maker = self.start[source]
                    found[position] = max(found[position], found[maker] + ends[maker])
                    if self.absent[source]:
                        stored[position] = max(stored[position], stored[maker])
                    elif kinds[maker] == POINTWISE:
                        stored[position] = max(stored[position], found[maker])
            found[position] += ends[position] and stored[position] == found[position]
        return found

    def _kernel(
        self, position: int, ran: dict[int, float], read: dict[int, float], given: list[list[tuple[int, int]]]
    ) -> tuple[dict[int, float], float]:
        """Returns the execution at ``position`` with those inlined into it, and the bytes that they read. Executions have the
        shares of their elements that run.

        Leaves out what ``ran`` and what was ``read`` in the pass before, and adds to both. They hold the most bytes that an
        execution reads of a tensor, and those that were read of each.
        """
        kernel, stack, this = dict[int, float](), [(position, math.inf)], self.passes[position]
        read_bytes = 0.0
        while stack:
            execution, most = stack.pop()
            whole = self.touched[execution]
            most, before = min(most, whole), ran.get(execution, -1.0)
            if before >= most:
                continue
            ran[execution] = most
            made = whole / LARGEST_TYPE_RATIO
            added = 1.0 if most >= made else most / made
            if before >= 0.0:
                added -= 1.0 if before >= made else before / made
            kernel[execution] = kernel.get(execution, 0.0) + added
            tensors = list(given[self.sequence[execution]])
            for source in self.reads[execution]:
                if self.absent[source]:
                    stack.append((self.start[source], most))
                elif self.made_in[source] != this:
                    tensors.append((source, self.bytes[source]))
            for tensor, size in tensors:
                taken = size if size < most else most
                if taken > read.get(tensor, 0.0):
                    read_bytes += taken - read.get(tensor, 0.0)
                    read[tensor] = taken
        return kernel, read_bytes


def _arithmetic(graph: Graph) -> list[float]:
    """Returns, for each op, the seconds beside memory traffic. An op that is no stream has none if its traffic takes longer."""
    per_byte = graph.machine.saving_seconds_per_byte / 2 * (1 + ROUNDING)
    return [
        op.seconds - op.memory_bound_seconds if op.memory_bound_seconds or op.seconds > op.bytes_moved * per_byte else 0.0
        for op in graph.ops
    ]


def _touched(graph: Graph) -> list[float]:
    """Returns, for each op, the most bytes that it reads of a tensor: a pointwise op reads no more elements than it makes."""
    made = zip(arrays_of(graph).kinds.tolist(), graph.made_bytes, strict=True)
    return [LARGEST_TYPE_RATIO * size if kind == POINTWISE else math.inf for kind, size in made]


def _given(graph: Graph) -> list[list[tuple[int, int]]]:
    """Returns, for each op, the inputs that no op computes, as negative numbers, with their bytes."""
    return [[(value, graph.values[-1 - value].bytes) for value in row] for row in arrays_of(graph).given]


LARGEST_TYPE_RATIO = 8
"""Largest ratio between the bytes of elements of usual types. A tensor that is larger by more than this has more elements."""


class FusedTraffic:
    """The seconds of ``graph`` that depend on fusion."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds: list[int] = arrays_of(graph).kinds.tolist()

    @cached_property
    def saving_seconds(self) -> NDArray[np.float64]:
        """For each value, the seconds that saving it adds."""
        graph, values = self.graph, range(len(self.graph.values))
        times = [graph.machine.traffic_seconds(self._read(value), self._written(value)) for value in values]
        seconds: NDArray[np.float64] = arrays_of(graph).value_bytes * np.array(times, dtype=float)
        return seconds

    @cached_property
    def recompute_seconds(self) -> tuple[float, ...]:
        """For each op, the seconds that recomputing it adds."""
        ops = self.graph.ops
        return tuple(self._again(index) if op.memory_bound_seconds else op.seconds for index, op in enumerate(ops))

    @cached_property
    def repeat_seconds(self) -> tuple[float, ...]:
        """The same; 0 if the first execution is in the backward, because only that needs the op."""
        needed = range(len(self.graph.ops)) if self.graph.single_phase else self.graph.required_forward
        return tuple(seconds if index in needed else 0.0 for index, seconds in enumerate(self.recompute_seconds))

    def materialise_seconds(self, value: int) -> float:
        """Returns the seconds of writing and reading a result that fusion would inline."""
        return self.graph.machine.traffic_seconds(*[self.graph.values[value].bytes] * 2)

    def _written(self, value: int) -> bool:
        """Returns True if the forward writes the value only in case it is saved."""
        graph, maker = self.graph, self.graph.values[value].producer
        if maker is None or not graph.machine.fuses:
            return False
        early = {self.kinds[op] for op in graph.readers[value] if op < graph.num_forward}
        return self.kinds[maker] == POINTWISE and EXTERN not in early and value not in graph.forward_outputs

    def _read(self, value: int) -> bool:
        """Returns True if a fused kernel of the backward reads the value only in case it is saved.

        Extern kernels read a value in any case, saved or recomputed. A value that no backward op reads is saved for recomputed
        ops. That read counts here for pointwise results; for any other result :meth:`_again` charges it.
        """
        graph, maker = self.graph, self.graph.values[value].producer
        if maker is None or not graph.machine.fuses:
            return False
        late = {self.kinds[op] for op in graph.readers[value] if op >= graph.num_forward}
        return bool(late - {EXTERN}) or (not late and self.kinds[maker] == POINTWISE)

    def _again(self, index: int) -> float:
        """Returns the seconds that recomputing a pointwise op adds."""
        graph, op = self.graph, self.graph.ops[index]
        # Repetitions read what no fused kernel of the backward reads anyway, and an extern kernel or reduction computes.
        inputs = (value for value in graph.computed_inputs[index] if self.kinds[graph.makers[value]] != POINTWISE)
        read = sum(graph.values[value].bytes for value in inputs if not self._read(value))
        made, spread = graph.made_bytes[index], self._spread_bytes[index]
        times = spread / made if made and op.inputs and spread > LARGEST_TYPE_RATIO * made else 1.0  # by broadcasting
        arithmetic = (op.seconds - op.memory_bound_seconds) * times
        stored = sum(
            graph.values[value].bytes
            for value in op.outputs
            if any(self.kinds[reader] == EXTERN for reader in graph.readers[value])
        )
        groups = 1 if stored or op.inlining is Inlining.NEVER else max(self._runs_in_need[index].bit_count(), 1)
        reads = 1 if read < made else groups
        launch = graph.machine.launch_seconds if stored else 0.0
        return launch + groups * arithmetic + graph.machine.traffic_seconds(reads * read, stored)

    @cached_property
    def _spread_bytes(self) -> list[int]:
        """For each forward op, the bytes of the largest tensor over which fused kernels of the backward compute it."""
        graph, found = self.graph, [0] * len(self.graph.ops)
        for index in range(len(graph.ops) - 1, -1, -1):
            op = graph.ops[index]
            if self.kinds[index] == EXTERN:
                continue
            found[index] = graph.made_bytes[index]
            if index >= graph.num_forward:
                read = (graph.values[v].bytes for v in op.inputs)
                found[index] = max([found[index], *read]) if self.kinds[index] != POINTWISE else found[index]
                continue
            for reader in (r for value in op.outputs for r in graph.readers[value]):
                if reader >= graph.num_forward or (self.kinds[reader] == POINTWISE and self._runs_in_need[reader]):
                    found[index] = max(found[index], found[reader])
        return found

    @cached_property
    def _runs_in_need(self) -> list[int]:
        """For each forward op, the fusion groups of the backward that read its result, as a bit set."""
        graph = self.graph
        run = np.cumsum([kind == EXTERN for kind in self.kinds]).tolist()
        needs = [0] * len(graph.ops)
        for index in range(graph.num_forward - 1, -1, -1):
            for reader in (r for value in graph.ops[index].outputs for r in graph.readers[value]):
                if reader >= graph.num_forward:
                    needs[index] |= 1 << (run[reader] - run[graph.num_forward])
                elif self.kinds[reader] == POINTWISE:
                    needs[index] |= needs[reader]
        return needs


def traffic_of(graph: Graph) -> FusedTraffic:
    """Returns the traffic of ``graph``, computed once per graph."""
    return graph.derived(FusedTraffic)


LOAD, NEED, STORE, FREE = range(4)
"""The events of a stay, in the sequence in which they occur at one execution. It runs between ``NEED`` and ``STORE``."""


def stalls_of(graph: Graph, schedule: Schedule, speed: float = 1.0, seconds: NDArray[np.float64] | None = None) -> list[float]:
    """Returns, for each execution, the seconds that the compute stream waits before and after it, or transfers itself.

    Engines run at ``speed`` times the planned rate; the compute stream keeps its own. Callers that judge many stays give the
    ``seconds`` of the executions, because :func:`durations` does not depend on stays.
    """
    waits = [0.0] * len(schedule.sequence)
    if not schedule.stays:
        return waits
    lasting = durations(graph, schedule) if seconds is None else seconds
    begins = np.concatenate([[0.0], np.cumsum(lasting)]).tolist()
    idle_from, ends, waited = dict.fromkeys(Engine, 0.0), dict[tuple[int, int], float](), 0.0
    forms = schedule.forms(graph)
    events = [  # the execution, the event, the execution at which its end is awaited, the value
        event
        for stay in schedule.stays
        for event in (
            (stay.load, LOAD, stay.need, stay.value),
            (stay.need, NEED, stay.need, stay.value),
            (stay.store, STORE, stay.free, stay.value),
            (stay.free, FREE, stay.free, stay.value),
        )
    ]
    for position, event, _, value in sorted(events):
        now = begins[position + (event >= STORE)] + waited
        if event in (NEED, FREE):
            wait = max(0.0, ends[value, event] - now)
        else:
            transfer = forms[value].load if event == LOAD else forms[value].store
            is_compute = transfer.engine is Engine.COMPUTE
            lasts = transfer.seconds if is_compute else transfer.seconds / speed
            wait = lasts if is_compute else 0.0
            idle_from[transfer.engine] = ends[value, event + 1] = max(now, idle_from[transfer.engine]) + lasts
        waits[position] += wait
        waited += wait
    return waits
