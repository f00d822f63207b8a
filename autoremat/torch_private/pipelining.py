"""Torch's private names for pipelines: the stage whose forward runs now, and how many of its calls are open at once.

Nothing here imports ``torch.distributed.pipelining``. A process that has not imported it runs no pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from torch import distributed

from autoremat.basics.checks import as_int, refused
from autoremat.basics.errors import OptionsError
from autoremat.torch_private import names

STAGES, SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"

METADATA_INFERENCE = "_forward_metadata_inference"
"""Name of the method by which a stage learns the shapes of its results."""

OPENS, CLOSES, SPLITS = "F", ("B", "W"), ("I", "W")
"""Actions of a schedule: the one that opens a call, those that close it, and those of a backward that runs in two parts."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, and the place of its calls in the schedule."""

    index: int
    group_ranks: tuple[int, ...]
    """Global ranks of the pipeline's process group."""
    in_flight: int | None
    """Most calls of the stage that are open at once. None if no schedule runs it, or if the schedule splits its backward."""
    schedule: str | None = None
    """Class name of the schedule; None if no schedule runs the stage."""
    splits_backward: bool = False
    """True if the schedule computes the gradients of inputs and of weights in two backwards, as zero-bubble schedules do."""
    microbatches: int = 1
    """Micro-batches of a step."""
    keeps_outputs: bool = False
    """True if the stage holds the outputs of all micro-batches to the end of the step: the last stage, unless
    ``return_outputs=False``."""


def running_stage() -> Stage | None:
    """Returns the stage whose forward or backward is running in this thread; None outside of a pipeline.

    The stage and its schedule are found on the call stack.
    """
    stages, schedules = sys.modules.get(STAGES), sys.modules.get(SCHEDULES)
    if stages is None or schedules is None:
        return None
    stage: Any = None
    schedule: Any = None
    returns_outputs = True
    for variables in _variables_of_methods(sys._getframe(1)):
        owner = variables.get("self")
        if stage is None and isinstance(owner, stages._PipelineStageBase):
            stage = owner
        elif stage is not None and isinstance(owner, schedules._PipelineSchedule) and schedule in (None, owner):
            schedule = owner
            returns_outputs = returns_outputs and bool(variables.get("return_outputs", True))
    return None if stage is None else _stage_of(stage, schedule, schedules, returns_outputs)


def infers_metadata() -> bool:
    """Returns True if a stage runs only to learn the shapes of its results, before the first micro-batch."""
    if STAGES not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == METADATA_INFERENCE:
            return True
        frame = frame.f_back
    return False


def _variables_of_methods(frame: FrameType | None) -> Iterator[Mapping[str, object]]:
    """Yields the local variables of each method on the call stack, the innermost first."""
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            yield frame.f_locals
        frame = frame.f_back


def _stage_of(stage: Any, schedule: Any, schedules: ModuleType, returns_outputs: bool) -> Stage:
    splits = schedule is not None and splits_backward(schedule)
    return Stage(
        index=int(stage.stage_index),
        group_ranks=tuple(distributed.get_process_group_ranks(stage.group or distributed.group.WORLD)),
        in_flight=None if schedule is None or splits else _most_open(schedule, int(stage.stage_index), schedules),
        schedule=None if schedule is None else type(schedule).__name__,
        splits_backward=splits,
        microbatches=1 if schedule is None else int(schedule._n_microbatches),
        keeps_outputs=schedule is not None and bool(stage.is_last) and returns_outputs,
    )


def splits_backward(schedule: Any) -> bool:
    """Returns True if ``schedule`` runs the backward of a call in two parts, for inputs and for weights."""
    return any(kind in SPLITS for _, kind in _actions(schedule))


def calls_in_flight(schedule: Any, stage_index: int) -> int:
    """Returns the most calls of a stage that are open at once under ``schedule``, an object of torch's pipelining.

    Raises ``OptionsError`` for an object that is no schedule, a stage that it does not run, and a schedule that splits the
    backward.
    """
    schedules = sys.modules.get(SCHEDULES)
    if schedules is None or not isinstance(schedule, schedules._PipelineSchedule):
        raise OptionsError(
            f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining. Accepted: Schedule1F1B, ScheduleGPipe, "
            "ScheduleInterleaved1F1B, ScheduleLoopedBFS, and others whose backward runs in one part"
        )
    if splits_backward(schedule):
        raise split_backward_refused(type(schedule).__name__)
    index, stages = as_int(stage_index), int(schedule._num_stages)
    if index is None or not 0 <= index < stages:
        raise refused("stage_index", stage_index, f"0 to {stages - 1}, the stages of the schedule")
    return _most_open(schedule, index, schedules)


def split_backward_refused(schedule: str) -> OptionsError:
    """Returns the error for a schedule that splits the backward."""
    return OptionsError(
        f"{schedule} computes the gradients of inputs and of weights in two backwards, and a compiled graph has one backward. "
        "Accepted: Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B and ScheduleLoopedBFS, or stages without torch.compile"
    )


def _most_open(schedule: Any, stage: int, schedules: ModuleType) -> int:
    """Returns the most calls of ``stage`` that are open at once. Torch runs schedules of a single stage by these formulas."""
    microbatches = int(schedule._n_microbatches)
    if isinstance(schedule, schedules.Schedule1F1B):
        return min(microbatches, int(schedule._num_stages) - stage)
    if isinstance(schedule, schedules._ScheduleForwardOnly):
        return 1
    # Without a list of actions, as in a subclass of a user's own, all calls may be open at once. GPipe's are.
    return _most_open_by(kind for of, kind in _actions(schedule) if of == stage) or microbatches


def _most_open_by(kinds: Iterable[str]) -> int:
    """Returns the largest number of calls that are open at once during the actions of a stage."""
    number = most = 0
    for kind in kinds:
        number += (kind == OPENS) - (kind in CLOSES)
        most = max(most, number)
    return most


def _actions(schedule: Any) -> Iterator[tuple[int, str]]:
    """Yields the actions of ``schedule`` on all ranks, in sequence, each with its stage. Compound actions are taken apart."""
    order = names.read(schedule, "torch.distributed.pipelining.schedules:PipelineScheduleMulti.pipeline_order")
    with_sends = "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime.pipeline_order_with_comms"
    for actions in (order or names.read(schedule, with_sends) or {}).values():
        for action in filter(None, actions):
            for single in action.sub_actions or (action,):
                yield int(single.stage_index), str(single.computation_type.value)
