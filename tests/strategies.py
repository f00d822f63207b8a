"""Hypothesis strategies: random graphs for the pure half, random small modules for the torch half, which is imported late."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Engine, Form, Inlining, Kind, Op, Role, Trait, Transfer, Value
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule

MAX_OPS: int | None = None  # set by --max-ops: no random graph has more ops, whatever a test asks for


@dataclass
class GraphBuilder:
    """Adds values and ops one by one; also the way in which tests write small graphs by hand."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def source(self, size: int, role: Role = Role.INPUT) -> int:
        """An input or a tangent of `size` bytes; returns its value number."""
        self.values.append(Value(f"{role.value}{len(self.values)}", size, None, role))
        return len(self.values) - 1

    def op(self, inputs: list[int] | tuple[int, ...], *sizes: int, forward: bool = True, **fields: Any) -> int:
        """An op that makes a value of each of `sizes` bytes; returns the number of the first (-1 without any)."""
        index = len(self.ops)
        first = len(self.values)
        for size in sizes:
            self.values.append(Value(f"v{len(self.values)}", size, index))
        made = tuple(range(first, len(self.values)))
        fields.setdefault("seconds", 1.0)
        self.ops.append(Op(f"op{index}", "test.op", tuple(dict.fromkeys(inputs)), made, forward, **fields))
        return first if sizes else -1

    def graph(self, **fields: Any) -> Graph:
        """The graph with these fields of its own, of its machine and of its calls."""
        own = {name: fields.pop(name) for name in ENDS if name in fields}
        return changed(Graph(tuple(self.ops), tuple(self.values), **own), **fields)


ENDS = ("forward_outputs", "backward_outputs", "must_run")


def changed(graph: Graph, **fields: Any) -> Graph:
    """`graph` with other fields of its machine and its calls."""
    of_calls = {name: fields.pop(name) for name in ("in_flight", "resident_bytes") if name in fields}
    machine, calls = dataclasses.replace(graph.machine, **fields), dataclasses.replace(graph.calls, **of_calls)
    return dataclasses.replace(graph, machine=machine, calls=calls)


def chain(length: int, size: int = 1, seconds: float = 1.0, **fields: Any) -> Graph:
    """A chain network: op i makes activation i, backward op i reads activations i-1 and i and the gradient behind it."""
    build = GraphBuilder()
    made = [build.source(0)]
    for _ in range(length):
        made.append(build.op([made[-1]], size, seconds=seconds))
    gradient = build.source(0, Role.TANGENT)
    for index in range(length, 0, -1):
        gradient = build.op([made[index - 1], made[index], gradient], size, forward=False, seconds=seconds)
    fields.setdefault("saving_seconds_per_byte", 1e-9)
    return build.graph(backward_outputs=(gradient,), **fields)


SIZES = st.sampled_from([0, 1, 4, 16, 64, 100, 256])
SECONDS = st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 0.5])
KINDS = [Kind.POINTWISE, Kind.POINTWISE, Kind.REDUCTION, Kind.EXTERN]
WORKSPACES = [0, 0, 0, 0, 32]
TRAITS = [Trait.NONE] * 7 + [Trait.RANDOM, Trait.OPAQUE]
ORDERS = [Constraint.NONE] * 6 + [Constraint.SAVE, Constraint.RECOMPUTE]
INLININGS = [Inlining.CHEAP] * 4 + [Inlining.ONCE, Inlining.NEVER]


# Each draw costs Hypothesis time: what belongs to one op is one draw, and what is drawn again and again (positions
# in lists, not the lists' elements) is a strategy that it knows.
def one_of_each(**fields: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A choice for every field, in one draw."""
    return st.sampled_from(list(itertools.product(*fields.values()))).map(lambda chosen: dict(zip(fields, chosen, strict=True)))


BACKWARD_OPS = one_of_each(kind=KINDS, traits=TRAITS, workspace_bytes=WORKSPACES)
FORWARD_OPS = one_of_each(kind=KINDS, traits=TRAITS, workspace_bytes=WORKSPACES, constraint=ORDERS)
FUSIONS = one_of_each(inlining=INLININGS, first_in_place=[False, True], rest_in_place=[False, True], ends_pass=[False, True])


@functools.cache
def positions(count: int, least: int, most: int, recent: bool) -> st.SearchStrategy[list[int]]:
    """`least` to `most` different positions of `count`, counted from the end; `recent` ones are the likelier."""
    anywhere = st.integers(0, count - 1)
    position = st.one_of(st.integers(0, min(3, count) - 1), anywhere) if recent else anywhere
    return st.lists(position, min_size=least, max_size=most, unique=True)


def pick(draw: st.DrawFn, values: list[int], least: int, most: int, recent: bool = False) -> list[int]:
    """`least` to `most` different elements of `values`; none where there are none."""
    return [values[-1 - position] for position in draw(positions(len(values), least, most, recent))] if values else []


def at_most(max_ops: int) -> int:
    """`max_ops`, or what the command line allows if that is less."""
    return max_ops if MAX_OPS is None else min(max_ops, MAX_OPS)


def draw_fusion(draw: st.DrawFn, build: GraphBuilder, fuses: bool | None) -> bool:
    """What counts where ops are fused: in-place results, inlining, traffic. Returns whether they are, if not given."""
    for index, op in enumerate(build.ops):
        if op.kind is not Kind.EXTERN and len(op.outputs) == 1:
            chosen = draw(FUSIONS)
            in_place = op.inputs[: chosen["first_in_place"]] + op.inputs[1:] * chosen["rest_in_place"]
            ends_pass = op.kind is Kind.REDUCTION and chosen["ends_pass"]
            build.ops[index] = dataclasses.replace(op, in_place=in_place, inlining=chosen["inlining"], ends_pass=ends_pass)
    fuses, traffic = draw(st.booleans()) if fuses is None else fuses, draw(st.sampled_from([0.0, 0.5, 1.0]))
    for index, op in enumerate(build.ops):
        if fuses and op.kind is Kind.POINTWISE:
            build.ops[index] = dataclasses.replace(op, memory_bound_seconds=traffic * op.seconds)
    return fuses


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 40, fuses: bool | None = None, max_outputs: int = 3) -> Graph:
    """Graphs of 5 to `max_ops` ops: a forward, then backward ops that read its values, tangents and each other."""
    max_ops = at_most(max_ops)
    build = GraphBuilder()
    sources = [build.source(draw(SIZES)) for _ in range(draw(st.integers(1, 3)))]
    num_forward = draw(st.integers(3, max(3, max_ops // 2)))
    num_backward = draw(st.integers(2, max(2, max_ops - num_forward)))
    made: list[int] = []
    pinned = []

    def sizes() -> list[int]:
        return draw(st.lists(SIZES, min_size=1, max_size=max_outputs if draw(st.booleans()) else 1))

    for index in range(num_forward):
        chosen = draw(FORWARD_OPS)
        effect = draw(st.integers(0, 15)) == 0
        outputs = [] if effect else sizes()
        if effect:
            chosen["traits"] |= Trait.EFFECTFUL
            pinned.append(index)
        # Recent values are the likelier inputs, as in real networks; old ones make skips.
        read = pick(draw, [*sources, *made], 1, 3, recent=True)
        first = build.op(read, *outputs, seconds=draw(SECONDS), **chosen)
        made += range(first, first + len(outputs)) if outputs else ()
    tangents = [build.source(draw(SIZES), Role.TANGENT) for _ in range(draw(st.integers(1, 2)))]
    forward_outputs = tuple(pick(draw, made, 0, 3))
    # No dead code: what nothing reads yet, some backward op reads.
    unread = set(made) - {v for op in build.ops for v in op.inputs} - set(forward_outputs)
    reader_of = {value: draw(st.integers(0, num_backward - 1)) for value in sorted(unread)}
    gradients: list[int] = []
    for index in range(num_backward):
        read = pick(draw, [*tangents, *gradients], 1, 2, recent=True)
        read += pick(draw, made, 0, 3) + pick(draw, sources, 0, 1)
        read += [value for value, reader in reader_of.items() if reader == index]
        outputs = sizes()
        first = build.op(read, *outputs, forward=False, seconds=draw(SECONDS), **draw(BACKWARD_OPS))
        gradients += range(first, first + len(outputs))
    fuses = draw_fusion(draw, build, fuses)
    return build.graph(
        forward_outputs=forward_outputs,
        backward_outputs=tuple(pick(draw, [*gradients, *made], 1, 4)),
        must_run=tuple(pinned),
        fuses=fuses,
        fusion_groups_hold_buffers=draw(st.booleans()),
        saving_seconds_per_byte=draw(st.sampled_from([1e-10, 1e-8])),
        write_share=draw(st.sampled_from([0.5, 2 / 3])),
        overlaps_wholly=draw(st.booleans()),
    )


@st.composite
def dags(draw: st.DrawFn, max_ops: int = 30, single_phase: bool | None = None) -> Graph:
    """Graphs as a user describes them: of one phase, or with a forward and a backward; mostly chains with skips."""
    count = draw(st.integers(0, at_most(max_ops)))
    edges = [(i, i + 1) for i in range(count - 1) if draw(st.integers(0, 7))]
    if count > 1:
        pairs = st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True).map(lambda ends: tuple(sorted(ends)))
        edges += draw(st.lists(pairs, max_size=count))
    alone = draw(st.booleans()) if single_phase is None else single_phase
    return Graph.from_dag(
        draw(st.lists(SECONDS, min_size=count, max_size=count)),
        draw(st.lists(SIZES, min_size=count, max_size=count)),
        edges,
        outputs=draw(st.lists(st.integers(0, count - 1), max_size=2)) if count else (),
        rematerializable=[draw(st.integers(0, 9)) > 0 for _ in range(count)],
        num_forward=None if alone else draw(st.integers(0, count)),
    )


def training_chain(length: int, single_phase: bool = False, size: int = 1) -> Graph:
    """A chain of `length` ops of one second and as many gradient ops, each of which reads its activation and the gradient
    behind it; the last gradient stays."""
    count = 2 * length
    edges = [(i, i + 1) for i in range(count - 1)] + [(length - 1 - i, length + i) for i in range(length)]
    num_forward = None if single_phase else length
    return Graph.from_dag([1.0] * count, [size] * count, edges, outputs=(count - 1,), num_forward=num_forward)


@st.composite
def saved_sets(draw: st.DrawFn, graph: Graph) -> frozenset[int]:
    """Sets of forward values that a schedule may save: whatever cannot be repeated is in them if it is needed, and nothing that
    is to be recomputed."""
    wanted = set(draw(st.sets(st.sampled_from(graph.forward_values)))) if graph.forward_values else set()
    recomputed = {v for op in graph.ops if op.constraint is Constraint.RECOMPUTE and op.rematerializable for v in op.outputs}
    return close_under_need(graph, wanted - recomputed)


@st.composite
def schedules_of(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Schedules without stays: some values saved, the others made again, up to three ops once more for nothing."""
    schedule = build_schedule(graph, draw(saved_sets(graph)))
    backward, recomputed = (
        list(schedule.backward),
        {i for i, op in enumerate(graph.ops) if op.constraint is Constraint.RECOMPUTE},
    )
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(backward)))
        ran = {op for op in (*schedule.forward, *backward[:place]) if op < graph.num_forward and not runs_once(graph.ops[op])}
        again = [op for op in sorted(ran) if recomputed.isdisjoint(graph.producers(graph.ops[op].inputs))]
        if again:
            backward.insert(place, draw(st.sampled_from(again)))
    return Schedule(schedule.forward, tuple(backward))


def runs_once(op: Op) -> bool:
    """Whether the op may not be recomputed, by its nature or by order."""
    return not op.rematerializable or op.constraint is Constraint.SAVE


def close_under_need(graph: Graph, wanted: set[int]) -> frozenset[int]:
    """`wanted` and the results of those ops that may run only once but that recomputing the rest would repeat."""
    saved = set(wanted)
    while True:
        needed = [v for v in graph.backward_needs if v not in saved]
        again = graph.ancestors(graph.producers(needed), frozenset(saved))
        lacking = {v for op in again if runs_once(graph.ops[op]) for v in graph.ops[op].outputs} - saved
        if not lacking:
            return frozenset(saved)
        saved |= lacking


FORMS = ("host", "bits", "shards")


def forms_of(size: int) -> tuple[Form, ...]:
    """The forms of a value of `size` bytes: on the host, packed on the device, and a share of it, the rest on other ranks."""
    to_host, from_host = Transfer(Engine.TO_HOST, 1e-3), Transfer(Engine.FROM_HOST, 1e-3)
    pack, unpack = Transfer(Engine.COMPUTE, 1e-4, 3), Transfer(Engine.COMPUTE, 1e-4, 5)
    split, gather = Transfer(Engine.COMPUTE, 0.0), Transfer(Engine.NETWORK, 1e-3, size)
    return (
        Form("host", to_host, from_host, host_bytes=size),
        Form("bits", pack, unpack, device_bytes=size // 8),
        Form("shards", split, gather, device_bytes=size // 2, ranks=(0, 1)),
    )


def with_forms(graph: Graph, forms: Callable[[int], tuple[Form, ...]] = forms_of) -> Graph:
    """`graph` with the `forms` of its bytes for each value of the forward that is no output."""
    outputs = {*graph.forward_outputs, *graph.backward_outputs}
    eligible = set(graph.forward_values) - outputs
    values = [
        dataclasses.replace(value, forms=forms(value.bytes)) if number in eligible else value
        for number, value in enumerate(graph.values)
    ]
    return dataclasses.replace(graph, values=tuple(values))


def on_host(graph: Graph, rate: float) -> Graph:
    """`graph` with a form on the host for each of its forward values that is no output, at `rate` bytes per second."""

    def forms(size: int) -> tuple[Form, ...]:
        copies = (Transfer(engine, size / rate) for engine in (Engine.TO_HOST, Engine.FROM_HOST))
        return (Form("host", *copies, host_bytes=size),)

    return with_forms(graph, forms)


def places_of(graph: Graph, schedule: Schedule, value: int) -> tuple[int, int, int]:
    """The execution that computes a value, its last read in the forward, and its first read in the backward."""
    reads, border = [at for at, op in enumerate(schedule.sequence) if value in graph.ops[op].inputs], len(schedule.forward)
    made = schedule.forward.index(graph.producers([value])[0])
    return made, max((at for at in reads if at < border), default=made), min(at for at in reads if at >= border)


@st.composite
def stays_of(draw: st.DrawFn, graph: Graph, schedule: Schedule, most: int = 4) -> tuple[Stay, ...]:
    """Possible stays of up to `most` saved values that have forms."""
    border, found = len(schedule.forward), []
    stored = [value for value in schedule.saved(graph) if graph.values[value].forms]
    for value in sorted(pick(draw, stored, 0, most)):
        made, last_read, first_read = places_of(graph, schedule, value)
        need = draw(st.integers(border, first_read))
        load = draw(st.integers(border, need))
        free = draw(st.integers(last_read, draw(st.sampled_from([border, load])) - 1))
        store = draw(st.integers(made, min(free, border - 1)))
        found.append(Stay(value, draw(st.sampled_from(FORMS)), store, free, load, need))
    return tuple(found)


STEPS = (
    "linear", "linear", "tied", "add", "add", "mul", "gelu", "tanh", "relu", "silu", "softmax", "where", "detach",
    "relu_", "add_", "mul_", "write_slice_", "view_then_add_", "transposed_mul_", "transpose", "reshape", "chunk",
    "expand", "slices", "unbind", "flip", "gather", "sort", "max_with_indices", "variance", "cumulate", "double",
    "dropout", "dropout", "noise", "batch_norm", "batch_norm", "layer_norm", "embed", "attention", "sdpa", "convolve",
    "average_", "checkpoint",
)  # fmt: skip
OUTPUTS = ("tensor", "tensor", "view", "input", "input_view", "same_twice", "detached", "integer", "scalar")


@dataclass(frozen=True)
class Step:
    """A statement of a random module, on the tensors `first` and `second` modulo what there is; `choice` picks a variant."""

    kind: str
    first: int
    second: int = 0
    choice: int = 0


@dataclass(frozen=True)
class Program:
    """The statements of a random module and what it returns besides its loss."""

    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, int], ...] = ()


@st.composite
def programs(draw: st.DrawFn, max_steps: int = 10, max_outputs: int = 3) -> Program:
    """Programs of 2 to `max_steps` steps, likely to use recent results."""
    steps = []
    for index in range(draw(st.integers(2, max_steps))):
        newest = index + 2  # the inputs and the embedding come first
        number = st.one_of(st.just(newest), st.integers(0, newest))
        steps.append(Step(draw(st.sampled_from(STEPS)), draw(number), draw(number), draw(st.integers(0, 2))))
    outputs = draw(st.lists(st.tuples(st.sampled_from(OUTPUTS), st.integers(0, len(steps) + 2)), max_size=max_outputs))
    return Program(tuple(steps), tuple(outputs))


KINDS = tuple(dict.fromkeys(STEPS))
GROUP = 6


def systematic(kinds: tuple[str, ...], choice: int) -> Program:
    """Each kind once, on the newest tensor and one of before, with dear and random steps between."""
    steps = []
    for index, kind in enumerate(kinds):
        steps.append(Step(kind, 2 * index + 2, index, choice))
        steps.append(Step(("linear", "gelu", "dropout")[index % 3], 2 * index + 3, 0, choice))
    outputs = tuple((OUTPUTS[(choice + i) % len(OUTPUTS)], len(steps) - i) for i in range(3))
    return Program(tuple(steps), outputs)
