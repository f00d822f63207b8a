"""The bytes that were granted to earlier graphs of a function under a share, which its recompilations may use too.

Dynamo compiles a function again for other sizes, such as those of a smaller last batch, and for other branches. A share of the
new graph alone may be too little, for gradients and parameters do not shrink with a batch. The process has the bytes that the
first graph was granted, so the new one may use them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoremat.compiler.breaks import until_reset
from autoremat.options.options import Options
from autoremat.torch_private import dynamo

Place = tuple[int, float, str]
"""Dynamo's number of a function, the share and the compiler."""


@dataclass
class _Grant:
    """The most bytes that a graph of a function was granted, and the parameters of that graph."""

    bytes: int
    parameters: tuple[weakref.ref[torch.Tensor], ...]
    holds: Callable[[], bool]
    """Returns False once torch was reset, which drops the graph and gives its function another number."""

    def concerns(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns True if the graph has one of ``parameters``, or if neither has any.

        Code that several models share, such as that of ``nn.Sequential``, is one function to Dynamo.
        """
        known = {id(found) for parameter in self.parameters if (found := parameter()) is not None}
        return self.holds() and (not known.isdisjoint(map(id, parameters)) or not (self.parameters or parameters))


_grants: dict[Place, list[_Grant]] = {}


def with_grant(options: Options, inputs: Iterable[Any]) -> Options:
    """Returns ``options`` with the bytes that an earlier graph of the present function was granted under the same share."""
    place, parameters = _place(options), _parameters(inputs)
    found = [grant.bytes for grant in _grants.get(place, ()) if grant.concerns(parameters)] if place is not None else []
    return dataclasses.replace(options, granted_bytes=max(found)) if found else options


def note_grant(options: Options, inputs: Iterable[Any], budget_bytes: int | None) -> None:
    """Notes the bytes that the present graph is granted, for later graphs of its function."""
    place, parameters = _place(options), _parameters(inputs)
    if place is None or budget_bytes is None:
        return
    alive = [grant for grant in _grants.get(place, ()) if grant.holds()]
    new = _Grant(budget_bytes, tuple(map(weakref.ref, parameters)), until_reset())
    _grants[place] = [*(grant for grant in alive if not grant.concerns(parameters) or grant.bytes > budget_bytes), new]


def _place(options: Options) -> Place | None:
    """Returns the place of the present graph; None unless the budget is a share."""
    function, share = dynamo.number_of_function(), options.memory_budget
    return (function, share, options.compiler) if isinstance(share, float) and function is not None else None


def _parameters(inputs: Iterable[Any]) -> list[torch.Tensor]:
    return [tensor for tensor in inputs if isinstance(tensor, torch.nn.Parameter)]
