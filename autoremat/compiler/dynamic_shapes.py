"""Budgets under dynamic shapes: a graph is planned for sizes up to a limit, and Dynamo compiles again for larger ones.

Each tensor counts with the most bytes that it has at any size up to the limits: most tensors grow with the sizes of the inputs,
and what is left of a buffer behind them shrinks. So a plan that fits by that count fits at every such size. The limit of a size
is the next power of two, if that fits the budget, so that lengths that grow to n times the first cause about log2 n
compilations; else it is the size at hand.
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
    """Call ``compile_graph`` with limits for the sizes that ``inputs`` leave open, and guard them, if the budget is in bytes.

    ``too_much`` says whether an error means that nothing fits the budget.
    """
    sizes = dynamic_sizes(inputs) if options.memory_budget is not None and not isinstance(options.memory_budget, float) else []
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
    """Up to what to plan."""
    power = 1 << max(size.hint - 1, 0).bit_length()
    return power if size.most is None else max(size.hint, min(power, size.most))


def _guarded(compiled: T, limits: dict[DynamicSize, int]) -> T:
    for size, limit in limits.items():
        size.guard_at_most(limit)
    return compiled
