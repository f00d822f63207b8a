"""What binds a peak: its bytes by kind, and the remedy that fits the largest one.

The operands of an op are what it reads and computes. No recomputation lowers them, nor gradients that wait for the end of the
backward, outputs and workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.basics.units import format_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.plans.plan import Plan
from autoremat.report.peak_snapshot import LiveTensor, TensorCategory, peak_of

NAMES = {
    TensorCategory.GRADIENT: "gradients",
    TensorCategory.SAVED: "saved tensors",
    TensorCategory.RECOMPUTED: "recomputed tensors",
    TensorCategory.TEMPORARY: "temporary tensors",
    TensorCategory.OUTPUT: "outputs of the forward",
    TensorCategory.TANGENT: "tangents",
}
"""Kinds of bytes beside operands and workspaces."""

REMEDIES: dict[str, str] = {
    "gradients": "free gradients early: run the optimizer in the backward, shard (FSDP2's fully_shard), or train fewer "
    "parameters (LoRA, frozen layers)",
    "outputs of the forward": "return less from the compiled function, such as the loss without the logits",
    "tangents": "return less from the compiled function, such as the loss without the logits",
    TensorCategory.OTHER_CALLS.value: "keep fewer micro-batches in flight",
}
"""Remedies by kind. A smaller batch or a shorter sequence helps against all others."""


LOOPS = ("scan", "while_loop", "associative_scan", "map_impl")
"""Ops of torch that run a body many times. A plan saves what all runs save, or repeats all of them."""

OPERANDS, WORKSPACE = "operands of ", "workspace of "
"""Beginnings of the kinds that name one op."""


@dataclass(frozen=True)
class Part:
    """The bytes of one kind at a peak."""

    name: str
    bytes: int
    remedy: str = ""


def remedy_for(kind: str) -> str:
    """Returns the advice that lowers the bytes of a kind; empty if there is none beside a smaller batch."""
    if kind.startswith(OPERANDS):
        where = kind.removeprefix(OPERANDS)
        return f"compute {where} in parts along the rows: its operands are live together under every plan"
    if kind.startswith(WORKSPACE):
        return f"use another kernel for {kind.removeprefix(WORKSPACE)}, with less workspace"
    return REMEDIES.get(kind, "")


def parts_of_peak(plan: Plan) -> tuple[Part, ...]:
    """Returns the bytes at the peak of ``plan`` by kind, the largest first. Their sum is the peak."""
    moment, graph = peak_of(plan, None), plan.graph
    if moment is None:
        return ()
    op = graph.ops[plan.schedule.sequence[moment.position]]
    where = f"{moment.op} of {moment.module}" if moment.module else moment.op
    operands = {graph.values[value].name for value in (*op.inputs, *op.outputs)}
    sums: dict[str, int] = {}
    for tensor in moment.live:
        name = _kind(tensor, operands, where)
        sums[name] = sums.get(name, 0) + tensor.bytes
    ordered = sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple(Part(name, bytes_, remedy_for(name)) for name, bytes_ in ordered)


def remedies_for_model(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Returns advice on what the model itself decides at the peak of ``plan``, if that is half of it.

    These are tensors that its checkpoint policies save, and what its loops hold. ``graph`` is free of the user's constraints.
    """
    moment = peak_of(plan, None)
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


def _kind(tensor: LiveTensor, operands: set[str], where: str) -> str:
    """Returns the kind of a live tensor; ``operands`` are the names of what the op at the peak reads and computes."""
    if tensor.sort is TensorCategory.WORKSPACE:
        return WORKSPACE + where
    inner = (TensorCategory.SAVED, TensorCategory.RECOMPUTED, TensorCategory.TEMPORARY)
    if tensor.sort in inner and tensor.name in operands:
        return OPERANDS + where
    return NAMES[tensor.sort] if tensor.sort in NAMES else str(tensor.sort.value)
