"""Budgets under dynamic shapes: plans a graph for sizes up to a limit, so that Dynamo recompiles for larger sizes.

The size of each tensor counts as its maximum over all sizes up to the limits. Most tensors grow with the inputs, but the
remainder of a buffer behind such a tensor shrinks. A plan that fits by this count fits at every such size.

The limit of a size is the next power of two if a plan for it fits the budget. If none fits, the limit is the present size.
Sizes that grow to n times the first one therefore cause about log2 n compilations.

Sizes that depend on data count at their upper bounds. Where nothing bounds one, a value is assumed, and each call is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoremat.basics.units import format_bytes
from autoremat.report.report import Report
from autoremat.request.request import RequestedLimits
from autoremat.torch_private.symbolic_sizes import UNKNOWN_SIZE, DynamicSize, data_dependent_sizes, dynamic_sizes
from autoremat.torch_private.tensors import tensors_in

Sizes = Mapping[DynamicSize, int]
"""For each dynamic size, the largest value that a plan holds for."""


def sizes_to_plan_for(inputs: Sequence[Any], limits: RequestedLimits) -> tuple[Sizes, ...]:
    """Returns the sizes to try in turn: those up to a power of two, then the present ones. They are empty without a choice.

    A share of the reference peak is one of the peak at the sizes at hand, so that its plan has no largest sizes.
    """
    is_share = limits.reference_share is not None and not limits.granted_bytes
    sizes = dynamic_sizes(inputs) if limits.bounds_peak and not is_share else []
    present = {size: size.hint for size in sizes}
    largest = present if limits.step_share is not None else {size: limit_of(size) for size in sizes}
    return (present,) if largest == present else (largest, present)


def limit_of(size: DynamicSize) -> int:
    """Returns the limit up to which a plan shall hold for this size."""
    power = 1 << max(size.hint - 1, 0).bit_length()
    return power if size.most is None else max(size.hint, min(power, size.most))


def note_on_sizes(graph: fx.Graph) -> str:
    """Returns a note on what the plan of a traced graph assumes of sizes that depend on data; empty without such sizes."""
    values = [node.meta.get("val") for node in graph.nodes]
    numbers = [value for value in values if isinstance(value, torch.SymInt)]
    bounds = data_dependent_sizes([*tensors_in(values), *numbers])
    if not bounds:
        return ""
    if None in bounds.values():
        free = list(bounds.values()).count(None)
        return (
            f"sizes that depend on data, {free} of them without a bound, are assumed to be "
            f"at most {UNKNOWN_SIZE}: state a bound in the function, torch._check(size <= ...)"
        )
    most = max(bound or 0 for bound in bounds.values())
    return (
        f"sizes that depend on data count at their upper bounds, up to {most}: torch._check(size <= ...) in the function "
        "states a lower one"
    )


def of_larger_size(report: Report, numbers: Sequence[int]) -> str:
    """Returns the text on the first of the ``numbers`` that a call saved that is larger than the plan assumes; "" without."""
    found = next(((numbers[at], most) for at, most in report.assumed_sizes if numbers[at] > most), None)
    if found is None or report.budget_bytes is None:
        return ""
    return (
        f"a size that depends on data is {found[0]} in this step, and the plan assumes at most {found[1]}, because nothing "
        f"bounds it: the budget of {format_bytes(report.budget_bytes)} may not hold. State the bound in the function that is "
        f"compiled, torch._check(size <= {found[0]}) or more, and it is planned for"
    )
