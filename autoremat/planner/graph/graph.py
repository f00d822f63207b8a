"""Defines the intermediate representation: ops in execution order, and the values that they read and allocate.

Indices are positions in ``Graph.ops`` and ``Graph.values``. Beside what a step computes, a graph has the :class:`Machine` that
runs it and the :class:`Calls` that are open at once. This module does not know torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import networkx

from autoremat.planner.graph.op import Op, Role, Trait, Value

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """What a fused kernel and the memory traffic of a step take, and what the code generator fuses."""

    fuses: bool = False
    """True if the code generator fuses pointwise chains (Inductor). False if it materialises every result (eager)."""
    saving_seconds_per_byte: float = 0.0
    """Seconds to write one byte in the forward and to read it in the backward."""
    write_share: float = 0.5
    """Share of ``saving_seconds_per_byte`` that the write takes. A CPU reads a line of memory before it writes the line."""
    overlaps_wholly: bool = True
    """True if the shorter of a fused kernel's arithmetic and traffic adds nothing to the longer one, as on cards."""
    launch_seconds: float = 0.0
    """Seconds of a fused kernel that does nothing. Those of extern kernels are part of their op's."""
    fusion_groups_hold_buffers: bool = False
    """True if the code generator emits one function per fusion group (on CPUs).

    The function's results are allocated before it begins, and its inputs are freed after it ends.
    """
    most_reads: int = 4
    """Largest number of buffers that an expression may read if it is inlined into several readers."""

    def traffic_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Returns the seconds in which a kernel reads and writes so many bytes."""
        read, write = (self.saving_seconds_per_byte * share for share in (1.0 - self.write_share, self.write_share))
        return read_bytes * read + written_bytes * write

    def fused_seconds(self, arithmetic: float, read_bytes: float, written_bytes: float) -> float:
        """Returns the seconds of a fused kernel from those of its arithmetic and the bytes that it reads and writes."""
        traffic = self.traffic_seconds(read_bytes, written_bytes)
        return max(arithmetic, traffic) if self.overlaps_wholly else math.hypot(arithmetic, traffic)


@dataclass(frozen=True)
class Calls:
    """The calls of a graph that are open at once, and what their caller holds beside them."""

    in_flight: int = 1
    """Number of open calls, the running one included. A pipeline opens several."""
    resident_bytes: int = 0
    """Bytes that are live beside all calls, whatever is planned: gradients of earlier micro-batches, and outputs of finished
    calls."""

    @property
    def others(self) -> int:
        """Number of open calls beside the running one."""
        return self.in_flight - 1

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.resident_bytes < 0:
            raise ValueError(f"{self} is impossible: at least one call is open, beside at least 0 bytes")


@dataclass(frozen=True)
class Graph:
    """A step: ops in execution order, forward before backward.

    The caller holds ``forward_outputs`` and ``backward_outputs`` (gradients) from their allocation to the end of the step. The
    forward runs the ops ``must_run`` even if no op reads their results. Raises ``ValueError`` if the sequence is not valid.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    forward_outputs: tuple[int, ...] = ()
    backward_outputs: tuple[int, ...] = ()
    must_run: tuple[int, ...] = ()
    machine: Machine = Machine()
    """What the device and the code generator need. All costs but the seconds of ops follow from it."""
    calls: Calls = Calls()
    """The calls that are open at once. Several need a backward."""

    def __post_init__(self) -> None:
        self.verify()

    @classmethod
    def from_dag(
        cls,
        seconds: Sequence[float],
        sizes: Sequence[int],
        edges: Iterable[tuple[int, int]],
        *,
        outputs: Iterable[int] = (),
        rematerializable: Sequence[bool] | None = None,
        num_forward: int | None = None,
    ) -> Graph:
        """Returns the graph in which op ``i`` takes ``seconds[i]`` and computes value ``i`` of ``sizes[i]`` bytes.

        Ops keep their sequence.

        - ``edges``: pairs (producer, reader) of op numbers.
        - ``outputs``: values that must exist at the end.
        - ``rematerializable``: for each op, False if it may run only once. By default all may run again.
        - ``num_forward``: number of ops in the forward of a training step; the others are its backward. With None, or with all
            ops, the graph has a single phase, in which any op may run again anywhere later.

        Raises ``ValueError``, which names the op or edge, for costs or edges that describe no such graph.
        """
        count = len(seconds)
        border = count if num_forward is None else num_forward
        again = [True] * count if rematerializable is None else list(rematerializable)
        _check_costs(seconds, sizes, again)
        if not 0 <= border <= count:
            raise ValueError(f"num_forward={num_forward} is not between 0 and the number of ops, {count}")
        inputs = _inputs_of(edges, count)
        held = tuple(dict.fromkeys(outputs))
        if beyond := [v for v in held if not 0 <= v < count]:
            raise ValueError(f"the output {beyond[0]} is no value: there are {count}")
        traits = [Trait.NONE if may else Trait.OPAQUE for may in again]
        return cls(
            tuple(Op(f"op{i}", "op", inputs[i], (i,), i < border, float(seconds[i]), traits=traits[i]) for i in range(count)),
            tuple(Value(f"v{i}", int(sizes[i]), i) for i in range(count)),
            forward_outputs=tuple(v for v in held if v < border),
            backward_outputs=tuple(v for v in held if v >= border),
            must_run=tuple(range(border)),
        )

    @classmethod
    def from_networkx(cls, directed: networkx.DiGraph[Any], **arguments: Any) -> Graph:
        """Returns the graph of a directed acyclic graph, whose nodes have ``seconds`` and ``bytes``.

        Nodes run in their order in ``directed`` as far as the edges allow. Op numbers in ``arguments`` count in the resulting
        sequence; the arguments are those of :meth:`from_dag`. Raises ``ValueError`` for a cycle, and for a node without seconds
        or bytes.
        """
        import networkx

        place = {node: number for number, node in enumerate(directed)}
        try:
            nodes = list(networkx.lexicographical_topological_sort(directed, key=place.__getitem__))
        except networkx.NetworkXUnfeasible as error:
            raise ValueError("the graph has a circle, so its nodes cannot be run in order") from error
        if lacking := [node for node in nodes if not {"seconds", "bytes"} <= directed.nodes[node].keys()]:
            raise ValueError(f"the node {lacking[0]!r} has no seconds or no bytes")
        seconds, sizes = ([directed.nodes[node][fact] for node in nodes] for fact in ("seconds", "bytes"))
        number = {node: index for index, node in enumerate(nodes)}
        edges = [(number[producer], number[reader]) for producer, reader in directed.edges]
        return cls.from_dag(seconds, sizes, edges, **arguments)

    def with_calls(self, number: int) -> Graph:
        """Returns the graph with so many open calls."""
        return replace(self, calls=replace(self.calls, in_flight=number))

    def verify(self) -> None:
        """Raises ``ValueError`` unless producers come before readers and forward ops before backward ops, and for numbers of
        bytes, seconds and calls that a graph cannot have."""
        if self.single_phase and self.calls != Calls():
            raise ValueError(f"{self.calls} is impossible in a graph without a backward, which has a single call")
        forward_flags = [op.forward for op in self.ops]
        if sorted(forward_flags, reverse=True) != forward_flags:
            raise ValueError("forward ops must all stand before the backward ops")
        if negative := [value.name for value in self.values if value.bytes < 0]:
            raise ValueError(f"{negative[0]} has less than 0 bytes")
        self._verify_forms()
        for index, op in enumerate(self.ops):
            if op.workspace_bytes < 0 or not op.seconds >= 0:
                raise ValueError(f"op {op.name} has {op.workspace_bytes} bytes of workspace and takes {op.seconds} s")
            for value in op.inputs:
                producer = self.values[value].producer
                if producer is not None and producer >= index:
                    raise ValueError(f"op {op.name} reads {self.values[value].name} before it is computed")
            for value in op.outputs:
                if self.values[value].producer != index:
                    raise ValueError(f"{self.values[value].name} is an output of {op.name} but names another producer")

    def _verify_forms(self) -> None:
        """Raises ``ValueError`` for two forms of a value with one name, and for bytes and seconds that a form cannot have."""
        for value in (value for value in self.values if value.forms):
            if len({form.name for form in value.forms}) < len(value.forms):
                raise ValueError(f"two forms of {value.name} have the same name: {[form.name for form in value.forms]}")
            for form in value.forms:
                transfers = (form.store, form.load)
                sizes = (form.device_bytes, form.host_bytes, *(one.temporary_bytes for one in transfers))
                if min(sizes) < 0 or not all(one.seconds >= 0 for one in transfers):
                    raise ValueError(f"the form {form.name!r} of {value.name} has bytes or seconds below 0: {form}")

    @cached_property
    def num_forward(self) -> int:
        """Number of forward ops. Op numbers below it are forward ops."""
        return sum(op.forward for op in self.ops)

    @property
    def single_phase(self) -> bool:
        """True if there is no backward. Any op may then run again anywhere later."""
        return self.num_forward == len(self.ops)

    @property
    def is_plain(self) -> bool:
        """True if the live bytes are those of the values of one call, each materialised and without forms. Exact models count
        no other graph."""
        return not self.machine.fuses and self.calls == Calls() and not any(value.forms for value in self.values)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the ops that read it, in sequence."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops):
            for value in op.inputs:
                readers[value].append(index)
        return tuple(tuple(r) for r in readers)

    @cached_property
    def _derived(self) -> dict[Callable[[Graph], Any], Any]:
        return {}

    def derived(self, maker: Callable[[Graph], T]) -> T:
        """Returns ``maker(self)``, computed once per graph. Other modules store data that they derive from a graph this way."""
        if maker not in self._derived:
            self._derived[maker] = maker(self)
        found: T = self._derived[maker]
        return found

    @cached_property
    def tangent_bytes(self) -> int:
        """Bytes of all tangents together."""
        return sum(value.bytes for value in self.values if value.role is Role.TANGENT)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """For each op, its outputs."""
        return tuple(op.outputs for op in self.ops)

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """For each op, the bytes of its outputs together."""
        return tuple(sum(self.values[v].bytes for v in op.outputs) for op in self.ops)

    @cached_property
    def computed_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each op, its inputs that some op computes."""
        return tuple(tuple(v for v in op.inputs if self.values[v].producer is not None) for op in self.ops)

    @cached_property
    def forward_reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op, its inputs that a forward op computes."""
        made = set(self.forward_values)
        return tuple(tuple(v for v in op.inputs if v in made) for op in self.ops)

    @cached_property
    def forward_values(self) -> tuple[int, ...]:
        """Values that forward ops compute. The planner decides about these."""
        return tuple(v for op in self.ops[: self.num_forward] for v in op.outputs)

    @cached_property
    def required_forward(self) -> frozenset[int]:
        """Forward ops that run in the forward under every plan, with their ancestors.

        The outputs and effects of the forward need them. Ops that are not rematerializable (a random mask) and that the
        backward needs also run where they were traced.
        """
        needed = self.ancestors(self.producers(self.backward_needs))
        single = [op for op in needed if op < self.num_forward and not self.ops[op].rematerializable]
        return frozenset(self.ancestors([*self.must_run, *self.producers(self.forward_outputs), *single]))

    @cached_property
    def backward_needs(self) -> frozenset[int]:
        """Forward values that some backward op reads or that are backward outputs."""
        made = set(self.forward_values)
        read = {v for op in self.ops[self.num_forward :] for v in op.inputs}
        return frozenset(made & (read | set(self.backward_outputs)))

    def producers(self, values: Iterable[int]) -> list[int]:
        """Returns the ops that compute ``values``. Inputs and tangents are skipped."""
        found = (self.values[v].producer for v in values)
        return [op for op in found if op is not None]

    @cached_property
    def makers(self) -> list[int]:
        """For each value, the op that computes it; -1 if none does."""
        return [-1 if value.producer is None else value.producer for value in self.values]

    @cached_property
    def _behind(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each op, its computed inputs as pairs (value, producer)."""
        return tuple(tuple((v, self.makers[v]) for v in inputs) for inputs in self.computed_inputs)

    def ancestors(self, roots: Iterable[int], available: Set[int] = frozenset()) -> set[int]:
        """Returns ``roots`` and all ops that they depend on. The search stops at ``available`` values."""
        behind, seen = self._behind, set(roots)
        stack = list(seen)
        while stack:
            for value, producer in behind[stack.pop()]:
                if producer not in seen and value not in available:
                    seen.add(producer)
                    stack.append(producer)
        return seen

    def workspaces(self) -> dict[str, dict[int, int]]:
        """Returns workspaces by target and bytes of the results: the largest of all such calls.

        Ops without workspace are absent.
        """
        found: dict[str, dict[int, int]] = {}
        for op, made in zip(self.ops, self.made_bytes, strict=True):
            if op.workspace_bytes:
                sizes = found.setdefault(op.target, {})
                sizes[made] = max(sizes.get(made, 0), op.workspace_bytes)
        return found

    @property
    def step_seconds(self) -> float:
        """Seconds of the baseline (the step without recomputation) by the cost model."""
        return self.forward_seconds + sum(op.seconds for op in self.ops[self.num_forward :])

    @property
    def forward_seconds(self) -> float:
        """Seconds of the ops that every forward runs, by the cost model."""
        return sum(self.ops[index].seconds for index in self.required_forward)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Returns the ops as a directed graph with an edge from each producer to each reader.

        Nodes carry the op's ``name``, ``target``, ``seconds``, ``bytes`` of its results, and ``forward``. Edges carry the
        number of the ``value`` and its ``bytes``.
        """
        import networkx

        directed: networkx.DiGraph[int] = networkx.DiGraph()
        for index, (op, made) in enumerate(zip(self.ops, self.made_bytes, strict=True)):
            directed.add_node(index, name=op.name, target=op.target, seconds=op.seconds, bytes=made, forward=op.forward)
        for number, value in enumerate(self.values):
            if value.producer is not None:
                edges = ((value.producer, reader) for reader in self.readers[number])
                directed.add_edges_from(edges, value=number, bytes=value.bytes)
        return directed


def _check_costs(seconds: Sequence[float], sizes: Sequence[int], rematerializable: Sequence[bool]) -> None:
    """Raises ``ValueError`` unless each op has finite seconds >= 0, a whole number of bytes >= 0 and a flag."""
    for name, given in (("sizes", sizes), ("rematerializable", rematerializable)):
        if len(given) != len(seconds):
            raise ValueError(f"{name} has {len(given)} entries, seconds has {len(seconds)}")
    for index, (duration, size) in enumerate(zip(seconds, sizes, strict=True)):
        if not (math.isfinite(duration) and duration >= 0):
            raise ValueError(f"seconds[{index}] is {duration}: expected a finite number >= 0")
        if not (math.isfinite(size) and size >= 0 and int(size) == size):
            raise ValueError(f"sizes[{index}] is {size}: expected a whole number of bytes >= 0")


def _inputs_of(edges: Iterable[tuple[int, int]], count: int) -> list[tuple[int, ...]]:
    """Returns, for each of ``count`` ops, the values that it reads, sorted. Raises ``ValueError`` for an impossible edge."""
    inputs: list[set[int]] = [set() for _ in range(count)]
    for producer, reader in edges:
        if not (0 <= producer < count and 0 <= reader < count):
            raise ValueError(f"the edge ({producer}, {reader}) names an op that does not exist: there are {count}")
        if producer >= reader:
            raise ValueError(f"the edge ({producer}, {reader}) does not lead to a later op")
        inputs[reader].add(int(producer))
    return [tuple(sorted(read)) for read in inputs]
