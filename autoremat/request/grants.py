"""The bytes that were granted to earlier graphs of a function under a share, which its recompilations may use too.

Dynamo compiles a function again for other sizes, such as those of a smaller last batch, and for other branches. A share of the
new graph alone may be too little, for gradients and parameters do not shrink with a batch. The process has the bytes that the
first graph was granted, so the new one may use them. Code that several models share, such as that of ``nn.Sequential``, is one
function to Dynamo, so a grant belongs to parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private.dynamo import until_reset

Place = tuple[int | None, float, str]
"""Dynamo's number of a function, the share and the compiler."""
Grants = dict[Place, tuple[int, Callable[[], bool]]]
"""The most bytes granted, valid until a reset of torch, which drops the graph and gives its function another number."""

_of_parameter = WeakTensorKeyDictionary()
_without_parameters: Grants = {}


def _all_of(parameters: Sequence[torch.nn.Parameter]) -> list[Grants]:
    for parameter in parameters:
        if parameter not in _of_parameter:
            _of_parameter[parameter] = {}
    return [_of_parameter[parameter] for parameter in parameters] or [_without_parameters]


def granted_bytes(function: int | None, share: float, compiler: str, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Returns the bytes that an earlier graph of ``function`` was granted under the same share; 0 if there is none."""
    found = [grants.get((function, share, compiler)) for grants in _all_of(parameters)]
    return max((grant[0] for grant in found if grant is not None and grant[1]()), default=0)


def note_grant(request: Request, around: Surroundings, budget_bytes: int | None) -> None:
    """Notes the bytes that the present graph is granted, for later graphs of its function."""
    share, compiler = request.limits.reference_share, request.options.compiler
    if share is None or around.function is None or budget_bytes is None:
        return
    most = max(budget_bytes, granted_bytes(around.function, share, compiler, around.parameters))
    grant = most, until_reset()
    for grants in _all_of(around.parameters):
        grants[around.function, share, compiler] = grant
