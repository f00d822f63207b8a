"""Torch's private names for pipelines: how many calls of a stage are open at once under a schedule.

Nothing here imports ``torch.distributed.pipelining``. A process that has not imported it runs no pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any

from autoremat.basics.checks import as_int, refused
from autoremat.basics.errors import OptionsError
from autoremat.torch_private.frames import calling

STAGES, SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"

METADATA_INFERENCE = "_forward_metadata_inference"
"""Name of the method by which a stage learns the shapes of its results."""

OPENS, CLOSES, SPLITS = "F", ("B", "W"), ("I", "W")
"""Actions of a schedule: the one that opens a call, those that close it, and those of a backward that runs in two parts."""


def infers_metadata() -> bool:
    """Returns True if a stage runs only to learn the shapes of its results, before the first micro-batch."""
    return STAGES in sys.modules and any(code.co_name == METADATA_INFERENCE for code in calling())


def in_flight(schedule: Any, stage_index: int) -> int:
    """Returns the most calls of a stage that are open at once under ``schedule``, for the option of the same name.

    ``schedule`` is an object of ``torch.distributed.pipelining``, made of stages that are not compiled yet. Compile their
    modules in place afterwards: ``module.compile(backend="autoremat", options={"in_flight": ...})``.

    Raises ``OptionsError`` for an object that is no schedule and for a stage that it does not have. Also raises it for a
    schedule that computes the gradients of inputs and of weights in two backwards, as zero-bubble schedules do.
    """
    schedules = sys.modules.get(SCHEDULES)
    if schedules is None or not isinstance(schedule, schedules._PipelineSchedule):
        raise OptionsError(
            f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining. Accepted: Schedule1F1B, ScheduleGPipe, "
            "ScheduleInterleaved1F1B, ScheduleLoopedBFS, and others whose backward runs in one part"
        )
    if any(kind in SPLITS for _, kind in _actions(schedule)):
        raise OptionsError(
            f"{type(schedule).__name__} computes the gradients of inputs and of weights in two backwards, and a compiled graph "
            "has one. Accepted: Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B and ScheduleLoopedBFS, or stages without "
            "torch.compile"
        )
    index, stages = as_int(stage_index), int(schedule._num_stages)
    if index is None or not 0 <= index < stages:
        raise refused("stage_index", stage_index, f"0 to {stages - 1}, the stages of the schedule")
    return _most_open(schedule, index, schedules)


def _most_open(schedule: Any, stage: int, schedules: ModuleType) -> int:
    """Returns the most calls of ``stage`` that are open at once. Torch runs schedules of a single stage by these formulas."""
    microbatches = int(schedule._n_microbatches)
    if isinstance(schedule, schedules.Schedule1F1B):
        return min(microbatches, int(schedule._num_stages) - stage)
    if isinstance(schedule, schedules._ScheduleForwardOnly):
        return 1
    # Without a list of actions, as in a subclass of a user's own, all calls may be open at once. GPipe's are.
    changes = ((kind == OPENS) - (kind in CLOSES) for of, kind in _actions(schedule) if of == stage)
    return max(accumulate(changes), default=0) or microbatches


def _actions(schedule: Any) -> Iterator[tuple[int, str]]:
    """Yields the actions of ``schedule`` on all ranks, in sequence, each with its stage. Compound actions are taken apart."""
    order = getattr(schedule, "pipeline_order", None)
    for actions in (order or getattr(schedule, "pipeline_order_with_comms", None) or {}).values():
        for action in filter(None, actions):
            for single in action.sub_actions or (action,):
                yield int(single.stage_index), str(single.computation_type.value)
