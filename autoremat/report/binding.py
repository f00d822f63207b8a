"""What binds a peak: its bytes by kind, and the remedy that fits the largest one.

The operands of an op are what it reads and computes. No recomputation lowers them, nor gradients that wait for the end of the
backward, outputs and workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def _kind(tensor: LiveTensor, operands: set[str], where: str) -> str:
    """Returns the kind of a live tensor; ``operands`` are the names of what the op at the peak reads and computes."""
    if tensor.sort is TensorCategory.WORKSPACE:
        return WORKSPACE + where
    inner = (TensorCategory.SAVED, TensorCategory.RECOMPUTED, TensorCategory.TEMPORARY)
    if tensor.sort in inner and tensor.name in operands:
        return OPERANDS + where
    return NAMES[tensor.sort] if tensor.sort in NAMES else str(tensor.sort.value)
