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
from autoremat.torch_private import resolve
from autoremat.torch_private.hooks import held

UNKNOWN_SIZE = 4096
"""The assumed largest value of a size that depends on data and has no upper bound. It is the hint of torch's partitioner."""

UNBOUNDED = 2**62
"""Upper ends of value ranges from here on bound nothing."""

_planned: ContextVar[dict[Any, tuple[int, int]]] = ContextVar("planned_sizes", default={})  # noqa: B039  # never written to
"""The range (smallest, largest) of each size symbol that this thread plans for."""

_most: ContextVar[dict[Any, int]] = ContextVar("most_of_expressions")
"""Cache of :func:`most` for the present ranges, by expression."""

POINTS = {1: 65, 2: 9, 3: 5}
"""The number of sample values per size symbol, by the number of symbols in an expression. With more symbols: two, the ends."""
MOST_SIZES = 8
"""The number of size symbols that are sampled per expression. Further symbols take their largest value."""

_hint: Callable[..., int] = resolve(
    "torch.fx.experimental.symbolic_shapes:optimization_hint",
    "torch.fx.experimental.symbolic_shapes:size_hint",  # its name in torch 2.11
)

Result = TypeVar("Result")


def size_hint(size: int | torch.SymInt) -> int:
    """Returns a concrete number for a possibly symbolic size, without adding a guard.

    The number is the value at the largest planned sizes, and at the upper bounds of sizes that depend on data. Without planned
    sizes, it is torch's hint.
    """
    if isinstance(size, int):
        return size
    expression, shapes = size.node.expr, size.node.shape_env
    known = _value(expression, _ranges(expression, shapes), {})
    return known if known is not None else int(_hint(size, fallback=_fallback(expression, shapes)))


def most(size: int | torch.SymInt) -> int:
    """Returns the largest value of ``size`` over the planned ranges of the input sizes. Without such ranges, :func:`size_hint`.

    The value need not be largest at the largest inputs: the rest of a buffer behind them shrinks as they grow.
    """
    if isinstance(size, int):
        return size
    known = _most_of(size.node.expr, size.node.shape_env)
    return size_hint(size) if known is None else known


def most_of_expression(expression: Any, sizevars: Any) -> int:
    """Returns the same as :func:`most` for one of Inductor's expressions."""
    known = _most_of(expression, sizevars.shape_env)
    if known is not None:
        return known
    return int(sizevars.optimization_hint(expression, fallback=_fallback(expression, sizevars.shape_env)))


Ranges = Mapping[Any, tuple[int, int]]


def _ranges(expression: Any, shapes: Any) -> Ranges:
    planned = _planned.get()
    found = {s: _range_of(s, shapes) for s in _dependent_on_data(expression, shapes) if s not in planned}
    return planned | found if found else planned


def _dependent_on_data(expression: Any, shapes: Any) -> list[Any]:
    symbols = expression.free_symbols if hasattr(expression, "xreplace") else ()
    return sorted((s for s in symbols if s.is_integer and shapes.is_unbacked_symint(s)), key=str)


def _range_of(symbol: Any, shapes: Any) -> tuple[int, int]:
    """Returns the smallest and the largest value of a size that depends on data. The latter is assumed if nothing bounds it."""
    least, bound = _ends_of(symbol, shapes)
    return least, max(least, UNKNOWN_SIZE) if bound is None else bound


def _ends_of(symbol: Any, shapes: Any) -> tuple[int, int | None]:
    """Returns the smallest and the largest value of a size that torch knows; None if nothing bounds the latter."""
    lower, upper = shapes.var_to_range[symbol].lower, shapes.var_to_range[symbol].upper
    bound = int(upper) if upper.is_Integer and upper < UNBOUNDED else None
    return max(int(lower), 0) if lower.is_Integer else 0, bound


def _fallback(expression: Any, shapes: Any) -> int:
    return max((_range_of(symbol, shapes)[1] for symbol in _dependent_on_data(expression, shapes)), default=UNKNOWN_SIZE)


def _value(expression: Any, ranges: Ranges, sizes: Mapping[Any, int]) -> int | None:
    """Returns the value at ``sizes``, and at the largest of all others; None if that is no number."""
    if not ranges or not hasattr(expression, "xreplace"):
        return None
    number = expression.xreplace({symbol: sympy.Integer(sizes.get(symbol, limit)) for symbol, (_, limit) in ranges.items()})
    return int(number) if number.is_number else None


def _most_of(expression: Any, shapes: Any) -> int | None:
    """Returns the largest value at sample points of the ranges. Both ends of each range are sample points."""
    ranges, known = _ranges(expression, shapes), _most.get({})
    if expression not in known:
        found = _value(expression, ranges, {})
        if found is None:
            return None
        sizes = sorted(expression.free_symbols, key=str)[:MOST_SIZES]
        for point in itertools.product(*(_between(*ranges[size], POINTS.get(len(sizes), 2)) for size in sizes)):
            with contextlib.suppress(ArithmeticError, ValueError):  # the expression is undefined at some sizes
                found = max(found, _value(expression, ranges, dict(zip(sizes, point, strict=True))) or 0)
        known[expression] = found
    return known[expression]


def _between(least: int, limit: int, count: int) -> list[int]:
    if limit <= least:
        return [limit]
    return sorted({least + (limit - least) * step // (count - 1) for step in range(count)})


def data_dependent_sizes(values: Iterable[Any]) -> dict[str, int | None]:
    """Returns the sizes of fake ``values`` that depend on data, by name, with their upper bounds; None for no bound."""
    found: dict[str, int | None] = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt):
                shapes = size.node.shape_env
                found |= {str(s): _ends_of(s, shapes)[1] for s in _dependent_on_data(size.node.expr, shapes)}
    return found


def assumed_limits(saved: Iterable[Any]) -> dict[int, int]:
    """Returns the largest assumed values of the symbolic numbers among what a forward saves, by their place among these.

    Only numbers count that depend on a size without an upper bound.
    """
    numbers = [one for one in saved if isinstance(one, torch.SymInt)]
    return {place: most(one) for place, one in enumerate(numbers) if None in data_dependent_sizes([one]).values()}


@contextlib.contextmanager
def planned_for(sizes: Mapping[DynamicSize, int]) -> Iterator[None]:
    """Sets the planned sizes of this thread while active: ``sizes`` gives the largest value of each dynamic size."""
    planned = {size.symbol: (min(size.least, limit), limit) for size, limit in sizes.items()}
    with held(_planned, _planned.get() | planned), held(_most, {}):
        yield


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
        return _ends_of(self.symbol, self.number.node.shape_env)[0]

    @property
    def most(self) -> int | None:
        """The largest value that the user has declared for the size; None if there is none."""
        return _ends_of(self.symbol, self.number.node.shape_env)[1]

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
