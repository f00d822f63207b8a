"""Batch norms in training: their results do not depend on the running averages, which they read and move.

A second run must neither read the averages, which the step has overwritten by then, nor move them. Torch has such a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
RESULTS = 3
"""Number of results that a second run has: the normalized input, and the mean and deviation of the batch."""


def averages_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the running averages, inputs of the graph, that a second run of the node need not read; none for any other op.

    The types of mean and deviation follow the averages' if the input has another type and there is no weight.
    """
    if node.target is not aten._native_batch_norm_legit_functional.default or len(node.args) != len(ARGUMENTS):
        return ()
    given = dict(zip(ARGUMENTS, node.args, strict=True))
    averages = (given["running_mean"], given["running_var"])
    types = {read.meta["val"].dtype for read in (given["input"], *averages) if isinstance(read, fx.Node)}
    if given["training"] is not True or (len(types) > 1 and given["weight"] is None):
        return ()
    found = tuple(average for average in averages if isinstance(average, fx.Node) and average.op == "placeholder")
    return found if len(found) == len(averages) else ()


def forget_averages(call: fx.Node) -> None:
    """Makes ``call``, a copy of a batch norm, a call that neither reads nor moves the running averages."""
    given: dict[str, Any] = dict(zip(ARGUMENTS, call.args, strict=True))
    call.target = aten._native_batch_norm_legit.no_stats
    call.args = tuple(value for name, value in given.items() if not name.startswith("running"))
    call.meta["val"] = call.meta["val"][:RESULTS]
