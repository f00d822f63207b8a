"""``autoremat.in_flight``: the number of calls of a pipeline stage that are open at once."""

from __future__ import annotations

from typing import Any

from autoremat.torch_private.pipelining import calls_in_flight


def in_flight(schedule: Any, stage_index: int) -> int:
    """Returns the most calls of a stage that are open at once under ``schedule``, for the option of the same name.

    ``schedule`` is an object of ``torch.distributed.pipelining``, made of stages that are not compiled yet. Compile their
    modules in place afterwards: ``module.compile(backend="autoremat", options={"in_flight": ...})``.

    Raises ``OptionsError`` for an object that is no schedule and for a stage that it does not have. Also raises it for a
    schedule that computes the gradients of inputs and of weights in two backwards, as zero-bubble schedules do.
    """
    return calls_in_flight(schedule, stage_index)
