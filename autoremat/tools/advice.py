"""Advice for a step that fits no budget: plans it under remedies and in micro-batches, and says which is cheapest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoremat.basics.advice import Advice, Trial
from autoremat.basics.error_text import binding
from autoremat.basics.errors import AutorematError, BudgetInfeasible, CaptureError, DeviceTooSmall
from autoremat.basics.progress import status_if_slow
from autoremat.basics.units import format_bytes
from autoremat.ops.tensors import tensors_in
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.binding import remedy_for
from autoremat.report.report import Report
from autoremat.tools.remedies import Remedy, applicable, left_bytes, settings_of, with_remedies
from autoremat.tools.size_search import Outcome, SizeSearch, minimum_bytes_of, seconds_of

MOST_TRIALS = 6
"""Maximum number of plans that are tried."""

PLANS_OF_BATCH = 3
"""Number of these that are left for micro-batches."""

Explain = Callable[[Options, Sequence[Any], Mapping[str, Any]], Report]
"""Plans a step under options, with positional and keyword arguments. Raises ``BudgetInfeasible`` if no plan fits."""


def advise(
    explain: Explain, options: Options, args: Sequence[Any], kwargs: Mapping[str, Any], error: BudgetInfeasible
) -> Advice | None:
    """Returns what makes the step fit that ``error`` refuses under ``options``; None if stored plans are to be applied.

    Options that the user has set stay as they are.
    """
    if options.plan:
        return None
    if isinstance(error, DeviceTooSmall):
        needed, total = format_bytes(error.minimum_bytes), format_bytes(error.budget_bytes)
        return Advice((), f"No option and no smaller batch makes it fit: {needed} of {total} are live under every plan.")
    search = _Trials(explain, options, args, kwargs, error)
    search.run()
    return Advice(tuple(search.found), search.otherwise(), tuple(search.failed))


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the batch: the one leading size above 1 of all inputs that require no gradient; 1 if there is not just one."""
    sizes = {tensor.shape[0] for tensor in tensors_in((args, dict(kwargs))) if _is_batched(tensor)}
    return int(sizes.pop()) if len(sizes) == 1 else 1


def _is_batched(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and not tensor.requires_grad and tensor.shape[0] != 1


@dataclass
class _Trials:
    """Plans of one step that was refused, under other settings."""

    explain: Explain
    options: Options
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    error: BudgetInfeasible
    found: list[Trial] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What could not be tried, with the error."""
    least: tuple[Trial, BudgetInfeasible] | None = None
    """The trial that came nearest to its limit of those that do not fit."""

    def run(self) -> None:
        """Tries all remedies together, each by itself if that fits, and micro-batches."""
        joint, batch = applicable(self.options, self.error), batch_of(self.args, self.kwargs)
        refused: Outcome | None = self.error
        if self._can_fit(joint):
            refused = self.outcome(joint)
            if isinstance(refused, Report):
                self._singles(joint, settings_of(joint, refused))
        if batch > 1 and self.options.accumulate is not False and self._can_fit(joint, smaller_batch=True):
            self._micro_batches(batch, joint, refused)

    def _can_fit(self, remedies: Sequence[Remedy], smaller_batch: bool = False) -> bool:
        """Returns True unless bytes that neither remedies nor a smaller batch lower exceed the budget by themselves."""
        is_change = bool(remedies) or smaller_batch
        return is_change and left_bytes(remedies, self.error, smaller_batch) <= self.error.budget_bytes

    def _singles(self, joint: Sequence[Remedy], used: Mapping[str, object]) -> None:
        """Tries each remedy by itself, unless it is all that the plan with ``joint`` has ``used``."""
        for remedy in joint if len(joint) > 1 else ():
            is_known = used.keys() <= remedy.options.keys()
            if not is_known and len(self.found) < MOST_TRIALS - PLANS_OF_BATCH and self._can_fit((remedy,)):
                self.outcome((remedy,))

    def _micro_batches(self, batch: int, joint: Sequence[Remedy], refused: Outcome | None) -> None:
        """Tries micro-batches of one sample, and then the largest that fit by a straight line; with remedies if needed."""
        remedies: Sequence[Remedy] = ()
        smallest, largest = self.outcome((), 1, batch), self.error
        if isinstance(smallest, BudgetInfeasible) and joint and isinstance(refused, BudgetInfeasible):
            remedies, largest = joint, refused
            smallest = self.outcome(joint, 1, batch)
        if not isinstance(smallest, Report):
            return
        line = SizeSearch(lambda size: largest, batch, {1: smallest, batch: largest}, fits=1)
        guess = min(line.on_a_line(), batch - 1)
        for size in [size for size in range(guess, 1, -1) if batch % size == 0]:
            if len(self.found) >= MOST_TRIALS or not isinstance(self.outcome(remedies, size, batch), BudgetInfeasible):
                return

    def outcome(self, remedies: Sequence[Remedy], size: int | None = None, batch: int | None = None) -> Outcome | None:
        """Returns the outcome of one trial, which is noted, as is an error. None if the step cannot be traced or planned so."""
        count = 1 if size is None or batch is None else batch // size
        options, inputs = self._options(remedies, count), (self.args, self.kwargs)
        if size is not None:
            inputs = torch.utils._pytree.tree_map(lambda leaf: _first(leaf, size), (tuple(self.args), dict(self.kwargs)))
        asked = dict(pair for remedy in remedies for pair in remedy.options.items() if pair[1] is not None)
        added: dict[str, object] = {"accumulate": True} if count > 1 else {}
        told = ", ".join([*asked, *([f"micro-batches of {size}"] if count > 1 else [])])
        outcome: Outcome
        try:
            with status_if_slow(f"does not fit; trying {told}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of the step itself were shown, and options may have no effect
                outcome = self.explain(options, *inputs)
        except BudgetInfeasible as error:
            outcome = error
        except AutorematError as error:
            if size is None or not isinstance(error, CaptureError):  # a step may demand its own number of samples
                self.failed.append(f"{told} ({type(error).__name__}: {error})")
            return None
        settings = settings_of(remedies, outcome) if isinstance(outcome, Report) else asked
        self._note(outcome, settings | added, size, count, options)
        return outcome

    def _options(self, remedies: Sequence[Remedy], count: int) -> Options:
        """Returns the options of a trial in ``count`` micro-batches. A share counts as the bytes that it is now."""
        options = with_remedies(self.options, remedies)
        budget = options.memory_budget
        if isinstance(budget, float):
            options = replace(options, memory_budget=self.error.budget_bytes)
        if count == 1:
            return options
        if isinstance(budget, DeviceBudget):
            options = replace(options, memory_budget=replace(budget, accumulate=count * budget.accumulate))
        return replace(options, accumulate=True)

    def _note(self, outcome: Outcome, settings: Mapping[str, object], size: int | None, count: int, options: Options) -> None:
        budget = options.memory_budget
        device = budget if isinstance(budget, DeviceBudget) else None
        limit = outcome.budget_bytes or 0 if device is None else device.total_bytes - device.reserve_bytes
        if isinstance(outcome, Report):
            peak = max(one.predicted_device_bytes or one.peak_bytes for one in (outcome, *outcome.others))
            self.found.append(Trial(settings, peak, limit, count * seconds_of(outcome), size, count))
            return
        excess = minimum_bytes_of(outcome) - outcome.budget_bytes
        trial = Trial(settings, limit + excess, limit, None, size, count)
        self.found.append(trial)
        if self.least is None or trial.peak_bytes < self.least[0].peak_bytes:
            self.least = trial, outcome

    def otherwise(self) -> str:
        """Returns what to do if no trial fits."""
        error = self.error if self.least is None else self.least[1]
        text = "No option and no smaller batch can make it fit"
        if self.least is not None:
            text = f"Nothing tried makes it fit; nearest is {self.least[0].settings}, with {self.least[0].figures}"
        if isinstance(budget := self.options.memory_budget, DeviceBudget):
            text += f"; {format_bytes(budget.total_bytes - error.budget_bytes)} of the device are outside of any plan"
        if not error.parts:
            return f"{text}."
        remedy = remedy_for(error.parts[0][0]) or "a shorter sequence, or a device with more memory"
        return f"{text}. What binds: {binding(error.parts)}. What would help: {remedy}."


def _first(leaf: Any, size: int) -> Any:
    """Returns the first ``size`` samples of an input; whatever is no batched tensor, as it is."""
    return leaf.narrow(0, 0, size) if isinstance(leaf, torch.Tensor) and _is_batched(leaf) else leaf
