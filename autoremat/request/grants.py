"""The bytes that were granted to earlier graphs of a function under a share, which its recompilations may use too.

Dynamo compiles a function again for other sizes, such as those of a smaller last batch, and for other branches. A share of the
new graph alone may be too little, for gradients and parameters do not shrink with a batch. The process has the bytes that the
first graph was granted, so the new one may use them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private.dynamo import until_reset

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


def granted_bytes(function: int | None, share: float, compiler: str, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Returns the bytes that an earlier graph of ``function`` was granted under the same share; 0 if there is none."""
    if function is None:
        return 0
    grants = _grants.get((function, share, compiler), ())
    return max((grant.bytes for grant in grants if grant.concerns(parameters)), default=0)


def note_grant(request: Request, around: Surroundings, budget_bytes: int | None) -> None:
    """Notes the bytes that the present graph is granted, for later graphs of its function."""
    share = request.limits.reference_share
    if share is None or around.function is None or budget_bytes is None:
        return
    place, parameters = (around.function, share, request.options.compiler), around.parameters
    alive = [grant for grant in _grants.get(place, ()) if grant.holds()]
    new = _Grant(budget_bytes, tuple(map(weakref.ref, parameters)), until_reset())
    _grants[place] = [*(grant for grant in alive if not grant.concerns(parameters) or grant.bytes > budget_bytes), new]
