"""The calls of a graph that are open at once: as the options tell, or as the pipeline schedule that runs now tells."""

from __future__ import annotations

from autoremat.options.options import Options
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.torch_private.pipelining import Stage, split_backward_refused


def open_calls_of(options: Options, stage: Stage | None, is_bounded: bool) -> OpenCalls:
    """Returns the open calls of a graph in ``stage``. Numbers of the user come before those of the running schedule.

    Raises ``OptionsError`` if ``is_bounded``, for there is a budget, and the schedule splits the backward.
    """
    given = options.open_calls
    if stage is None:
        return given
    if stage.splits_backward and is_bounded:
        raise split_backward_refused(stage.schedule or "the schedule")
    number = given.number if options.in_flight is not None else stage.in_flight or 1
    accumulates = stage.microbatches > 1 if options.accumulate is None else options.accumulate
    kept = max(number, stage.microbatches if stage.keeps_outputs else 0)
    return OpenCalls(number, accumulates, kept, sends_gradients=stage.index > 0 and stage.microbatches > 1)
