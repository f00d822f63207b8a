"""The intermediate representation: ops in execution order and the storages they read and make.

A :class:`Value` is one *storage*; views and aliases of it are the same value, because saving a view saves its whole base.
An :class:`Op` is one call that makes new storages or has an effect; pure views are not ops. All indices are positions in
``Graph.ops`` and ``Graph.values``. Bytes are integers, seconds floats. Nothing here knows torch.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import networkx

from autoremat.basics.units import format_bytes, format_seconds

T = TypeVar("T")


class Trait(enum.Flag):
    """What an op may not do, and why."""

    NONE = 0
    RANDOM = enum.auto()
    MUTATING = enum.auto()
    COLLECTIVE = enum.auto()
    EFFECTFUL = enum.auto()
    OPAQUE = enum.auto()
    """A custom or higher-order op whose purity nobody has declared."""
    READS_MUTATED_INPUT = enum.auto()
    """Reads an input that the forward later overwrites: run again, it would see the new contents."""
    DISCONTINUOUS = enum.auto()
    """Picks some of several floating-point numbers (the experts of a token): run again by other code, whose last bits differ,
    it might pick others."""
    DATA_DEPENDENT = enum.auto()
    """Sizes or numbers follow from the contents of what it reads: run again by other code, it might make others than those that
    the rest of the step was told."""


NOT_REMATERIALIZABLE = (
    Trait.RANDOM
    | Trait.MUTATING
    | Trait.COLLECTIVE
    | Trait.EFFECTFUL
    | Trait.OPAQUE
    | Trait.READS_MUTATED_INPUT
    | Trait.DISCONTINUOUS
    | Trait.DATA_DEPENDENT
)


class Kind(enum.Enum):
    """How a code generator realises the result of an op."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    EXTERN = "extern"


class Inlining(enum.Enum):
    """Where a code generator that fuses computes a pointwise result in its readers instead of making it."""

    CHEAP = "cheap"
    """In all of them, while the expression reads few buffers."""
    ONCE = "once"
    """Only if there is one, and so for all that is computed from it: exponentials and the like on CPUs."""
    NEVER = "never"
    """Random numbers."""


class Constraint(enum.Enum):
    """The demand of a user, a policy or a model on the results of an op."""

    NONE = "none"
    SAVE = "save"
    RECOMPUTE = "recompute"


class Role(enum.Enum):
    """Where a value comes from, which decides who frees it."""

    COMPUTED = "computed"
    INPUT = "input"
    """Exists before the step and after it (parameter, batch): costs nothing, is never freed."""
    TANGENT = "tangent"
    """Handed to the backward by autograd, which holds it until the backward returns."""


@dataclass(frozen=True)
class Value:
    """One storage of ``bytes`` bytes, made by op number ``producer`` (None for inputs and tangents)."""

    name: str
    bytes: int
    producer: int | None
    role: Role = Role.COMPUTED
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Scope:
    """One call of a module: its path, such as "model.layers.0.mlp", the name of its class, and which call of it this is."""

    path: str
    kind: str = ""
    call: int = 0


@dataclass(frozen=True)
class Op:
    """One call. ``inputs`` and ``outputs`` are value numbers without repetition."""

    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward: bool
    seconds: float = 0.0
    flops: int = 0
    bytes_moved: int = 0
    workspace_bytes: int = 0
    """What the op allocates beside its results and frees before it returns."""
    kind: Kind = Kind.EXTERN
    traits: Trait = Trait.NONE
    constraint: Constraint = Constraint.NONE
    module: str = ""
    source: str = ""
    scopes: tuple[Scope, ...] = ()
    """The modules that were running, outermost first."""
    decomposed_from: str = ""
    """The target of the op of the model that this one is part of, where that is another."""
    tensor_names: tuple[str, ...] = ()
    """What the model calls the result (``autoremat.name``)."""
    in_place: tuple[int, ...] = ()
    """Inputs that are read only where the result is written: it may take over the storage of one that has its size and that
    nobody reads later, where the code generator fuses."""
    inlining: Inlining = Inlining.CHEAP
    memory_bound_seconds: float = 0.0
    """The part of ``seconds`` that is the op's share of what a fused kernel reads and writes."""
    demanded: bool = False
    """Whether a selective-checkpoint policy of the model demands a second run; a checkpoint region only prefers it."""

    @property
    def rematerializable(self) -> bool:
        """Whether a second execution is sure to give the same result and to change nothing else.

        So is that of a collective if the model orders it: on all ranks alike, as torch runs it, too.
        """
        hindrance = self.traits & NOT_REMATERIALIZABLE
        return not hindrance or (hindrance is Trait.COLLECTIVE and self.constraint is Constraint.RECOMPUTE)


@dataclass(frozen=True)
class Graph:
    """Ops in execution order, forward before backward.

    ``forward_outputs`` are held by the caller from their making to the end of the step; ``backward_outputs`` (gradients)
    from their making to the end. ``must_run`` ops run in the forward whether or not anything reads their results.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    forward_outputs: tuple[int, ...] = ()
    backward_outputs: tuple[int, ...] = ()
    must_run: tuple[int, ...] = ()
    fuses: bool = False
    """Whether the code generator inlines pointwise chains (Inductor) or materialises every result (eager)."""
    saving_seconds_per_byte: float = 0.0
    """What it takes to write a byte in the forward and to read it in the backward."""
    fusion_groups_hold_buffers: bool = False
    """Whether, where it fuses, the code generator makes one call of all that stands between two extern kernels (on CPUs):
    memory for its results is there before it begins, and what it reads is freed after it ends."""
    most_reads: int = 4
    """Where it fuses: of at most so many buffers is computed what the code generator inlines though several ops read it."""

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
        repeatable: Sequence[bool] | None = None,
    ) -> Graph:
        """The graph in which op ``i`` takes ``seconds[i]`` and makes value ``i`` of ``sizes[i]`` bytes, in the given order.

        ``edges`` are pairs (producer, reader), ``outputs`` the values that must exist at the end; an op that is not
        ``rematerializable`` runs only once. The first ``num_forward`` ops are the forward of a training step and the rest its
        backward; without it (or with all ops) the graph has one phase, in which any op may run again anywhere later.
        Raises ``ValueError``, naming the offender, for costs or edges that describe no such graph.
        """
        if repeatable is not None:
            warnings.warn(
                "repeatable= is deprecated and goes with the next release; use rematerializable=", DeprecationWarning, 2
            )
            rematerializable = repeatable
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

        Nodes run in their order in ``directed`` as far as edges allow. ``arguments`` are those of :meth:`from_dag`, by position
        in that order. Raises ``ValueError`` for a circle and for a node without seconds or bytes.
        """
        import networkx

        place = {node: number for number, node in enumerate(directed)}
        try:
            nodes = list(networkx.lexicographical_topological_sort(directed, key=place.__getitem__))
        except networkx.NetworkXUnfeasible as error:
            raise ValueError("the graph has a circle, so its nodes cannot be run in order") from error
        if lacking := [node for node in nodes if not {"seconds", "bytes"} <= directed.nodes[node].keys()]:
            raise ValueError(f"the node {lacking[0]!r} has no seconds or no bytes")
        number = {node: index for index, node in enumerate(nodes)}
        return cls.from_dag(
            [directed.nodes[node]["seconds"] for node in nodes],
            [directed.nodes[node]["bytes"] for node in nodes],
            [(number[producer], number[reader]) for producer, reader in directed.edges],
            **arguments,
        )

    def verify(self) -> None:
        """Raise ``ValueError`` unless producers come before readers and the two phases stand in order."""
        forward_flags = [op.forward for op in self.ops]
        if sorted(forward_flags, reverse=True) != forward_flags:
            raise ValueError("forward ops must all stand before the backward ops")
        for index, op in enumerate(self.ops):
            for value in op.inputs:
                producer = self.values[value].producer
                if producer is not None and producer >= index:
                    raise ValueError(f"op {op.name} reads {self.values[value].name} before it is made")
            for value in op.outputs:
                if self.values[value].producer != index:
                    raise ValueError(f"{self.values[value].name} is an output of {op.name} but names another producer")

    @cached_property
    def num_forward(self) -> int:
        """The number of forward ops; op numbers below it are forward."""
        return sum(op.forward for op in self.ops)

    @property
    def single_phase(self) -> bool:
        """Whether there is no backward: then any op may run again anywhere later, not only in a second half."""
        return self.num_forward == len(self.ops)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the ops that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops):
            for value in op.inputs:
                readers[value].append(index)
        return tuple(tuple(r) for r in readers)

    @cached_property
    def _derived(self) -> dict[Callable[[Graph], Any], Any]:
        return {}

    def derived(self, maker: Callable[[Graph], T]) -> T:
        """Returns ``maker(self)``, computed once for this graph: how other modules keep data that follow from a graph."""
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
    def computed_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each op, its inputs that some op makes."""
        return tuple(tuple(v for v in op.inputs if self.values[v].producer is not None) for op in self.ops)

    @cached_property
    def forward_reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op, its inputs that a forward op makes."""
        made = set(self.forward_values)
        return tuple(tuple(v for v in op.inputs if v in made) for op in self.ops)

    @cached_property
    def forward_values(self) -> tuple[int, ...]:
        """Values made by forward ops: what the planner decides about."""
        return tuple(v for op in self.ops[: self.num_forward] for v in op.outputs)

    @cached_property
    def required_forward(self) -> frozenset[int]:
        """Forward ops that the forward itself must run, whatever is saved: for its outputs and effects, and because what
        cannot be repeated (a random mask) runs where it was traced."""
        needed = self.ancestors(self.producers(self.backward_needs))
        single = [op for op in needed if op < self.num_forward and not self.ops[op].rematerializable]
        return frozenset(self.ancestors([*self.must_run, *self.producers(self.forward_outputs), *single]))

    @cached_property
    def backward_needs(self) -> frozenset[int]:
        """Forward-made values that some backward op or backward output reads."""
        made = set(self.forward_values)
        read = {v for op in self.ops[self.num_forward :] for v in op.inputs}
        return frozenset(made & (read | set(self.backward_outputs)))

    def producers(self, values: Iterable[int]) -> list[int]:
        """The ops that make ``values``, without inputs and tangents."""
        found = (self.values[v].producer for v in values)
        return [op for op in found if op is not None]

    @cached_property
    def _behind(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each op, its computed inputs with the ops that make them."""
        makers = [-1 if value.producer is None else value.producer for value in self.values]
        return tuple(tuple((v, makers[v]) for v in inputs) for inputs in self.computed_inputs)

    def ancestors(self, roots: Iterable[int], available: Set[int] = frozenset()) -> set[int]:
        """The ops in ``roots`` and all they depend on, not looking behind ``available`` values."""
        behind, seen = self._behind, set(roots)
        stack = list(seen)
        while stack:
            for value, producer in behind[stack.pop()]:
                if producer not in seen and value not in available:
                    seen.add(producer)
                    stack.append(producer)
        return seen

    def workspaces(self) -> dict[str, dict[int, int]]:
        """By target, the largest workspace of its calls with results of so many bytes; without those that need none."""
        found: dict[str, dict[int, int]] = {}
        for op in self.ops:
            if op.workspace_bytes:
                made = sum(self.values[v].bytes for v in op.outputs)
                sizes = found.setdefault(op.target, {})
                sizes[made] = max(sizes.get(made, 0), op.workspace_bytes)
        return found

    @property
    def step_seconds(self) -> float:
        """Seconds of the step without recomputation by the cost model."""
        return self.forward_seconds + sum(op.seconds for op in self.ops[self.num_forward :])

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward's own ops by the cost model."""
        return sum(self.ops[index].seconds for index in self.required_forward)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Returns the ops as a directed graph: an edge from each producer to its readers, with the number of the ``value``.

        Nodes have the op's ``name``, ``target``, ``seconds``, ``bytes`` of its results, and ``forward``.
        """
        import networkx

        directed: networkx.DiGraph[int] = networkx.DiGraph()
        for index, op in enumerate(self.ops):
            made = sum(self.values[v].bytes for v in op.outputs)
            fields = {"name": op.name, "target": op.target, "seconds": op.seconds, "bytes": made, "forward": op.forward}
            directed.add_node(index, **fields)
        for number, value in enumerate(self.values):
            if value.producer is not None:
                edges = ((value.producer, reader) for reader in self.readers[number])
                directed.add_edges_from(edges, value=number, bytes=value.bytes)
        return directed

    def dump(self) -> str:
        """A line per op, for golden tests and for reading."""
        lines = []
        for index, op in enumerate(self.ops):
            made = ", ".join(f"%{v}:{format_bytes(self.values[v].bytes)}" for v in op.outputs)
            read = ", ".join(f"%{v}" for v in op.inputs)
            phase = "fwd" if op.forward else "bwd"
            traits = f" [{op.traits.name}]" if op.traits and op.traits.name else ""
            lines.append(
                f"{index:>4} {phase} {made or '()'} = {op.target}({read}) {format_seconds(op.seconds)} {op.kind.value}{traits}"
            )
        return "\n".join(lines)


def _check_costs(seconds: Sequence[float], sizes: Sequence[int], rematerializable: Sequence[bool]) -> None:
    """Raise ``ValueError`` unless there is a sensible figure of each kind for each op."""
    for name, given in (("sizes", sizes), ("rematerializable", rematerializable)):
        if len(given) != len(seconds):
            raise ValueError(f"{name} has {len(given)} entries, seconds has {len(seconds)}")
    for index, (duration, size) in enumerate(zip(seconds, sizes, strict=True)):
        if not (math.isfinite(duration) and duration >= 0):
            raise ValueError(f"seconds[{index}] is {duration}: expected a finite number >= 0")
        if not (math.isfinite(size) and size >= 0 and int(size) == size):
            raise ValueError(f"sizes[{index}] is {size}: expected a whole number of bytes >= 0")


def _inputs_of(edges: Iterable[tuple[int, int]], count: int) -> list[tuple[int, ...]]:
    """For each of ``count`` ops, the values that it reads, sorted. Raises ``ValueError`` for edges that cannot be."""
    inputs: list[set[int]] = [set() for _ in range(count)]
    for producer, reader in edges:
        if not (0 <= producer < count and 0 <= reader < count):
            raise ValueError(f"the edge ({producer}, {reader}) names an op that does not exist: there are {count}")
        if producer >= reader:
            raise ValueError(f"the edge ({producer}, {reader}) does not lead to a later op")
        inputs[reader].add(int(producer))
    return [tuple(sorted(read)) for read in inputs]
