"""What binds a peak: its bytes by kind, and the remedy that fits the largest one.

The operands of an op are what it reads and computes. No recomputation lowers them, nor gradients that wait for the end of the
backward, outputs and workspaces.
"""

from __future__ import annotations

from collections import Counter

from autoremat.basics.units import format_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.plans.plan import Plan
from autoremat.report.peak_snapshot import TensorCategory, peak_of

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

OPERANDS, WORKSPACE = "operands of ", "workspace of "
"""Beginnings of the kinds that name one op."""


def remedy_for(kind: str) -> str:
    """Returns the advice that lowers the bytes of a kind; empty if there is none beside a smaller batch."""
    if kind.startswith(OPERANDS):
        where = kind.removeprefix(OPERANDS)
        return f'try tiles="auto": the operands of {where} are live together under every plan that runs it as a whole'
    if kind.startswith(WORKSPACE):
        return f"use another kernel for {kind.removeprefix(WORKSPACE)}, with less workspace"
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
            kind = WORKSPACE + where
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
