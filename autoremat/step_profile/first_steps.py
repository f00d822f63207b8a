"""Records the first steps of a training loop: one step that traces the graphs, then one that is measured.

The steps are the user's own. A recorded step ends with the backward pass after which no call waits for its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoremat.basics.errors import StepProfileError
from autoremat.compiler.interception import active_interceptor
from autoremat.options.options import Options
from autoremat.planner.multigraph.ledger import Moment
from autoremat.step_profile.meter import meter_of
from autoremat.step_profile.recording import Compiled, Event, Recording
from autoremat.torch_private import autograd
from autoremat.torch_private.untraced import around_backward, untraced, when_dropped

MOST_DISTURBED = 4
"""Number of measured steps that may be thrown away because a graph was compiled within them."""

MOST_PASSES = 64
"""Number of backward passes within which a step is expected to begin without gradients of earlier micro-batches."""


class _Alive:
    """An object that lives as long as the backward of a call may still run."""


class FirstSteps(Recording):
    """The recording of the first steps. ``moments_found`` has the moments of the measured step; None before its end."""

    def __init__(self, options: Options, has_gradients: Callable[[], bool]) -> None:
        super().__init__(options)
        self.has_gradients = has_gradients
        self.moments_found: list[Moment] | None = None
        self.is_traced = False
        """True once a step has run in which the graphs were traced."""
        self.disturbed = self.passes = self.all_passes = 0
        """Numbers of measured steps in which a graph was compiled, and of backward passes in this step and in all."""
        self.waiting: set[int] = set()
        """The calls that wait for their backward."""
        self.in_pass = self.has_ended = self.compiles = False
        self._before_update: RemovableHandle | None = None

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], config: Mapping[str, Any]) -> Compiled:
        """Returns ``gm`` as :meth:`Recording.compile` does. A step in which this happens is measured again."""
        self.compiles = True
        return super().compile(gm, inputs, config)

    def run(self, graph: int, compiled: Compiled, *args: Any) -> Any:
        """Runs one call of a graph, and begins a step with the first one.

        No profiler starts in the call in which another one stops, so such a step is not measured. Dynamo's record of this
        region is open. At its end torch would write into the memory of the first profiler, because the second one runs.
        """
        if active_interceptor() is self and self.moments_found is None:
            # Abandoned are calls that have had no backward, or one that failed, if none can follow.
            none_follows = bool(self.calls) and not self.waiting and autograd.backward_number() is None
            ends = self.has_ended or (none_follows and (self.in_pass or not self.passes))
            was_measured = ends and self.meter is not None
            if ends:
                self.settle()
            if not self.calls and not was_measured:
                self._begin()
        return super().run(graph, compiled, *args)

    def follow(self, call: int, node: Node) -> None:
        """Records the backward of a call, and the end of the pass in which it runs."""
        step, alive = self.events, _Alive()
        self.waiting.add(call)
        when_dropped(alive, self._dropped, step, call)

        def begins(tangents: Any) -> None:
            if self.events is step:
                if not self.in_pass:
                    self.in_pass = True
                    autograd.when_backward_ends(partial(self._pass_ended, step))
                self.begin_backward(call, tangents)

        def ends(*_: Any, alive: _Alive = alive) -> None:
            if self.events is step:
                self.waiting.discard(call)
                self.end_backward(call)

        around_backward(node, begins, ends)

    def settle(self) -> None:
        """Finishes the step that has ended: keeps its moments if it was measured undisturbed.

        Not during a backward, whose end would bring a stopped profiler back.
        """
        if self.moments_found is not None:
            return
        meter, is_complete = self.meter, self.has_ended
        if self._before_update is not None:
            self._before_update.remove()
            self._before_update = None
        if meter is not None:
            with contextlib.nullcontext() if is_complete else contextlib.suppress(RuntimeError):
                meter.__exit__(None, None, None)
            self.disturbed += is_complete and self.compiles
            if is_complete and (not self.compiles or self.disturbed > MOST_DISTURBED):
                self.leave_out_other_devices()
                self.moments_found = self.moments(meter.readings[: len(self.events) + 1])
                return
        self.is_traced = self.is_traced or (is_complete and meter is None)
        self.start(None)
        self.waiting.clear()
        self.passes = 0
        self.in_pass = self.has_ended = self.compiles = False

    def _begin(self) -> None:
        """Begins a step: one that is measured, if all graphs are traced and earlier micro-batches left no gradients."""
        if not self.is_traced or (self.options.accumulate and self.has_gradients() and self.all_passes < MOST_PASSES):
            return
        meter = meter_of(self.device)
        try:
            meter.__enter__()
        except RuntimeError as error:
            raise StepProfileError(
                "the second training step measures the memory around the blocks, which is impossible inside another profiler "
                "or `track_peak`: begin these after two steps, or pass step=... to compile_blocks, which measures at once"
            ) from error
        self.start(meter)
        self._before_update = register_optimizer_step_pre_hook(untraced(self._settle_before_update))

    def _settle_before_update(self, *_: Any) -> None:
        """Stops the measurement before the optimizer's own step, which is no part of it."""
        if self.has_ended and autograd.backward_number() is None:
            self.settle()

    def _pass_ended(self, step: list[Event]) -> None:
        """Ends the recorded step with the pass after which no call waits for its backward."""
        if self.events is not step or self.has_ended:
            return
        self.in_pass = False
        self.passes += 1
        self.all_passes += 1
        self._end_if_complete()

    def _dropped(self, step: list[Event], call: int) -> None:
        """Stops waiting for a backward that cannot run any more."""
        if self.events is step and call in self.waiting:
            self.waiting.discard(call)
            if not self.in_pass:
                self._end_if_complete()

    def _end_if_complete(self) -> None:
        if not self.waiting and self.passes >= (2 if self.options.accumulate else 1):
            self.has_ended = True
            if self.meter is not None:
                self.meter.mark()
