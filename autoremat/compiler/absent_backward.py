"""Warns of a memory budget for a graph without a backward, on which it has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autoremat.basics.errors import OptionWarning
from autoremat.basics.warn import warn_user
from autoremat.capture import source_info
from autoremat.options.options import Options
from autoremat.request.budgets import is_profile
from autoremat.torch_private import dynamo, frames, split_graphs

_trained: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters of graphs with a backward. Further graphs that read one, and have no backward, serve for evaluation."""


def warn_without_backward(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, is_explicit: bool) -> None:
    """Warns with ``OptionWarning`` if the budget has no effect on a graph that Dynamo captured.

    ``is_explicit`` is True if ``torch.compile`` got the budget itself, and no default of the process.
    """
    read = [tensor for tensor in inputs if isinstance(tensor, torch.nn.Parameter)]
    if dynamo.requires_gradient(gm):
        _trained.update(dict.fromkeys(read, True))
        return
    if options.memory_budget is None or is_profile(options):
        return
    reason = _reason(gm, is_explicit and not any(tensor in _trained for tensor in read))
    if reason:
        place = source_info.begin_of(gm.graph)
        warn_user(f"memory_budget has no effect on {place}: {reason}", OptionWarning)


def _reason(gm: fx.GraphModule, is_meant_to_train: bool) -> str:
    """Returns the reason why the graph has no backward; empty for evaluation, and for a part of a function."""
    if dynamo.computes_gradients(gm):
        return (
            "it computes gradients itself, by torch.func.grad, vjp or torch.autograd.grad, so torch hands over forward and "
            "backward as one graph, which keeps what it needs. Return a loss, of gradients or not, and call backward() on it"
        )
    is_broken = bool(frames.reasons.behind()) or dynamo.graph_break_around(gm) is not None or split_graphs.is_split()
    if not torch.is_grad_enabled() or is_broken or not is_meant_to_train:
        return ""
    return (
        "it has no backward, because no parameter or input requires a gradient, or nothing is returned that depends on one. "
        "Let one require a gradient, or evaluate under torch.no_grad()"
    )
