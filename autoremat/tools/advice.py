"""Advice for a step that fits no budget: plans it under remedies and in micro-batches, for as long as its own plan took."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoremat.basics.errors import AutorematError, BudgetInfeasible, DeviceTooSmall, binding
from autoremat.basics.progress import status_if_slow
from autoremat.basics.units import bytes_apart, format_seconds
from autoremat.compiler.planning import NUMBERS_OF_CHUNKS
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.peak_snapshot import TensorCategory, remedy_for
from autoremat.report.report import Report
from autoremat.torch_private.tensors import tensors_in

LEAST_SECONDS, MOST_TRIALS = 5.0, 4  # that advice may take after a plan of fewer; plans that it tries

GRADIENTS = TensorCategory.GRADIENT.value
GIVEN = frozenset({GRADIENTS, TensorCategory.TANGENT.value, TensorCategory.RESIDENT.value})
"""Kinds of bytes that no option and no smaller batch lowers."""


@dataclass(frozen=True)
class Trial:
    """A plan of the same step under further ``options``, or in ``micro_batches`` of ``batch`` samples."""

    options: Mapping[str, object]
    peak_bytes: int  # or the minimum peak found, of the bytes that the budget or the device bounds
    limit_bytes: int
    seconds: float | None  # predicted, of the whole batch; None if no plan fits
    batch: int
    micro_batches: int

    def __str__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self.options.items()]
        settings += [f"{self.micro_batches} micro-batches of {self.batch}"] if self.micro_batches > 1 else []
        peak = " of ".join(bytes_apart(self.peak_bytes, self.limit_bytes))
        speed = "" if self.seconds is None else f", predicted {format_seconds(self.seconds)} per step"
        return f"{', '.join(settings) or 'the same options'}: {peak}{speed}"


@dataclass(frozen=True)
class Advice:
    """What to do about a step that does not fit, as a sentence: the fastest of ``trials``, or ``otherwise``."""

    trials: tuple[Trial, ...]
    otherwise: str

    @property
    def best(self) -> Trial | None:
        fitting = [one for one in self.trials if one.seconds is not None]
        return min(fitting, key=lambda one: (one.seconds or 0.0, one.micro_batches), default=None)

    def __str__(self) -> str:
        return self.otherwise if self.best is None else f"It fits with {self.best}."


def advise(
    explain: Callable[..., Report], options: Options, args: Any, kwargs: Any, error: BudgetInfeasible, seconds: float
) -> Advice | None:
    """Returns what makes the step fit that ``error`` refuses after ``seconds``; None if stored plans are to be applied."""
    if options.plan:
        return None
    found: list[Trial] = []
    sizes = {leaf.shape[0] for leaf in tensors_in((args, dict(kwargs))) if leaf.dim() and not leaf.requires_grad} - {1}
    deadline, batch = time.perf_counter() + max(seconds, LEAST_SECONDS), sizes.pop() if len(sizes) == 1 else 1
    for remedies, size in _settings(options, error, batch, found):
        begin, count = time.perf_counter(), batch // size
        trying = _options(options, error, remedies, count, max(1.0, (deadline - begin) / 2))
        cut = lambda leaf, n=size: leaf[:n] if leaf.dim() and n < len(leaf) == batch and not leaf.requires_grad else leaf  # noqa: E731
        inputs = torch.utils._pytree.tree_map_only(torch.Tensor, cut, (tuple(args), dict(kwargs)))
        with status_if_slow("does not fit; trying what would"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the step itself were shown, and options may have no effect
            try:
                found.append(_trial(explain(*inputs, trying), trying, remedies, size, count))
            except BudgetInfeasible as refused:
                found.append(_trial(refused, trying, remedies, size, count))
            except AutorematError:  # a step may demand its own number of samples
                break
        if 2 * time.perf_counter() - begin > deadline or len(found) == MOST_TRIALS:  # a further one takes as long
            break
    text = f"Nothing tried makes it fit: {'; '.join(map(str, found))}." if found else "No option can make it fit."
    text += f" What binds: {binding(error.parts)}." if error.parts else ""
    remedy = remedy_for(error.parts[0][0] if error.parts else "") or "a shorter sequence, or a device with more memory"
    return Advice(tuple(found), f"{text} What would help: {remedy}.")


def seconds_of(report: Report) -> float:
    """Returns the predicted seconds of the step under its plans, for all graphs that train."""
    return sum(one.predicted_seconds for one in (report, *report.others))


def _settings(
    options: Options, error: BudgetInfeasible, batch: int, found: Sequence[Trial]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the largest micro-batches by a straight line, of one sample if these do not fit, all remedies together, and both
    if no micro-batch of those ``found`` fits, else smaller ones. Remedies are options that the user has not set."""
    given = sum(size for kind, size in error.parts if kind in GIVEN)
    if given > error.budget_bytes or isinstance(error, DeviceTooSmall):
        return
    defaults, splits = Options(), batch > 1 and options.accumulate is not False
    remedies = dict[str, Any]() if options.tiles != defaults.tiles else {"tiles": "auto"}
    if error.device != "cpu" and (options.host_memory, options.store) == (defaults.host_memory, defaults.store):
        remedies = {"host_memory": "1024GiB"} | remedies  # any host: a trial that fits names what its plan uses
    if error.loss_chunks == max(NUMBERS_OF_CHUNKS) and options.chunk_loss == defaults.chunk_loss:
        remedies = {"chunk_loss": 4 * error.loss_chunks} | remedies  # fewer need more
    if splits:
        again = 0 if options.accumulate else dict(error.parts).get(GRADIENTS, 0)
        guess = batch * (error.budget_bytes - given - again) // max(1, error.minimum_bytes - given)
        largest, *smaller = [size for size in range(min(guess, batch // 2), 1, -1) if batch % size == 0] or [1]
        yield {}, largest
        if largest > 1 and found[-1].seconds is None:
            yield {}, 1
    if remedies:
        yield remedies, batch
    if splits and not any(one.micro_batches > 1 and one.seconds is not None for one in found):
        yield remedies, 1
    elif splits:
        yield from (({}, size) for size in smaller)


def _options(options: Options, error: BudgetInfeasible, remedies: dict[str, Any], count: int, seconds: float) -> Options:
    """Returns the options of a trial in ``count`` micro-batches. A share counts as the bytes that it is now."""
    budget = error.budget_bytes if isinstance(options.memory_budget, float) else options.memory_budget
    if isinstance(budget, DeviceBudget):
        budget = replace(budget, accumulate=count * budget.accumulate)
    accumulate, limit = True if count > 1 else options.accumulate, min(options.time_limit, seconds)
    return replace(options, memory_budget=budget, time_limit=limit, accumulate=accumulate, **remedies)


def _trial(
    outcome: Report | BudgetInfeasible, options: Options, remedies: Mapping[str, object], size: int, count: int
) -> Trial:
    budget, limit = options.memory_budget, outcome.budget_bytes or 0
    beside = budget.total_bytes - budget.reserve_bytes - limit if isinstance(budget, DeviceBudget) else 0
    accumulated: dict[str, object] = {"accumulate": True} if count > 1 else {}
    if isinstance(outcome, BudgetInfeasible):
        return Trial({**remedies, **accumulated}, outcome.minimum_bytes + beside, limit + beside, None, size, count)
    graphs = (outcome, *outcome.others)
    peak = max(one.predicted_device_bytes or one.peak_bytes for one in graphs)
    chunks, tiles, host = (max(getattr(one, name) for one in graphs) for name in ("loss_chunks", "tiles", "host_peak_bytes"))
    used = {"chunk_loss": chunks, "tiles": tiles, "host_memory": f"{math.ceil(host / 2**20)}MiB"}
    needed = {key: used[key] for key in remedies if used[key] not in (1, "0MiB")}
    return Trial(needed | accumulated, peak, limit + beside, count * seconds_of(outcome), size, count)
