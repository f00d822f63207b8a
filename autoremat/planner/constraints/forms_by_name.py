"""Restricts values to the forms that constraints and policies name for them, and warns of those that cannot have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_of_constraint as warn
from autoremat.planner.graph.forms import DEVICE
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Value
from autoremat.planner.settings import SETTINGS

SHOWN = 3
"""Number of values that a warning names."""


def with_forms_by_name(graph: Graph, named: Mapping[int, str]) -> tuple[Graph, frozenset[int]]:
    """Returns ``graph``, whose values have only the forms ``named`` for them, and the values that have these.

    A value that cannot have its form stays on the device. A ``ConstraintWarning`` names those that the backward reads.
    """
    if not named:
        return graph, frozenset()
    values, bound, refused = list(graph.values), set[int](), dict[str, list[str]]()
    again = {v for op in graph.ops if op.constraint is Constraint.RECOMPUTE for v in op.outputs}
    for number, name in named.items():
        value = values[number]
        forms = tuple(form for form in value.forms if form.name == name)
        values[number] = replace(value, forms=forms)
        if forms:
            bound.add(number)
        elif name != DEVICE and number in graph.backward_needs - again:
            refused.setdefault(name, []).append(f"{value.name} ({_why_not(graph, number, value)})")
    for name, texts in refused.items():
        more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        warn(f"save: {len(texts)} of the named tensors cannot be kept in the form {name!r} and stay on the device: "
             f"{'; '.join(texts[:SHOWN])}{more}")  # fmt: skip
    return replace(graph, values=tuple(values)), frozenset(bound)


def _why_not(graph: Graph, number: int, value: Value) -> str:
    """Returns the reason why a value cannot have the form that is named for it."""
    if number in graph.forward_outputs:
        return "the caller holds it"
    if value.forms:
        return f"it can only have the forms {[form.name for form in value.forms]}"
    if value.bytes < SETTINGS.forms.minimum_bytes:
        return f"it has {format_bytes(value.bytes)}, and the least is {format_bytes(SETTINGS.forms.minimum_bytes)}"
    return "it has no other form on this device, something writes to it, or it is no dense tensor of its own"
