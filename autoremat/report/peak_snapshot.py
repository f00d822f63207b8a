"""Peak snapshots and memory profiles of plans: the live tensors at the peak, and the live bytes over the step.

Both are read off the timelines of finished plans, without another simulation. A profile has a few hundred samples, including
the peak.
"""

import enum
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat.basics.units import format_bytes
from autoremat.planner.graph.arrays import arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Role
from autoremat.planner.memory.live_ranges import NOT_COMPUTED
from autoremat.planner.plans.plan import Plan
from autoremat.report.decisions import module_class

SAMPLES = 240
"""Maximum number of samples of a profile."""

BANDS = 9
"""Maximum number of groups of modules in a profile. All smaller groups are merged into one."""

GRADIENTS, TANGENTS, WORKSPACE, OUTSIDE, SMALLER = "gradients", "tangents", "workspace", "no module", "other modules"


class TensorCategory(str, enum.Enum):
    """Category of a live tensor."""

    SAVED = "saved tensors"
    RECOMPUTED = "recomputed tensors"
    TEMPORARY = "temporary tensors"
    OUTPUT = "outputs of the forward"
    GRADIENT = "gradients"
    TANGENT = "tangents"
    WORKSPACE = "workspace"
    OTHER_CALLS = "other calls in flight"
    RESIDENT = "earlier micro-batches"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is live at the peak."""

    name: str
    bytes: int
    sort: TensorCategory
    module: str
    source: str


@dataclass(frozen=True)
class PeakSnapshot:
    """The execution of one op and the tensors that are live during it."""

    half: str
    """``"forward"`` or ``"backward"``."""
    position: int
    """Index of the execution among the step's ``executions``."""
    executions: int
    op: str
    module: str
    live: tuple[LiveTensor, ...]
    """Live tensors, the largest first."""

    @property
    def bytes(self) -> int:
        """Bytes of all live tensors."""
        return sum(tensor.bytes for tensor in self.live)

    @property
    def by_sort(self) -> list[tuple[TensorCategory, int]]:
        """Bytes of the live tensors by category, the largest sum first."""
        sums = Counter[TensorCategory]()
        for tensor in self.live:
            sums[tensor.sort] += tensor.bytes
        return sums.most_common()


@dataclass(frozen=True)
class Profile:
    """Live bytes over one step: ``bytes[g][i]`` belong to ``groups[g]`` at sample ``i``.

    Sample ``i`` lies ``seconds[i]`` after the start, by the cost model. ``border`` is the index of the first sample of the
    backward. The step's peak is one of the samples.
    """

    groups: tuple[str, ...]
    seconds: tuple[float, ...]
    border: int
    bytes: tuple[tuple[int, ...], ...]
    host: tuple[int, ...] = ()
    """Bytes of saved tensors on the host at each sample, of all open calls; empty if none are there."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Live bytes at each sample."""
        return tuple(sum(column) for column in zip(*self.bytes, strict=True))


def peak_of(plan: Plan) -> PeakSnapshot | None:
    """Returns the snapshot of the first execution that reaches the plan's peak; None for an empty graph."""
    sequence, border = plan.schedule.sequence, len(plan.schedule.forward)
    if not sequence:
        return None
    graph, position = plan.graph, plan.timeline.peak_position
    saved, outputs, gradients = frozenset(plan.saved), frozenset(graph.forward_outputs), frozenset(graph.backward_outputs)
    loads = {(stay.value, stay.load) for stay in plan.schedule.stays}
    found = []
    for live_range in (one for one in plan.timeline.live_ranges if one.start <= position <= one.end):
        number, start = live_range.value, live_range.start
        value = graph.values[number]
        if number in outputs and start < border:
            sort = TensorCategory.OUTPUT
        elif number in gradients:
            sort = TensorCategory.GRADIENT
        elif live_range.computed_at == NOT_COMPUTED or (number, live_range.computed_at) in loads:
            sort = TensorCategory.SAVED
        elif start >= border and value.producer is not None and value.producer < graph.num_forward:
            sort = TensorCategory.RECOMPUTED
        else:
            sort = TensorCategory.SAVED if start < border and number in saved else TensorCategory.TEMPORARY
        found.append(LiveTensor(value.name, live_range.bytes, sort, value.module, value.source))
    if position >= border:
        tangents = (v for v in graph.values if v.role is Role.TANGENT)
        found += [LiveTensor(v.name, v.bytes, TensorCategory.TANGENT, v.module, v.source) for v in tangents]
    op = graph.ops[sequence[position]]
    found.append(LiveTensor(op.name, op.workspace_bytes, TensorCategory.WORKSPACE, op.module, op.source))
    name, others = f"saved tensors and outputs of {graph.calls.others} other calls in flight", plan.timeline.other_calls_bytes
    found.append(LiveTensor(name, others, TensorCategory.OTHER_CALLS, "", ""))
    kept = "gradients and outputs of earlier micro-batches"
    found.append(LiveTensor(kept, graph.calls.resident_bytes, TensorCategory.RESIDENT, "", ""))
    live = tuple(sorted((tensor for tensor in found if tensor.bytes), key=lambda tensor: (-tensor.bytes, tensor.name)))
    return PeakSnapshot("forward" if position < border else "backward", position, len(sequence), op.name, op.module, live)


def module_group(module: str) -> str:
    """Returns the group of a module in a profile: its module class, at most one name below the first number."""
    parts = module_class(module).split(".")
    depth = parts.index("*") + 2 if "*" in parts else len(parts)
    return ".".join(parts[:depth]) or OUTSIDE


def profile_of(plan: Plan) -> Profile | None:
    """Returns the live bytes over the step by groups of modules; None for an empty graph."""
    graph, sequence = plan.graph, plan.schedule.sequence
    if not sequence:
        return None
    rows = _bytes_by_group(plan)
    areas = {group: float(row.sum()) for group, row in rows.items()}
    kept = sorted(rows, key=lambda g: (-areas[g], g))[:BANDS]
    rest = [row for group, row in rows.items() if group not in kept]
    shown = {group: rows[group] for group in kept}
    if rest:
        shown[SMALLER] = np.sum(rest, axis=0)
    chosen, border = list[int](), 0
    for first, last in ((0, len(plan.schedule.forward)), (len(plan.schedule.forward), len(sequence))):
        share = max(1, round(SAMPLES * (last - first) / len(sequence)))
        stretches = np.array_split(np.arange(first, last), min(share, max(last - first, 1)))
        border = len(chosen)  # in the end the number of samples in the forward
        chosen += [int(stretch[plan.timeline.bytes_at[stretch].argmax()]) for stretch in stretches if len(stretch)]
    on_host = np.zeros(len(sequence) + 1, dtype=np.int64)  # each tensor from its store until it is needed, and of other calls
    for stay in plan.schedule.stays:
        held = graph.values[stay.value].form(stay.form).host_bytes
        on_host[[stay.store, stay.need]] += (held, -held)
        on_host[0] += graph.calls.others * held
    begins = np.concatenate([[0.0], np.cumsum([graph.ops[op].seconds for op in sequence])])
    return Profile(
        tuple(shown),
        tuple(float(begins[i]) for i in chosen),
        border,
        tuple(tuple(int(row[i]) for i in chosen) for row in shown.values()),
        tuple(np.cumsum(on_host)[chosen].tolist()) if plan.timeline.host_bytes else (),
    )


def _bytes_by_group(plan: Plan) -> dict[str, NDArray[np.int64]]:
    """Returns the bytes of each group at each execution. Their sum is the timeline."""
    graph, length, border = plan.graph, len(plan.schedule.sequence), len(plan.schedule.forward)
    gradients = frozenset(graph.backward_outputs)
    group_of = [GRADIENTS if v in gradients else module_group(value.module) for v, value in enumerate(graph.values)]
    names = {group: number for number, group in enumerate(dict.fromkeys(group_of))}
    groups = np.array([names[group] for group in group_of], dtype=np.int64)
    live_ranges = plan.timeline.live_ranges
    group = groups[live_ranges.values]
    change = np.zeros((len(names), length + 1), dtype=np.int64)
    np.add.at(change, (group, live_ranges.starts), live_ranges.bytes)
    np.subtract.at(change, (group, live_ranges.ends + 1), live_ranges.bytes)
    rows = dict(zip(names, np.cumsum(change, axis=1)[:, :length], strict=True))
    tangents = np.zeros(length, dtype=np.int64)
    tangents[border:] = graph.tangent_bytes
    rows[TANGENTS] = tangents
    rows[WORKSPACE] = arrays_of(graph).workspace_bytes[np.array(plan.schedule.sequence, dtype=np.int64)]
    rows[TensorCategory.OTHER_CALLS.value] = np.full(length, plan.timeline.other_calls_bytes, dtype=np.int64)
    rows[TensorCategory.RESIDENT.value] = np.full(length, graph.calls.resident_bytes, dtype=np.int64)
    return {group: row for group, row in rows.items() if row.any() or group == TANGENTS}


# -- what binds a peak, and the remedy for its largest kind of bytes -------------------------------------------------------


# The operands of an op are what it reads and computes. No recomputation lowers them, nor gradients that wait for the end of the
# backward, outputs and workspaces.

RETURN_LESS = "return less from the compiled function, such as the loss without the logits"
REMEDIES: dict[str, str] = {
    "gradients": "free gradients early: run the optimizer in the backward, shard (FSDP2's fully_shard), or train fewer "
    "parameters (LoRA, frozen layers)",
    "outputs of the forward": RETURN_LESS,
    "tangents": RETURN_LESS,
    TensorCategory.OTHER_CALLS.value: "keep fewer micro-batches in flight",
}
"""Remedies by kind. A smaller batch or a shorter sequence helps against all others."""


LOOPS = ("scan", "while_loop", "associative_scan", "map_impl")
"""Ops of torch that run a body many times. A plan saves what all runs save, or repeats all of them."""

INNER = (TensorCategory.SAVED, TensorCategory.RECOMPUTED, TensorCategory.TEMPORARY)
"""Categories of tensors that an op can have as operands."""

OPERANDS, KERNEL = "operands of ", "workspace of "
"""Beginnings of the kinds that name one op."""


def remedy_for(kind: str) -> str:
    """Returns the advice that lowers the bytes of a kind; empty if there is none beside a smaller batch."""
    if kind.startswith(OPERANDS):
        where = kind.removeprefix(OPERANDS)
        return f'try tiles="auto": the operands of {where} are live together under every plan that runs it as a whole'
    if kind.startswith(KERNEL):
        return f"use another kernel for {kind.removeprefix(KERNEL)}, with less workspace"
    return REMEDIES.get(kind, "")


def parts_of_peak(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Returns the kinds of bytes at the peak of ``plan``, each with its bytes, the largest first. Their sum is the peak."""
    moment, graph = peak_of(plan), plan.graph
    if moment is None:
        return ()
    op = graph.ops[plan.schedule.sequence[moment.position]]
    where = f"{moment.op} of {moment.module}" if moment.module else moment.op
    operands = {graph.values[value].name for value in (*op.inputs, *op.outputs)}
    sums = Counter[str]()
    for tensor in moment.live:
        kind = tensor.sort.value
        if tensor.sort is TensorCategory.WORKSPACE:
            kind = KERNEL + where
        elif tensor.sort in INNER and tensor.name in operands:
            kind = OPERANDS + where
        sums[kind] += tensor.bytes
    return tuple(sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])))


def remedies_for_model(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Returns advice on what the model itself decides at the peak of ``plan``, if that is half of it.

    These are tensors that its checkpoint policies save, and what its loops hold. ``graph`` is free of the user's constraints.
    """
    moment = peak_of(plan)
    if moment is None:
        return ()
    demanded = {graph.values[v].name for op in graph.ops if op.constraint is Constraint.SAVE for v in op.outputs}
    loops = {v: op for op in graph.ops if op.target.rpartition(".")[2] in LOOPS for v in (*op.inputs, *op.outputs)}
    looped = {graph.values[v].name: op for v, op in loops.items()}
    saved = sum(tensor.bytes for tensor in moment.live if tensor.sort is TensorCategory.SAVED and tensor.name in demanded)
    held = {tensor.name: tensor.bytes for tensor in moment.live if tensor.name in looped}
    found = []
    if 2 * saved >= moment.bytes:
        found.append(f"let the model's own selective checkpoints (MUST_SAVE of a context_fn) save less: {format_bytes(saved)} "
                     "of that peak are theirs")  # fmt: skip
    if 2 * sum(held.values()) >= moment.bytes:
        op = looped[next(iter(held))]
        where = f" at {op.source}" if op.source else ""
        found.append(f"write the {op.target.rpartition('.')[2]}{where} out as a Python loop: as one op it holds "
                     f"{format_bytes(sum(held.values()))} of that peak, of all its runs")  # fmt: skip
    return tuple(found)
