"""Torch's private names for symbolic sizes: their hints, their upper limits, and guards on these limits."""

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

from autoremat.basics.errors import CaptureError
from autoremat.torch_private import names

UNKNOWN_SIZE = 4096  # hint of a data-dependent dimension, as in torch's partitioner

_planned: ContextVar[dict[Any, tuple[int, int]]] = ContextVar("planned_sizes", default={})  # noqa: B039  # never written to
"""The range (smallest, largest) of each size symbol that this thread plans for."""

_most: ContextVar[dict[Any, int]] = ContextVar("most_of_expressions")
"""Cache of :func:`most` for the present ranges, by expression."""

POINTS = {1: 65, 2: 9, 3: 5}
"""The number of sample values per size symbol, by the number of symbols in an expression. With more symbols: two, the ends."""
MOST_SIZES = 8
"""The number of size symbols that are sampled per expression. Further symbols take their largest value."""

_hint: Callable[..., int] = names.resolve("torch.fx.experimental.symbolic_shapes:optimization_hint") or names.resolve(
    "torch.fx.experimental.symbolic_shapes:size_hint"  # its name in torch 2.11
)

Result = TypeVar("Result")


def size_hint(size: int | torch.SymInt) -> int:
    """Returns a concrete number for a possibly symbolic size, without adding a guard.

    The number is the value at the largest planned sizes. Without planned sizes, it is torch's hint.
    """
    if isinstance(size, int):
        return size
    known = _at_planned_sizes(size.node.expr)
    return known if known is not None else int(_hint(size, fallback=UNKNOWN_SIZE))


def most(size: int | torch.SymInt) -> int:
    """Returns the largest value of ``size`` over the planned ranges of the input sizes. Without such ranges, :func:`size_hint`.

    The value need not be largest at the largest inputs: the rest of a buffer behind them shrinks as they grow.
    """
    if isinstance(size, int):
        return size
    known = _most_of(size.node.expr)
    return size_hint(size) if known is None else known


def most_of_expression(expression: Any, sizevars: Any) -> int:
    """Returns the same as :func:`most` for one of Inductor's expressions."""
    known = _most_of(expression)
    return known if known is not None else int(sizevars.optimization_hint(expression, fallback=UNKNOWN_SIZE))


def _at_planned_sizes(expression: Any) -> int | None:
    if not _planned.get() or not hasattr(expression, "xreplace"):
        return None
    number = expression.xreplace({symbol: sympy.Integer(limit) for symbol, (_, limit) in _planned.get().items()})
    return int(number) if number.is_number else None


def _most_of(expression: Any) -> int | None:
    """Returns the largest value at sample points of the planned ranges. Both ends of each range are sample points."""
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
            with contextlib.suppress(ArithmeticError, ValueError):  # the expression is undefined at some sizes
                found = max(found, _at(expression, dict(zip(sizes, point, strict=True))))
        known[expression] = found
    return known[expression]


def _at(expression: Any, sizes: Mapping[Any, int]) -> int:
    number = {symbol: sympy.Integer(sizes.get(symbol, limit)) for symbol, (_, limit) in _planned.get().items()}
    return int(expression.xreplace(number))


def _between(least: int, limit: int, count: int) -> list[int]:
    """Returns at most ``count`` evenly spaced integers from ``least`` to ``limit``."""
    if limit <= least:
        return [limit]
    return sorted({least + (limit - least) * step // (count - 1) for step in range(count)})


@contextlib.contextmanager
def planned_for(sizes: Mapping[DynamicSize, int]) -> Iterator[None]:
    """Sets the planned sizes of this thread while active: ``sizes`` gives the largest value of each dynamic size."""
    planned = _planned.set(_planned.get() | {size.symbol: (min(size.least, limit), limit) for size, limit in sizes.items()})
    most_known = _most.set({})
    try:
        yield
    finally:
        _most.reset(most_known)
        _planned.reset(planned)


def carried(work: Callable[[], Result]) -> Callable[[], Result]:
    """Returns ``work`` for execution in another thread, with the planned sizes of this thread."""
    context = Context()  # not a copy of this thread's context: hooks on Inductor stay in this thread
    context.run(_planned.set, _planned.get())
    context.run(_most.set, {})
    return partial(context.run, work)


def planned_identity() -> str:
    """Returns text that changes with the planned sizes."""
    return repr(sorted((str(symbol), *ends) for symbol, ends in _planned.get().items()))


@dataclass(frozen=True, eq=False)
class DynamicSize:
    """A size of the inputs that a compiled graph leaves open."""

    number: torch.SymInt
    symbol: Any
    """The size's sympy symbol, also after tracing has fixed the size and ``number`` has become a constant."""

    @property
    def hint(self) -> int:
        """The size's value in this call."""
        return int(self.number.node.hint)

    @property
    def least(self) -> int:
        """The smallest value that the size can take."""
        lower = self.number.node.shape_env.var_to_range[self.symbol].lower
        return max(int(lower), 0) if lower.is_Integer else 0

    @property
    def most(self) -> int | None:
        """The largest value that the user has declared for the size; None if there is none."""
        upper = self.number.node.shape_env.var_to_range[self.symbol].upper
        return int(upper) if upper.is_Integer else None

    def guard_at_most(self, limit: int) -> None:
        """Adds a guard: Dynamo compiles again for a size above ``limit``."""
        bool(self.number <= limit)  # a comparison of symbolic numbers is a guard


def dynamic_sizes(inputs: Iterable[Any]) -> list[DynamicSize]:
    """Returns the open sizes of the inputs that have a value in this call, each once.

    Raises ``CaptureError`` for nested tensors.
    """
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
                found.setdefault(size.node.expr, DynamicSize(size, size.node.expr))
    return list(found.values())
