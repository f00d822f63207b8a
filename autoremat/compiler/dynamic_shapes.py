"""Budgets under dynamic shapes: plans a graph for sizes up to a limit, so that Dynamo recompiles for larger sizes.

The size of each tensor counts as its maximum over all sizes up to the limits. Most tensors grow with the inputs, but the
remainder of a buffer behind such a tensor shrinks. A plan that fits by this count fits at every such size.

The limit of a size is the next power of two if a plan for it fits the budget. If none fits, the limit is the present size.
Sizes that grow to n times the first one therefore cause about log2 n compilations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from autoremat.options.options import Options
from autoremat.planner.multigraph.ledger import Share
from autoremat.torch_private.symbolic_sizes import DynamicSize, dynamic_sizes, planned_for

T = TypeVar("T")


def with_limits(
    compile_graph: Callable[[Options], T], inputs: Sequence[Any], options: Options, too_much: Callable[[Exception], bool]
) -> T:
    """Returns the result of ``compile_graph``, with limits for the dynamic sizes of ``inputs`` if the budget is in bytes.

    Guards the limits in Dynamo. ``too_much`` returns True for an error that means that no plan fits the budget.
    """
    is_share = isinstance(options.memory_budget, float) and options.granted_bytes is None
    sizes = dynamic_sizes(inputs) if options.memory_budget is not None and not is_share else []
    if not sizes:
        return compile_graph(options)
    hints = {size: size.hint for size in sizes}
    limits = hints if isinstance(options.memory_budget, Share) else {size: limit_of(size) for size in sizes}
    if limits != hints:
        try:
            with planned_for(limits):
                return _guarded(compile_graph(replace(options, on_infeasible="raise")), limits)
        except Exception as error:
            if not too_much(error):
                raise
    with planned_for(hints):
        return _guarded(compile_graph(options), hints)


def limit_of(size: DynamicSize) -> int:
    """Returns the limit up to which a plan shall hold for this size."""
    power = 1 << max(size.hint - 1, 0).bit_length()
    return power if size.most is None else max(size.hint, min(power, size.most))


def _guarded(compiled: T, limits: dict[DynamicSize, int]) -> T:
    """Guards the limits of the sizes and returns ``compiled``."""
    for size, limit in limits.items():
        size.guard_at_most(limit)
    return compiled
