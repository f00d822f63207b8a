"""The decision for every forward value, with its reason. Both are read off a finished plan; this module decides nothing."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.op import BITS, HOST, NOT_REMATERIALIZABLE, SHARDS, Constraint, Trait
from autoremat.planner.plans.plan import Plan


class Decision(str, enum.Enum):
    """Decision of a plan for a forward value. Offloaded, packed and sharded values are saved, in another form."""

    SAVED = "saved"
    OFFLOADED = "offloaded"
    PACKED = "packed"
    SHARDED = "sharded"
    RECOMPUTED = "recomputed"
    POSTPONED = "postponed"  # computed only in the backward, which alone reads it
    FUSED = "fused"  # never materialised: its readers compute it
    FORWARD_ONLY = "forward only"


OF_FORM = {HOST: Decision.OFFLOADED, BITS: Decision.PACKED, SHARDS: Decision.SHARDED}
"""The decision for a value that is kept in a form."""


class Reason(str, enum.Enum):
    """Reason for a decision, with its sentence."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> Reason:
        """Makes a reason, which is the text ``value``."""
        made = str.__new__(cls, value)
        made._value_, made.sentence = value, sentence
        return made

    CONSTRAINT = "constraint", "constraint of the user, a policy or the model"
    RANDOM = "random", "random numbers cannot be drawn a second time"
    MUTATING = "mutating", "its op writes to its inputs"
    COLLECTIVE = "collective", "its op communicates"
    EFFECTFUL = "effect", "its op has an effect"
    OPAQUE = "opaque", "custom or higher-order op that nobody declares pure"
    READS_MUTATED_INPUT = "reads mutated input", "its op reads an input that is overwritten later"
    DISCONTINUOUS = "choice", "a selection hangs on its last bits: code that rounds differently could select other elements"
    DATA_DEPENDENT = "data dependent", "the data decide the size of the result, and other code could decide differently"
    FORWARD_OUTPUT = "forward output", "returned by the forward, so the caller holds it"
    START = "start", "recomputation starts from it"
    SLOWER = "slower", "recomputing takes longer than writing and reading"
    CHEAP = "cheap", "recomputing takes less time than writing and reading"
    BUDGET = "budget", "saving it would exceed the budget"
    NEEDED = "needed", "needed to recompute another value"
    NO_GAIN = "no gain", "the other decision gains nothing"
    ONLY_BACKWARD = "only backward", "only the backward reads it"
    INSIDE_READERS = "inside readers", "computed inside the kernels that read it"
    NOT_READ = "not read", "the backward does not read it"
    FREES_MEMORY = "frees memory", "device memory is free meanwhile"


@dataclass(frozen=True)
class ForwardValue:
    """A storage that a forward op allocates, with the plan's decision for it."""

    name: str
    bytes: int
    op: str
    module: str
    source: str
    decision: Decision
    reason: Reason
    detail: str
    """Figures behind the reason: seconds of recomputing and of saving, or the place where memory is full. May be empty."""
    seconds: float
    """Seconds of one execution of its op, by the cost model. If the op has several results, the first has them and the others
    0."""
    added_seconds: float
    """Seconds of recomputing its op, beyond the execution that every plan needs. The first result of an op has them all."""

    @property
    def why(self) -> str:
        """The reason as a sentence."""
        return self.reason.sentence + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Total:
    """Sums over forward values of one class of modules or of one op. Seconds are estimates of the cost model."""

    name: str
    values: int
    saved_bytes: int
    recomputed_bytes: int
    fused_bytes: int
    """Bytes of values that are never materialised."""
    seconds: float
    """Seconds of one execution of the ops."""
    added_seconds: float
    """Seconds of recomputation."""
    stored_bytes: int
    """Bytes of saved values that are kept in another form than on the device."""


def totals_of(values: Iterable[ForwardValue], by: str) -> tuple[Total, ...]:
    """Returns sums over ``values`` by ``"module"`` or ``"op"``, the most saved bytes first."""
    if by not in ("module", "op"):
        raise ValueError(f'totals(by={by!r}) is not accepted. Accepted: "module", "op"')
    groups: dict[str, list[ForwardValue]] = {}
    for value in values:
        groups.setdefault(module_class(value.module) if by == "module" else op_name(value.op), []).append(value)
    totals = []
    for name, members in groups.items():
        sizes = Counter[Decision]()
        for value in members:
            sizes[value.decision] += value.bytes
        bytes_ = (sizes[Decision.SAVED], sizes[Decision.RECOMPUTED], sizes[Decision.FUSED])
        seconds = (sum(v.seconds for v in members), sum(v.added_seconds for v in members))
        totals.append(Total(name, len(members), *bytes_, *seconds, sum(sizes[one] for one in OF_FORM.values())))
    return tuple(sorted(totals, key=lambda total: (-total.saved_bytes, -total.added_seconds, total.name)))


def module_class(module: str) -> str:
    """Returns a module path with ``*`` for its numbers: ``layers.*.mlp`` for ``layers.3.mlp`` and ``layers.4.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in module.split(".")) if module else ""


def op_name(target: str) -> str:
    """Returns the short name of an op: ``mm`` for ``aten.mm.default``."""
    match = re.fullmatch(r"\w+\.(\w+)\.\w+", target)
    return match[1] if match else target


def against(seconds: float, saving: float) -> str:
    """Returns a text that compares the seconds of recomputing with those of saving."""
    other = format_seconds(saving) if saving else "nothing, for it is written and read in any case"
    return f"{format_seconds(seconds)} against {other}"


def explain_values(plan: Plan, budget: int | None) -> tuple[ForwardValue, ...]:
    """Returns all values of the forward's ops, in the graph's sequence. ``budget`` is the plan's budget (None: no bound)."""
    graph, explainer, found = plan.graph, _Explainer(plan, budget), list[ForwardValue]()
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        for number, value in enumerate(op.outputs):
            seconds, again = (0.0, 0.0) if number else (op.seconds, traffic_of(graph).recompute_seconds[index])
            decision = explainer.decision(index, value)
            reason, detail = explainer.reason(index, value, decision)
            own = graph.values[value]
            found.append(ForwardValue(
                own.name, own.bytes, op.target, own.module, own.source,
                decision, reason, detail, seconds, again * explainer.repeats[index],
            ))  # fmt: skip
    return tuple(found)


class _Explainer:
    """Executions of ops and uses of values in a plan, from which decisions and reasons follow."""

    def __init__(self, plan: Plan, budget: int | None) -> None:
        self.plan, self.graph, self.budget = plan, plan.graph, budget
        graph, sequence = plan.graph, plan.schedule.sequence
        self.num_forward = len(plan.schedule.forward)
        self.saved = frozenset(plan.saved)
        self.stays = {stay.value: stay for stay in plan.schedule.stays}
        self.outputs = frozenset(graph.forward_outputs)
        self.in_forward = frozenset(plan.schedule.forward)
        backward = range(self.num_forward, len(sequence))
        self.again = {sequence[position]: position for position in backward if sequence[position] < graph.num_forward}
        """Last position in the backward of each forward op that runs there."""
        self.repeats = Counter(plan.recomputed)
        self.materialised = frozenset(plan.timeline.live_ranges.values.tolist())
        self.forward_end: dict[int, int] = {}
        for position, index in enumerate(plan.schedule.forward):
            op = graph.ops[index]
            self.forward_end.update(dict.fromkeys((*op.inputs, *op.outputs), position))
        self.feeds = {v for index in self.again for v in graph.ops[index].inputs}

    def decision(self, index: int, value: int) -> Decision:
        if value in self.stays:
            return OF_FORM[self.stays[value].form]
        if value in self.saved:
            return Decision.SAVED
        if index in self.again and (value in self.graph.backward_needs or value in self.feeds):
            return Decision.RECOMPUTED if index in self.in_forward else Decision.POSTPONED
        if self.graph.machine.fuses and value not in self.materialised and self.graph.readers[value]:
            return Decision.FUSED
        return Decision.FORWARD_ONLY

    def reason(self, index: int, value: int, decision: Decision) -> tuple[Reason, str]:
        if decision is Decision.SAVED:
            return self.why_saved(index, value)
        if decision is Decision.RECOMPUTED:
            return self.why_recomputed(index, value)
        if value in self.stays:
            form = self.graph.values[value].form(self.stays[value].form)
            transfers = f"its transfers take {format_seconds(form.store.seconds + form.load.seconds)}"
            if not self.graph.ops[index].rematerializable:
                return Reason.FREES_MEMORY, f"it cannot be recomputed, and {transfers}"
            again = format_seconds(self.seconds_without(value))
            return Reason.FREES_MEMORY, f"recomputing it takes {again}, and {transfers}"
        if decision is Decision.FORWARD_ONLY:
            return (Reason.FORWARD_OUTPUT if value in self.outputs else Reason.NOT_READ), ""
        return (Reason.ONLY_BACKWARD if decision is Decision.POSTPONED else Reason.INSIDE_READERS), ""

    def why_saved(self, index: int, value: int) -> tuple[Reason, str]:
        op = self.graph.ops[index]
        if value in self.outputs:
            return Reason.FORWARD_OUTPUT, ""
        for trait in Trait:  # in the sequence in which they are named
            if op.traits & NOT_REMATERIALIZABLE & trait:
                return Reason[str(trait.name)], ""
        if op.constraint is Constraint.SAVE:
            return Reason.CONSTRAINT, ""
        if value in self.feeds:
            return Reason.START, ""
        seconds, saving = self.seconds_without(value), self.saving_seconds(value)
        return Reason.SLOWER if seconds > saving else Reason.NO_GAIN, against(seconds, saving)

    def why_recomputed(self, index: int, value: int) -> tuple[Reason, str]:
        op, size, saving = self.graph.ops[index], self.graph.values[value].bytes, self.saving_seconds(value)
        seconds = traffic_of(self.graph).recompute_seconds[index]
        if op.constraint is Constraint.RECOMPUTE:
            return Reason.CONSTRAINT, ""
        if seconds <= saving:
            return Reason.CHEAP, against(seconds, saving)
        if self.budget is not None:
            start, end = self.forward_end.get(value, self.num_forward - 1) + 1, self.again[index]
            stretch, in_others = self.plan.timeline.bytes_at[start:end], self.graph.calls.others * size
            if len(stretch) and int(stretch.max()) + size + in_others > self.budget:
                return Reason.BUDGET, self.moment(start + int(stretch.argmax()), size + in_others)
            if in_others and self.plan.peak_bytes + in_others > self.budget:
                return Reason.BUDGET, self.moment(self.plan.timeline.peak_position, in_others)
        if value in self.feeds and value not in self.graph.backward_needs:
            return Reason.NEEDED, ""
        return Reason.NO_GAIN, ""

    def saving_seconds(self, value: int) -> float:
        """Returns the seconds of writing and reading the value that only saving it causes."""
        return float(traffic_of(self.graph).saving_seconds[value])

    def seconds_without(self, value: int) -> float:
        """Returns the seconds of recomputing the saved ``value`` from the other saved values."""
        graph = self.graph
        return sum(
            traffic_of(graph).recompute_seconds[op] for op in graph.ancestors(graph.producers([value]), self.saved - {value})
        )

    def moment(self, position: int, more: int) -> str:
        """Returns a text with the place in the step at which ``more`` bytes would exceed the budget."""
        op = self.graph.ops[self.plan.schedule.sequence[position]]
        half = "forward" if position < self.num_forward else "backward"
        reached = int(self.plan.timeline.bytes_at[position]) + more
        where = f" of {op.module}" if op.module else ""
        return f"{format_bytes(reached)} at {op.name}{where} in the {half}"
