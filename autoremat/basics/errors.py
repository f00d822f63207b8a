"""Defines all exceptions and warnings of the package.

Errors keep their attributes when they are pickled, because they cross process boundaries: data-parallel launchers, compile
workers.
"""

import copyreg
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from autoremat.basics.codec import plain
from autoremat.basics.units import bytes_apart, format_bytes, least_share, share_bytes, share_text

SUPPORTED_MINORS = range(11, 16)
"""Minor versions of torch 2 that the package supports.

``tests/project/test_docs.py`` compares the documentation and the metadata.
"""
OCCUPANTS_SHOWN, PARTS_SHOWN = 10, 3

ISSUES = "https://github.com/autoremat/autoremat/issues"
"""The address for reports of defects. ``tests/project/test_project.py`` compares it with the metadata."""

Kind = TypeVar("Kind", bound=BaseException)


class AutorematError(Exception):
    """Base class of the errors that this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # ``Exception.__reduce__`` would call ``__init__`` with the finished message, which does not fit our signatures.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]  # it has no stub


class OptionsError(AutorematError, ValueError):
    """Raised for an option whose name or value is not accepted. [Options](options.md) has the table of what is."""


class PlanFileError(OptionsError):
    """Raised for a stored plan that cannot be read, or that belongs to another graph. The message states the difference.

    A batch size, a dtype, the compiler, torch or a graph break makes it another one.
    [Store a plan](report.md#store-a-plan) of the present graph.
    """


class UnsupportedTorchError(AutorematError, RuntimeError):
    """Raised if the installed torch is outside the supported range, 2.11 to 2.15."""

    def __init__(self, found: str) -> None:
        """Makes the error. ``found`` is the version of torch."""
        super().__init__(
            f"autoremat supports torch 2.{SUPPORTED_MINORS[0]} to 2.{SUPPORTED_MINORS[-1]}; found torch {found}. "
            f"Install a supported version (torch>=2.{SUPPORTED_MINORS.start},<2.{SUPPORTED_MINORS.stop}) or another release of "
            "autoremat."
        )
        self.found = str(found)


class CaptureError(AutorematError):
    """Raised if the graph contains an op that autoremat cannot read. The message names the op and its place in the model.

    Put such code under `torch.compiler.disable`, or set `on_planning_error="fallback"` to train the graph without a budget.
    """


class PlanningError(AutorematError, RuntimeError):
    """Raised if a graph with a budget cannot be planned, from the error that is its `__cause__`.

    Set `on_planning_error="fallback"`, and report the message.
    """


class StepProfileError(AutorematError, RuntimeError):
    """Raised if a step cannot be measured: it compiles no graph, or it has no loss to differentiate.

    Pass `regional=True` if the function only calls compiled parts, and `loss=` if it returns no scalar.
    """


class OptimizerUnpredictable(AutorematError, RuntimeError):
    """Raised if an optimizer's step does not run on fake tensors, so that its memory cannot be predicted."""


class AgreementError(AutorematError, RuntimeError):
    """Raised on all ranks that compile together if one (`rank`) fails, is lost, or has other options. See its output."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        """Makes the error. ``rank`` is the rank to look at first."""
        super().__init__(message)
        self.rank = rank


class PlanInvalid(AutorematError):
    """Raised for a plan that fails the check of every plan. In training this is a defect: please report it."""


class TransferError(AutorematError, RuntimeError):
    """Raised if a step moves other bytes to or from the host than its plan. Leave `host_memory` out, and report it."""


class ChunkingUnsupported(AutorematError):
    """Raised if the loss cannot be chunked: see the [conditions](chunked-loss.md#conditions). In training it only warns."""

    def __init__(self, message: str, remedy: str = "") -> None:
        """Makes the error. ``remedy`` is advice for the user, or "" if there is none."""
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Occupant:
    """A tensor that is live at the peak. ``bytes`` is the size of its storage; unknown places are empty strings."""

    name: str
    bytes: int
    module: str = ""
    source: str = ""


@dataclass(kw_only=True, eq=False, repr=False)
class BudgetInfeasible(AutorematError):
    """Raised if no plan within the budget was found.

    Byte counts are above the live bytes at the start of the step, as the budget is.
    """

    budget_bytes: int
    """The budget."""
    minimum_bytes: int
    """The minimum peak found; under ``max_slowdown``, that within the time."""
    lower_bound_bytes: int
    """A proven lower bound on the peak of every plan."""
    occupants: Sequence[Occupant] = ()
    """Tensors that are live at the minimum peak found, in descending size."""
    device: str | None = None
    """The device of the budget."""
    plan_file: str | None = None
    """The stored plan that was to be applied; no other plan was tried."""
    unconstrained_bytes: int | None = None
    """The minimum peak found without the user's constraints, if there are any."""
    remedies: Sequence[str] = ()
    """Further pieces of advice."""
    rank: int | None = None
    """The rank of a distributed job whose plan or budget fails; None for this process."""
    max_slowdown: float | None = None
    """The budget of time, as a share beyond the plan without a budget; None if there is none."""
    least_slowdown: float | None = None
    """The slow-down of the fastest plan found within the budget of memory; None if none fits."""
    untimed_bytes: int | None = None
    """The minimum peak found without a budget of time."""
    gradient_bytes: int = 0
    """The part of the minimum peak found that gradients take, which no plan lowers."""
    device_bytes: int | None = None
    """The memory of the device; None if it is unknown."""
    is_simulated: bool = False
    """True if Inductor compiles the graph and has generated no code for ``minimum_bytes``."""
    parts: Sequence[tuple[str, int]] = ()
    """What binds the minimum peak found: kinds of bytes with their number, the largest first."""
    loss_chunks: int = 1
    """The number of chunks of the loss in the plan of ``minimum_bytes``, the fewest with that peak."""
    budget_share: float | None = None
    """The share of the reference peak that was asked for; None for a budget in bytes."""
    reference_bytes: int | None = None
    """The reference peak, of which ``budget_share`` is a share."""
    advice: Any = field(default=None, init=False)
    """What makes the step fit, if that was looked for and found."""

    def __post_init__(self) -> None:
        self.occupants = tuple(sorted(self.occupants, key=lambda occupant: -occupant.bytes))
        self.remedies = tuple(filter(None, self.remedies))
        self.parts = tuple((str(name), int(number)) for name, number in self.parts)
        self.restate()

    def figures(self) -> dict[str, Any]:
        """Returns the arguments that make this error again, as JSON data."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(BudgetInfeasible) if one.init}

    def restate(self, **figures: Any) -> "BudgetInfeasible":
        """Returns the error, which from now on names other figures."""
        for name, value in figures.items():
            setattr(self, name, value)
        message = self._message()
        self.args = (message if self.advice is None else f"{message}\n\n{self.advice}",)
        return self

    def asked_as(self, share: float | None, reference_bytes: int | None) -> "BudgetInfeasible":
        """Returns the error, which from now on names the budget as a share of the reference peak if it was asked for so."""
        if share is not None and reference_bytes is not None and share_bytes(share, reference_bytes) == self.budget_bytes:
            self.restate(budget_share=share, reference_bytes=reference_bytes)
        return self

    def _message(self) -> str:
        where = f" on {self.device}" if self.device else ""
        of_rank = "" if self.rank is None else f" of rank {self.rank}"
        says = f"the stored plan {self.plan_file} does not keep" if self.plan_file else "no plan was found that keeps"
        title = f"{says} the step's peak memory{where} within the budget{of_rank}"
        timed = self.max_slowdown is not None
        least = "peak of the stored plan" if self.plan_file else f"minimum peak found{' within max_slowdown' if timed else ''}"
        figures = {
            "asked for (memory_budget)": self.budget_bytes,
            least: self.minimum_bytes,
            "minimum peak found at any slow-down": self.untimed_bytes,
            "proven lower bound": self.lower_bound_bytes,
            "gradients in that peak": self.gradient_bytes if 2 * self.gradient_bytes > self.minimum_bytes else None,
            "memory of the device": self.device_bytes if (self.device_bytes or math.inf) < self.minimum_bytes else None,
        }
        rows = _rows(figures)
        if self.budget_share is not None and self.reference_bytes is not None:
            asked = f"{self.budget_bytes} bytes, {share_text(self.budget_share, self.reference_bytes)}"
            rows[0] = (f"asked for (memory_budget={self.budget_share:g}):", rows[0][1], asked)
        if self.max_slowdown is not None:
            title += f", and its time within {self.max_slowdown:.1%} of that without a budget"
            found = "no plan fits" if self.least_slowdown is None else f"{self.least_slowdown:.1%}"
            rows += [("asked for (max_slowdown):", f"{self.max_slowdown:.1%}", "")]
            rows += [("least slow-down found within memory_budget:", found, "")]
        lines = [title, *_aligned(rows, "<><")]
        if self.parts:
            lines += ["", f"What binds the minimum peak: {binding(self.parts)}"]
        if count := len(self.occupants):
            total = format_bytes(sum(occupant.bytes for occupant in self.occupants))
            largest = f", the {OCCUPANTS_SHOWN} largest" if count > OCCUPANTS_SHOWN else ""
            lines += ["", f"Live at the minimum peak ({count} tensor{'s' if count > 1 else ''}, {total}){largest}:"]
            shown = self.occupants[:OCCUPANTS_SHOWN]
            live = [(format_bytes(one.bytes), one.name, one.module or "-", one.source or "-") for one in shown]
            lines += _aligned([("bytes", "tensor", "module", "source"), *live], "><<<")
        return "\n".join([*lines, *_helps(self._advice())])

    def _advice(self) -> list[str]:
        relaxed, gradients, timed = self.unconstrained_bytes, format_bytes(self.gradient_bytes), self.max_slowdown is not None
        advice = [self._budget_advice(), *self.remedies]
        if relaxed is not None and relaxed < self.minimum_bytes:
            advice.append(f"relax policy, save or recompute: without, {relaxed} bytes ({format_bytes(relaxed)}) suffice")
        if self.plan_file:
            advice.append("leave out the option `plan`: another plan may fit")
        elif self.lower_bound_bytes <= self.budget_bytes:
            advice.append("raise time_limit: the bound does not rule out that a plan within the budget exists")
        if self.least_slowdown is not None:
            enough = math.ceil(self.least_slowdown * 1000) / 1000
            advice.append(f"raise max_slowdown to {enough:g}, at which memory_budget is met")
        if self.gradient_bytes > min(self.budget_bytes, self.device_bytes or self.budget_bytes):
            advice.append(
                f"gradients alone take {gradients}, however small the batch: shard them (FSDP2's fully_shard, tensor "
                "parallelism), run the optimizer in the backward, or train fewer parameters (LoRA, frozen layers)"
            )
        else:  # accelerate, Lightning and Composer halve the batch at the last words
            advice.append("use a smaller batch or sequence; code that searches batch sizes takes this for CUDA out of memory.")
        effort = "keep to memory_budget, whatever the time" if timed else "run at the minimum peak found anyway"
        return [*advice, f'set on_infeasible="best_effort" to {effort}']

    def _budget_advice(self) -> str:
        if (self.device_bytes or math.inf) < self.minimum_bytes:
            return "use a device with more memory: no budget within that of this device suffices"
        fits = "which fits by simulation: an error there names what generated code needs" if self.is_simulated else "which fits"
        less = "; less may fit too" if self.lower_bound_bytes < self.minimum_bytes else ""
        reference = self.reference_bytes or 0
        share = f"{least_share(self.minimum_bytes, reference):g}, or to " if self.minimum_bytes <= reference else ""
        return f"raise memory_budget to {share}{self.minimum_bytes} ({format_bytes(self.minimum_bytes)}), {fits}{less}"


@dataclass(kw_only=True, eq=False, repr=False)
class DeviceTooSmall(BudgetInfeasible):
    """Raised if the memory that no plan decides exceeds a device by itself. ``occupants`` are the rows of its ledger.

    Byte counts are those of the whole device: ``budget_bytes`` is its memory, ``minimum_bytes`` the need of ``part``.
    """

    part: str
    """The part of the step that needs the most."""

    def _message(self) -> str:
        where = f" ({self.device})" if self.device else ""
        lines = [f"the device{where} is too small for {self.part}, whatever is recomputed"]
        figures = {"memory of the device": self.budget_bytes, "needed, without any plan": self.minimum_bytes}
        lines += _aligned(_rows(figures), "<><")
        lines += ["", "Ledger:", *_aligned([(format_bytes(one.bytes), one.name) for one in self.occupants], "><")]
        return "\n".join([*lines, *_helps(self._advice())])

    def _advice(self) -> list[str]:
        return [*self.remedies, "use a device with more memory, or shard parameters and optimizer state over several"]


def _rows(figures: Mapping[str, int | None]) -> list[tuple[str, str, str]]:
    return [(f"{what}:", format_bytes(count), f"{count} bytes") for what, count in figures.items() if count is not None]


def _helps(advice: Sequence[str]) -> list[str]:
    return ["", "What would help:", *(f"  - {one}" for one in advice)]


def _aligned(rows: Sequence[tuple[str, ...]], alignments: str) -> list[str]:
    """Returns rows of cells as lines with aligned columns. ``alignments`` holds "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths, strict=True)] for row in rows)
    return [f"  {'  '.join(row)}".rstrip() for row in cells]


def binding(parts: Sequence[tuple[str, int]]) -> str:
    """Returns the largest kinds of bytes at a peak, each with its share. ``parts`` are all kinds, the largest first."""
    total = max(1, sum(size for _, size in parts))
    return ", ".join(f"{format_bytes(size)} ({size / total:.0%}) of {name}" for name, size in parts[:PARTS_SHOWN])


class BudgetWarning(UserWarning):
    """Warns of a budget that a step exceeds, or may exceed. The message has figures and remedy."""


class OptionWarning(UserWarning):
    """Warns of an option, variable or request without effect. After a late `configure`, call `torch.compiler.reset()`."""


class ConstraintWarning(UserWarning):
    """Warns of a [policy or constraint](policies.md) without effect, or with only part of it.

    A pattern matches nothing, a policy finds no layers, or ops [cannot run again](planner.md#exact-gradients).
    """


class FallbackWarning(UserWarning):
    """Warns of a graph that cannot be planned: torch's partitioner takes it without a budget. Report the message."""


def best_effort_message(subject: str, needed_bytes: int, budget: int, share: float | None = None, reference: int = 0) -> str:
    """Returns the text of a ``BudgetWarning`` for a plan over its budget, which runs anyway. ``subject`` is a step, in words.

    With a ``share``, the budget was asked for as a share of the peak of ``reference`` bytes.
    """
    needed, limit = bytes_apart(needed_bytes, budget)
    needs = f"{subject} needs {needed}, over its budget of {limit}"
    if share is None or share_bytes(share, reference) != budget:
        return f"{needs}: nothing smaller was found, and it runs anyway"
    least = f"The least share that works is {least_share(needed_bytes, reference):g}" if needed_bytes <= reference else None
    return (
        f"{needs} (memory_budget={share:g}, {share_text(share, reference)}): nothing smaller was found, and it runs at that "
        f"peak. {least or 'No share works, for it needs more than without autoremat'}. autoremat.explain tells more; "
        'on_infeasible="raise" makes an infeasible share an error'
    )


def fallback_message(error: BaseException, place: str) -> str:
    """Returns the text of a ``FallbackWarning``: the graph (``place``), the error and the remedies."""
    return (
        f"a graph ({place}) could not be planned and is left to torch, so no memory budget holds for it: {_report(error)}. "
        'It trains all the same; on_planning_error="raise" makes it an error.'
    )


def planning_error(error: BaseException, place: str) -> PlanningError:
    """Returns the ``PlanningError`` for a graph (``place``) whose budget cannot be kept because of ``error``."""
    return PlanningError(
        f"a graph ({place}) could not be planned, so its memory budget cannot be kept: {_report(error)}. "
        'on_planning_error="fallback" leaves such a graph to torch, without a budget.'
    )


def _report(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}. Please report this text at {ISSUES}"


def find_cause(error: BaseException, kind: type[Kind]) -> Kind | None:
    """Returns the first exception of that kind among ``error`` and its causes, or None."""
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def is_user_error(error: BaseException) -> bool:
    """Returns True for errors that the user must see: errors of this package, and warnings that are raised as errors."""
    return any(isinstance(cause, AutorematError | Warning) for cause in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields ``error`` and its chain of causes, including errors that torch's exceptions wrap, each once."""
    seen: set[int] = set()  # an error that was raised again has what wraps it as its context
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        inner = getattr(following, "inner_exception", None)
        following = inner if isinstance(inner, BaseException) else (following.__cause__ or following.__context__)


def unwrapped(error: BaseException) -> BaseException:
    """Returns the exception that exceptions of torch wrap; ``error`` itself if it wraps none."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error
