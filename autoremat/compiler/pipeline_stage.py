"""Resolves the number of calls in flight before a graph is planned: from the options, or from the schedule that runs now."""

from __future__ import annotations

import warnings
from dataclasses import replace

from autoremat.basics.errors import OptionWarning
from autoremat.options.options import Options
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.torch_private.pipelining import Stage, running_stage, split_backward_refused


def with_open_calls(options: Options) -> Options:
    """Returns ``options`` with the open calls of the graph that is compiled now in ``in_flight``.

    The cache key and the plan then use the same number. Numbers of the user come before those of the running schedule. Raises
    ``OptionsError`` if there is a budget and the schedule splits the backward.
    """
    if isinstance(options.memory_budget, Share | StepProfile):
        if options.in_flight is not None or options.accumulate is not None:
            warnings.warn(
                "in_flight and accumulate have no effect under a profiled step, whose profile counts open calls and gradients "
                "itself",
                OptionWarning,
                stacklevel=1,
            )
        return replace(options, in_flight=None, accumulate=None)
    stage = running_stage()
    if stage is not None and stage.splits_backward and options.memory_budget is not None:
        raise split_backward_refused(stage.schedule or "the schedule")
    calls = options.open_calls if stage is None else _calls_of(stage, options)
    return replace(options, in_flight=None if calls == OpenCalls() else calls, accumulate=None)


def _calls_of(stage: Stage, options: Options) -> OpenCalls:
    """Returns the open calls of a stage, as far as the options leave them open."""
    given = options.open_calls
    number = given.number if options.in_flight is not None else stage.in_flight or 1
    accumulates = stage.microbatches > 1 if options.accumulate is None else options.accumulate
    kept = max(number, stage.microbatches if stage.keeps_outputs else 0)
    return OpenCalls(number, accumulates, kept, sends_gradients=stage.index > 0 and stage.microbatches > 1)
