"""Budgets under dynamic shapes: plans a graph for sizes up to a limit, so that Dynamo recompiles for larger sizes.

The size of each tensor counts as its maximum over all sizes up to the limits. Most tensors grow with the inputs, but the
remainder of a buffer behind such a tensor shrinks. A plan that fits by this count fits at every such size.

The limit of a size is the next power of two if a plan for it fits the budget. If none fits, the limit is the present size.
Sizes that grow to n times the first one therefore cause about log2 n compilations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoremat.request.limits import Limits
from autoremat.torch_private.symbolic_sizes import DynamicSize, dynamic_sizes

Sizes = Mapping[DynamicSize, int]
"""For each dynamic size, the largest value that a plan holds for."""


def sizes_to_plan_for(inputs: Sequence[Any], limits: Limits) -> tuple[Sizes, ...]:
    """Returns the sizes to try in turn: those up to a power of two, then the present ones. They are empty without a choice.

    A share of the reference peak is one of the peak at the sizes at hand, so that its plan has no largest sizes.
    """
    is_share = limits.reference_share is not None and not limits.granted_bytes
    sizes = dynamic_sizes(inputs) if limits.bounds_memory and not is_share else []
    present = {size: size.hint for size in sizes}
    largest = present if limits.step_share is not None else {size: limit_of(size) for size in sizes}
    return (present,) if largest == present else (largest, present)


def limit_of(size: DynamicSize) -> int:
    """Returns the limit up to which a plan shall hold for this size."""
    power = 1 << max(size.hint - 1, 0).bit_length()
    return power if size.most is None else max(size.hint, min(power, size.most))
