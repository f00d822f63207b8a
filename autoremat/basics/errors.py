"""Every exception and warning of the package.

All errors survive pickling with their attributes, so that they cross process boundaries (data-parallel launchers,
compile workers).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat.basics.units import format_bytes

SUPPORTED_TORCH = "2.11 to 2.15"
OCCUPANTS_SHOWN = 10


def _restore(kind: "type[AutorematError]", args: tuple[Any, ...]) -> "AutorematError":
    return kind.__new__(kind, *args)


class AutorematError(Exception):
    """Base of all errors that this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls `__init__(*args)` with the finished message, which does not fit our signatures.
        return _restore, (type(self), self.args), self.__dict__


class OptionsError(AutorematError, ValueError):
    """An option has a value or a name that is not accepted."""


class PlanFileError(OptionsError):
    """A stored plan cannot be read, is not valid, or is for another graph; the message says what differs."""


class UnsupportedTorchError(AutorematError, RuntimeError):
    """The installed torch is outside the supported range."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"autoremat supports torch {SUPPORTED_TORCH}; found torch {found}. "
            "Install a supported version (torch>=2.11,<2.16) or another release of autoremat."
        )
        self.found = str(found)


class CaptureError(AutorematError):
    """The joint graph could not be turned into a `Graph`; the message names the op and where it comes from."""


class PlanningError(AutorematError, RuntimeError):
    """A graph with a memory budget could not be planned; the error that was met is the ``__cause__``."""


class StepProfileError(AutorematError, RuntimeError):
    """A step could not be profiled: nothing was compiled in it, or it has no loss to differentiate."""


class PlanInvalid(AutorematError):
    """A plan does not hold what it promises: it failed the check that every plan must pass before it is used."""


class ChunkingUnsupported(AutorematError):
    """The projection and the loss of a graph cannot be computed in parts; the message says why."""

    def __init__(self, message: str, remedy: str = "") -> None:
        """``remedy``: what its user can do about it; empty if that is nothing."""
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Occupant:
    """One tensor that is alive at the peak; `bytes` are those of its storage, unknown places are empty strings."""

    name: str
    bytes: int
    module: str = ""
    source: str = ""


class BudgetInfeasible(AutorematError):
    """No plan within the budget was found. All byte counts have the budget's meaning: above the step's start."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        minimum_bytes: int,
        lower_bound_bytes: int,
        occupants: Iterable[Occupant] = (),
        device: str | None = None,
        plan_file: str | None = None,
        unconstrained_bytes: int | None = None,
        remedy: str = "",
    ) -> None:
        """`minimum_bytes`: smallest feasible peak found; `lower_bound_bytes`: proven for every plan;
        `occupants`: what is alive at the peak of the smallest plan, kept largest first; `plan_file`: the stored plan that
        was to be applied, beside which none was looked for; `unconstrained_bytes`: the smallest peak found without the
        user's orders, if there are any; `remedy`: further advice."""
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.occupants = tuple(sorted(occupants, key=lambda occupant: -occupant.bytes))
        self.device = device
        self.plan_file = plan_file
        self.unconstrained_bytes = unconstrained_bytes
        self.remedies = (remedy,) if remedy else ()
        super().__init__(self._message())

    def advise(self, remedy: str) -> None:
        """Add advice, first of all."""
        if remedy not in self.remedies:
            self.remedies = (remedy, *self.remedies)
            self.args = (self._message(),)

    def _message(self) -> str:
        where = f" on {self.device}" if self.device else ""
        lines = [f"no plan was found that keeps the step's peak memory{where} within the budget"]
        if self.plan_file:
            lines = [f"the stored plan {self.plan_file} does not keep the step's peak memory{where} within the budget"]
        figures = {
            "asked for (memory_budget)": self.budget_bytes,
            "peak of the stored plan" if self.plan_file else "minimum peak found": self.minimum_bytes,
            "proven lower bound": self.lower_bound_bytes,
        }
        lines += _table([(f"{what}:", format_bytes(count), f"{count} bytes") for what, count in figures.items()], "<><")
        if self.occupants:
            lines += ["", self._occupants_title()]
            shown = self.occupants[:OCCUPANTS_SHOWN]
            rows = [(format_bytes(one.bytes), one.name, one.module or "-", one.source or "-") for one in shown]
            lines += _table([("bytes", "tensor", "module", "source"), *rows], "><<<")
        lines += ["", "What would help:", *(f"  - {advice}" for advice in self._advice())]
        return "\n".join(lines)

    def _occupants_title(self) -> str:
        count = len(self.occupants)
        total = format_bytes(sum(occupant.bytes for occupant in self.occupants))
        shown = f", the {OCCUPANTS_SHOWN} largest" if count > OCCUPANTS_SHOWN else ""
        return f"Live at the minimum peak ({count} tensor{'s' if count > 1 else ''}, {total}){shown}:"

    def _advice(self) -> list[str]:
        advice = [
            f"raise memory_budget to at least {self.minimum_bytes} ({format_bytes(self.minimum_bytes)})",
            "use a smaller batch or a shorter sequence",
            'set on_infeasible="best_effort" to run at the minimum peak found anyway',
        ]
        if self.plan_file:
            advice.insert(1, "leave out the option `plan`: another plan may fit")
        elif self.lower_bound_bytes <= self.budget_bytes:
            advice.insert(1, "raise time_limit: the bound does not rule out that a plan within the budget exists")
        if self.unconstrained_bytes is not None and self.unconstrained_bytes < self.minimum_bytes:
            relaxed = f"{self.unconstrained_bytes} bytes ({format_bytes(self.unconstrained_bytes)})"
            advice.insert(1, f"relax policy, save or recompute: without them the minimum peak found is {relaxed}")
        return [*advice[:1], *self.remedies, *advice[1:]]


class BudgetWarning(UserWarning):
    """A request has no effect, or a best-effort plan runs over its budget."""


class ConstraintWarning(UserWarning):
    """An order or a policy matches nothing, has no effect, or cannot be obeyed."""


class FallbackWarning(UserWarning):
    """A graph could not be planned: torch partitions it, and no budget holds for it."""


def fallback_message(error: BaseException, place: str) -> str:
    """The text of an ``FallbackWarning``: the error, the graph (``place``), and the way out."""
    return (
        f"a graph ({place}) could not be planned and is left to torch, so no memory budget holds for it: "
        f"{type(error).__name__}: {error}. It trains all the same. Please report this text to autoremat's issue tracker; "
        'on_planning_error="raise" makes it an error.'
    )


def planning_error(error: BaseException, place: str) -> PlanningError:
    """The error for a graph (``place``) whose memory budget cannot be kept because of ``error``."""
    return PlanningError(
        f"a graph ({place}) could not be planned, so its memory budget cannot be kept: {type(error).__name__}: {error}. "
        'If backend="inductor" compiles it, please report this text to autoremat\'s issue tracker; '
        'on_planning_error="fallback" leaves such a graph to torch, without a budget.'
    )


def _table(rows: Sequence[tuple[str, ...]], alignments: str) -> list[str]:
    """Rows of cells as lines of aligned columns; `alignments` holds one of "<" and ">" per column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths, strict=True)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and all that it was raised from, or stands for in an exception of torch's."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        inner = getattr(seen, "inner_exception", None)
        seen = inner if isinstance(inner, BaseException) else (seen.__cause__ or seen.__context__)
