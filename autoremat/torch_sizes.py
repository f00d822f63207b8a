"""Torch's private names for symbolic sizes: what they are hinted as, how large they may become, and guards that say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental import symbolic_shapes

UNKNOWN_SIZE = 4096  # for a data-dependent dimension, as in torch's partitioner

_planned: ContextVar[dict[Any, Any]] = ContextVar("autoremat_planned_sizes", default={})  # noqa: B039  # never written to
"""The sizes that this thread plans for, by symbol."""


def size_hint(size: int | torch.SymInt) -> int:
    """A concrete number for a possibly symbolic one, without a guard: at the sizes that are planned for, else at the hints."""
    if isinstance(size, int):
        return size
    known = _at_planned_sizes(size.node.expr)
    hint = vars(symbolic_shapes).get("optimization_hint") or vars(symbolic_shapes)["size_hint"]  # its name in 2.11
    return known if known is not None else int(hint(size, fallback=UNKNOWN_SIZE))


def expression_hint(expression: Any, sizevars: Any) -> int:
    """As :func:`size_hint`, for an expression of Inductor's."""
    known = _at_planned_sizes(expression)
    return known if known is not None else int(sizevars.optimization_hint(expression, fallback=UNKNOWN_SIZE))


def _at_planned_sizes(expression: Any) -> int | None:
    if not _planned.get() or not hasattr(expression, "xreplace"):
        return None
    number = expression.xreplace(_planned.get())
    return int(number) if number.is_number else None


@contextlib.contextmanager
def planned_for(sizes: Mapping[DynamicSize, int]) -> Iterator[None]:
    """Inside, symbolic sizes are hinted as if the inputs had these."""
    token = _planned.set(_planned.get() | {size.symbol: sympy.Integer(limit) for size, limit in sizes.items()})
    try:
        yield
    finally:
        _planned.reset(token)


def planned_identity() -> str:
    """Text that changes with the sizes that are planned for."""
    return repr(sorted((str(symbol), int(limit)) for symbol, limit in _planned.get().items()))


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
    def most(self) -> int | None:
        """The most that the user has said it to be; None if that is not known."""
        upper = self.number.node.shape_env.var_to_range[self.symbol].upper
        return int(upper) if upper.is_Integer else None

    def guard_at_most(self, limit: int) -> None:
        """Have Dynamo compile again for what is larger."""
        bool(self.number <= limit)  # a comparison of symbolic numbers is a guard


def dynamic_sizes(inputs: Iterable[Any]) -> list[DynamicSize]:
    """The open sizes of the inputs, each once, that have a value in this call."""
    found: dict[Any, DynamicSize] = {}
    for value in inputs:
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                found.setdefault(size.node.expr, DynamicSize(size))
    return list(found.values())
