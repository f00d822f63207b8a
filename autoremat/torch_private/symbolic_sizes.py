"""Torch's private names for symbolic sizes: what they are hinted as, how large they may become, and guards that say so."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import sympy
import torch
from torch.fx.experimental import symbolic_shapes

from autoremat.basics.errors import CaptureError

UNKNOWN_SIZE = 4096  # for a data-dependent dimension, as in torch's partitioner

_planned: ContextVar[dict[Any, tuple[int, int]]] = ContextVar("planned_sizes", default={})  # noqa: B039  # never written to
"""The least and the most of the sizes that this thread plans for, by symbol."""

_most: ContextVar[dict[Any, int]] = ContextVar("most_of_expressions")
"""What :func:`most` has found for expressions of these."""

POINTS = {1: 65, 2: 9, 3: 5}
"""By how many sizes an expression has: at how many values of each it is looked at. Of more sizes, at both ends."""
MOST_SIZES = 8
"""Of expressions of more sizes the rest are looked at as large as they may be."""

Result = TypeVar("Result")


def size_hint(size: int | torch.SymInt) -> int:
    """A concrete number for a possibly symbolic one, without a guard: at the sizes that are planned for, else at the hints."""
    if isinstance(size, int):
        return size
    known = _at_planned_sizes(size.node.expr)
    hint = vars(symbolic_shapes).get("optimization_hint") or vars(symbolic_shapes)["size_hint"]  # its name in 2.11
    return known if known is not None else int(hint(size, fallback=UNKNOWN_SIZE))


def most(size: int | torch.SymInt) -> int:
    """The largest that ``size`` becomes while the inputs' sizes are at most those that are planned for: what is left of a
    buffer behind them shrinks as they grow. Without such sizes, :func:`size_hint`."""
    if isinstance(size, int):
        return size
    known = _most_of(size.node.expr)
    return size_hint(size) if known is None else known


def most_of_expression(expression: Any, sizevars: Any) -> int:
    """As :func:`most`, for an expression of Inductor's."""
    known = _most_of(expression)
    return known if known is not None else int(sizevars.optimization_hint(expression, fallback=UNKNOWN_SIZE))


def _at_planned_sizes(expression: Any) -> int | None:
    if not _planned.get() or not hasattr(expression, "xreplace"):
        return None
    number = expression.xreplace({symbol: sympy.Integer(limit) for symbol, (_, limit) in _planned.get().items()})
    return int(number) if number.is_number else None


def _most_of(expression: Any) -> int | None:
    """The largest value at some points between the least and the most of each size, both ends among them."""
    planned = _planned.get()
    if not planned or not hasattr(expression, "xreplace"):
        return None
    known = _most.get()
    if expression not in known:
        found = _at_planned_sizes(expression)
        if found is None:
            return None
        sizes = sorted(expression.free_symbols, key=str)[:MOST_SIZES]
        for point in itertools.product(*(_between(*planned[size], POINTS.get(len(sizes), 2)) for size in sizes)):
            with contextlib.suppress(ArithmeticError, ValueError):  # of sizes at which nothing is defined
                found = max(found, _at(expression, dict(zip(sizes, point, strict=True))))
        known[expression] = found
    return known[expression]


def _at(expression: Any, sizes: Mapping[Any, int]) -> int:
    number = {symbol: sympy.Integer(sizes.get(symbol, limit)) for symbol, (_, limit) in _planned.get().items()}
    return int(expression.xreplace(number))


def _between(least: int, limit: int, count: int) -> list[int]:
    """At most ``count`` numbers from ``least`` to ``limit``, evenly spaced."""
    if limit <= least:
        return [limit]
    return sorted({least + (limit - least) * step // (count - 1) for step in range(count)})


@contextlib.contextmanager
def planned_for(sizes: Mapping[DynamicSize, int]) -> Iterator[None]:
    """Inside, symbolic sizes are hinted as if the inputs had these."""
    planned = _planned.set(_planned.get() | {size.symbol: (min(size.least, limit), limit) for size, limit in sizes.items()})
    most_known = _most.set({})
    try:
        yield
    finally:
        _most.reset(most_known)
        _planned.reset(planned)


def carried(work: Callable[[], Result]) -> Callable[[], Result]:
    """``work`` for another thread, which then plans for the sizes of this one."""
    context = Context()  # not a copy of this thread's: hooks on Inductor are to stay here
    context.run(_planned.set, _planned.get())
    context.run(_most.set, {})
    return partial(context.run, work)


def planned_identity() -> str:
    """Text that changes with the sizes that are planned for."""
    return repr(sorted((str(symbol), *ends) for symbol, ends in _planned.get().items()))


@dataclass(frozen=True, eq=False)
class DynamicSize:
    """A size of the inputs that a compiled graph leaves open."""

    number: torch.SymInt

    @property
    def symbol(self) -> Any:
        """What it is called."""
        return self.number.node.expr

    @property
    def hint(self) -> int:
        """Its value in this call."""
        return int(self.number.node.hint)

    @property
    def least(self) -> int:
        """The least that it may be."""
        lower = self.number.node.shape_env.var_to_range[self.symbol].lower
        return max(int(lower), 0) if lower.is_Integer else 0

    @property
    def most(self) -> int | None:
        """The most that the user has said it to be; None if that is not known."""
        upper = self.number.node.shape_env.var_to_range[self.symbol].upper
        return int(upper) if upper.is_Integer else None

    def guard_at_most(self, limit: int) -> None:
        """Have Dynamo compile again for what is larger."""
        bool(self.number <= limit)  # a comparison of symbolic numbers is a guard


def dynamic_sizes(inputs: Iterable[Any]) -> list[DynamicSize]:
    """The open sizes of the inputs, each once, that have a value in this call. Raises ``CaptureError`` for nested tensors."""
    found: dict[Any, DynamicSize] = {}
    for value in inputs:
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.is_nested_int():
                raise CaptureError(
                    "a nested tensor's rows may have any length, so no plan keeps a memory budget in bytes for all of them. "
                    "Give a share, such as 0.7, which is planned for the lengths at hand, or pad the rows"
                )
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                found.setdefault(size.node.expr, DynamicSize(size))
    return list(found.values())
