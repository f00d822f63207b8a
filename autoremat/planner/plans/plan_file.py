"""Reads plan files, and matches their plans with graphs.

A plan file is JSON that holds the graph as well, so a plan can be inspected alone and checked against another graph. Nothing in
it is executed or trusted: types and numbers are checked, the peak is simulated again and the schedule is replayed, when the
file is read and again on the graph to which the plan is applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoremat.basics.errors import PlanFileError, PlanInvalid
from autoremat.basics.units import format_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_json import read_text


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan that was read. ``digest`` is the hash of its text; files of equal text lead to the same compilation."""

    name: str
    digest: str
    plan: Plan = field(repr=False, compare=False)

    def uuid(self) -> str:
        """Returns the digest, which cache keys of compiled graphs contain."""
        return self.digest

    @classmethod
    def of(cls, source: str | os.PathLike[str] | Plan) -> PlanFile:
        """Returns the plan at a path, or a given plan in the same form. Raises ``PlanFileError``."""
        name = "the given Plan" if isinstance(source, Plan) else os.fspath(source)
        text = source.dumps() if isinstance(source, Plan) else read_text(name)
        return cls(name, hashlib.sha256(text.encode()).hexdigest(), Plan.loads(text, name))


# -- a plan and another graph ------------------------------------------------------------------------------------------


def graph_hash(graph: Graph) -> str:
    """Returns the structural hash of a graph: targets, edges, sizes and outputs.

    Names, lines, seconds and workspaces are left out, because they differ between processes and machines. Constraints and
    traits are left out too, because a plan is checked against those of the graph at hand.
    """
    ops = [_op_structure(graph, index) for index in range(len(graph.ops))]
    values = [(value.bytes, value.producer, value.role.value) for value in graph.values]
    ends = (graph.forward_outputs, graph.backward_outputs)
    return hashlib.sha256(json.dumps([ops, values, ends]).encode()).hexdigest()


def _op_structure(graph: Graph, index: int) -> tuple[Any, ...]:
    op = graph.ops[index]
    made = [graph.values[v].bytes for v in op.outputs]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", op.target), op.forward, op.inputs, op.outputs, made


def fitted(files: Sequence[PlanFile], graph: Graph) -> tuple[PlanFile, Plan]:
    """Returns the file whose graph has the structure of ``graph``, and its plan for ``graph``, simulated and checked.

    Raises ``PlanFileError`` if there is none, with the first difference, or if the plan breaks a rule of ``graph``.
    """
    wanted = graph_hash(graph)
    for file in files:
        if graph_hash(file.plan.graph) == wanted:
            label = f"stored plan ({file.plan.label})" if file.plan.label else "stored plan"
            try:
                plan = Plan.of(graph, file.plan.schedule, label)
                plan.check()
            except PlanInvalid as error:
                raise PlanFileError(f"the plan in {file.name} breaks a rule of this graph: {error}") from error
            return file, plan
    nearest = min(files, key=lambda file: abs(len(file.plan.graph.ops) - len(graph.ops)))
    which = f"the plan in {nearest.name} is" if len(files) == 1 else f"none of {len(files)} plans ({nearest.name} is nearest)"
    raise PlanFileError(f"{which} for another graph than this one:\n{difference(nearest.plan.graph, graph)}\n{_ADVICE}")


_ADVICE = (
    "A plan holds for the same model, shapes, device type and compiler, and for a torch that traces the same ops. "
    "Save a plan of this graph, or leave out the option `plan`."
)


def difference(stored: Graph, found: Graph) -> str:
    """Returns the differences of two graphs as lines of text: their sizes, and the first op that differs."""
    graphs, lines = (("stored:", stored), ("here:", found)), list[str]()
    for name, graph in graphs:
        sizes = f"{len(graph.values)} values of {format_bytes(sum(value.bytes for value in graph.values))}"
        lines.append(f"  {name:<8}{len(graph.ops)} ops ({graph.num_forward} in the forward), {sizes}")
    shared = range(min(len(stored.ops), len(found.ops)))
    first = next((i for i in shared if _op_structure(stored, i) != _op_structure(found, i)), len(shared))
    if first == len(stored.ops) == len(found.ops):
        return "\n".join([*lines, "  the ops are the same; the sizes of inputs or the outputs differ"])
    lines.append(f"  the first op that differs is number {first}:")
    for name, graph in graphs:
        text = "(no such op)"
        if first < len(graph.ops):
            op = graph.ops[first]
            made = [f"{v} ({graph.values[v].name}, {format_bytes(graph.values[v].bytes)})" for v in op.outputs]
            text = f"{op.target} reads values {[*op.inputs]}, makes values {made} in the {'for' if op.forward else 'back'}ward"
            text += f" in {op.module or 'the model'} at {op.source}" if op.source else ""
        lines.append(f"    {name:<8}{text}")
    return "\n".join(lines)
