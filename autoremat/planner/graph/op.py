"""Defines the facts of an op and of a value, and the forms of values.

A :class:`Value` is one *storage*. Views and aliases are the same value, because saving a view saves its whole base. An
:class:`Op` is one call that allocates storages or has an effect; pure views are not ops. Bytes are ints, seconds are floats.

A :class:`Form` is a way to keep a saved tensor between the forward and the backward, beside "as it is, on the device". The
decision to use one is a stay (:class:`autoremat.planner.graph.schedule.Stay`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Trait(enum.Flag):
    """Properties of an op that decide on a second execution."""

    NONE = 0
    RANDOM = enum.auto()
    MUTATING = enum.auto()
    COLLECTIVE = enum.auto()
    EFFECTFUL = enum.auto()
    OPAQUE = enum.auto()
    """A custom or higher-order op that is not declared pure."""
    READS_MUTATED_INPUT = enum.auto()
    """The op reads an input that the forward later overwrites. A second execution would read the new contents."""
    DISCONTINUOUS = enum.auto()
    """The op selects among floating-point numbers, such as the experts of a token, or its result is compared with numbers that
    were selected from it. Recomputed by other code, whose last bits differ, others might be selected."""
    DATA_DEPENDENT = enum.auto()
    """Sizes or numbers follow from the contents of an input. Recomputed by other code, they might differ from those that the
    rest of the step uses."""
    GATHER = enum.auto()
    """An all-gather together with its wait. All ranks of its group follow the same plan, so they repeat it together. This is
    the one trait that forbids nothing."""


NOT_REMATERIALIZABLE = ~Trait.GATHER

SEQUENTIAL = Trait.RANDOM | Trait.MUTATING | Trait.EFFECTFUL
"""Traits of ops whose number and sequence are part of what a graph does."""

COMMUNICATES = Trait.COLLECTIVE | Trait.GATHER
"""Traits of ops that all ranks of a group run together, in the same sequence."""


class Kind(enum.Enum):
    """The way in which a code generator realises the result of an op."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    EXTERN = "extern"


class Inlining(enum.Enum):
    """The rule by which a fusing code generator inlines a pointwise result into its readers, instead of materialising it."""

    CHEAP = "cheap"
    """Into all readers, as long as the expression reads few buffers."""
    ONCE = "once"
    """Only into a single reader, and so for every expression that contains it: exponentials and the like on CPUs."""
    NEVER = "never"
    """Into no reader: random numbers, and results that a pass marks."""


class Constraint(enum.Enum):
    """The demand of a user, a policy or a model on the results of an op."""

    NONE = "none"
    SAVE = "save"
    RECOMPUTE = "recompute"


class Role(enum.Enum):
    """The origin of a value, which decides who frees it."""

    COMPUTED = "computed"
    INPUT = "input"
    """Exists before and after the step (parameter, batch). It costs nothing and is never freed."""
    TANGENT = "tangent"
    """A gradient that autograd hands to the backward and holds until the backward returns."""


@dataclass(frozen=True)
class Value:
    """One storage of ``bytes`` bytes, computed by op number ``producer`` (None for inputs and tangents)."""

    name: str
    bytes: int
    producer: int | None
    role: Role = Role.COMPUTED
    module: str = ""
    source: str = ""
    forms: tuple[Form, ...] = ()
    """The ways to keep the value beside "as it is, on the device". Outputs, inputs and tangents have none."""

    @property
    def least_bytes(self) -> int:
        """The bytes on the device of the smallest form."""
        return min([self.bytes, *(form.device_bytes for form in self.forms)])

    def form(self, name: str) -> Form:
        """Returns the form of that name. Raises ``KeyError`` if the value has none."""
        return {form.name: form for form in self.forms}[name]


@dataclass(frozen=True)
class Scope:
    """One call of a module.

    ``path`` is the module's path, such as "model.layers.0.mlp". ``kind`` is the name of its class. ``call`` counts its calls
    from 0.
    """

    path: str
    kind: str = ""
    call: int = 0


@dataclass(frozen=True)
class Op:
    """One call. ``inputs`` and ``outputs`` are value numbers without repetition; ``seconds`` are those of the cost model."""

    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward: bool
    seconds: float = 0.0
    flops: int = 0
    bytes_moved: int = 0
    workspace_bytes: int = 0
    """Bytes that the op allocates beside its results and frees before it returns."""
    kind: Kind = Kind.EXTERN
    traits: Trait = Trait.NONE
    constraint: Constraint = Constraint.NONE
    module: str = ""
    source: str = ""
    scopes: tuple[Scope, ...] = ()
    """The modules that were running when the op was called, outermost first."""
    decomposed_from: str = ""
    """The target of the model's op from which this op was decomposed, or "" if it is the model's own."""
    tensor_names: tuple[str, ...] = ()
    """Names that the model gives to the result (``autoremat.name``)."""
    in_place: tuple[int, ...] = ()
    """Inputs that the op reads at the same elements that it writes.

    Where the code generator fuses, the result may reuse the buffer of such an input. Both must have the same size, and the
    input must have no later reader.
    """
    inlining: Inlining = Inlining.CHEAP
    memory_bound_seconds: float = 0.0
    """The part of ``seconds`` for the op's share of the memory traffic of a fused kernel."""
    ends_pass: bool = False
    """True if a kernel that reads the op's inputs knows the result only at its end: a reduction that is none of rows, a
    scatter."""
    demanded: bool = False
    """True if a selective-checkpoint policy of the model demands recomputation. A checkpoint region only prefers it."""

    @property
    def rematerializable(self) -> bool:
        """True if a second execution surely gives the same result and has no other effect.

        A collective counts as rematerializable if the model demands its recomputation. All ranks then repeat it alike, as under
        torch's own checkpoints. An all-gather is one without that demand where all ranks follow the same plan.
        """
        hindrance = self.traits & NOT_REMATERIALIZABLE
        return not hindrance or (hindrance is Trait.COLLECTIVE and self.constraint is Constraint.RECOMPUTE)

    @property
    def may_run_again(self) -> bool:
        """True if a plan may run the op again: it is rematerializable, and no constraint saves its results."""
        return self.rematerializable and self.constraint is not Constraint.SAVE


class Engine(enum.Enum):
    """What carries out a transfer. Each engine is a serial queue, which serves transfers in the sequence of their issue."""

    COMPUTE = "compute"
    """The compute stream itself: the step waits for the whole transfer."""
    TO_HOST = "to host"
    """The copies from the device to the host."""
    FROM_HOST = "from host"
    """The copies from the host to the device."""
    NETWORK = "network"
    """The collectives of the value's group of ranks."""


DEVICE, HOST, BITS, SHARDS = "device", "host", "bits", "shards"
"""The names of forms: as it is on the device, in pinned host memory, a bool tensor as one bit per element, and an equal part
on each rank of a group of a value that is the same on all of them."""


@dataclass(frozen=True)
class Transfer:
    """One conversion between a value and its form: the engine, and its seconds by the cost model at the planned rate."""

    engine: Engine
    seconds: float
    temporary_bytes: int = 0
    """Bytes on the device beside source and result, from the issue until the end."""


@dataclass(frozen=True)
class Form:
    """A way to keep a value between the store in the forward and the load in the backward."""

    name: str
    """Unique among the forms of a value, such as ``"host"`` or ``"bits"``. Stays name forms, in plan files too."""
    store: Transfer
    load: Transfer
    device_bytes: int = 0
    """Bytes on the device while the value is stored."""
    host_bytes: int = 0
    """Bytes on the host while the value is stored."""
    ranks: tuple[int, ...] = ()
    """The ranks that load together and so follow one plan; empty if a rank loads alone."""
