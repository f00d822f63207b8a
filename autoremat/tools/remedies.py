"""The remedies that ``explain`` tries for a step that does not fit, one row each: options that lower its minimum peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoremat.basics.errors import BudgetInfeasible
from autoremat.compiler.loss_chunking import NUMBERS_OF_CHUNKS
from autoremat.options.options import Options
from autoremat.report.binding import NAMES
from autoremat.report.peak_snapshot import TensorCategory
from autoremat.report.report import Report

CHUNKS = 64
"""Number of chunks of the loss beyond those that are tried in any case."""

GRADIENTS = NAMES[TensorCategory.GRADIENT]
GIVEN = frozenset({GRADIENTS, NAMES[TensorCategory.TANGENT], TensorCategory.RESIDENT.value})
"""Kinds of bytes that no plan and no smaller batch lowers."""

MOVED = frozenset(
    [NAMES[kind] for kind in (TensorCategory.SAVED, TensorCategory.RECOMPUTED, TensorCategory.TEMPORARY)]
    + [TensorCategory.OTHER_CALLS.value]
)
"""Kinds of bytes that stays on the host may lower. Operands and the workspace of one op are on the device while it runs."""

DEFAULTS = Options()


@dataclass(frozen=True)
class Remedy:
    """Options under which a step may need less memory."""

    options: Mapping[str, object]
    """The options that a trial sets. The remedy applies only where the user left all of them at their defaults."""
    setting: Callable[[Sequence[Report]], Mapping[str, object]]
    """Returns the options for users to set, given the reports of a trial; empty if its plans do without the remedy."""
    applies: Callable[[BudgetInfeasible], bool] = lambda error: True
    """Returns True if the remedy is possible for the step that an error refuses."""
    lowers: Callable[[str], bool] = lambda kind: kind not in GIVEN
    """Returns True for a kind of bytes at the peak that it may lower."""

    def is_free(self, options: Options) -> bool:
        """Returns True if ``options`` decide nothing that the remedy sets."""
        return all(getattr(options, key) == getattr(DEFAULTS, key) for key in self.options)


def _chunks(reports: Sequence[Report]) -> Mapping[str, object]:
    chunks = max(report.loss_chunks for report in reports)
    return {"chunk_loss": chunks} if chunks > 1 else {}


def _host(reports: Sequence[Report]) -> Mapping[str, object]:
    held = max(report.host_peak_bytes for report in reports)
    return {"host_memory": _rounded_up(held)} if held else {}


def _tiles(reports: Sequence[Report]) -> Mapping[str, object]:
    tiles = max(report.tiles for report in reports)
    return {"tiles": tiles} if tiles > 1 else {}


def _rounded_up(size: int) -> str:
    """Returns a text for at least ``size`` bytes that the options accept."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(size / unit)}{name}"


UNBOUNDED = "1024GiB"
"""The memory of a host of any size: trials plan for machines that are not here. Fitting trials name what their plans use."""

REMEDIES: tuple[Remedy, ...] = (
    Remedy({"chunk_loss": CHUNKS}, _chunks, lambda error: error.loss_chunks == max(NUMBERS_OF_CHUNKS)),  # fewer need more
    Remedy({"host_memory": UNBOUNDED, "store": None}, _host, lambda error: error.device != "cpu", MOVED.__contains__),
    Remedy({"tiles": "auto"}, _tiles),
)
"""All remedies, those that cost the least time first."""


def applicable(options: Options, error: BudgetInfeasible) -> tuple[Remedy, ...]:
    """Returns the remedies that are possible for the refused step and that ``options`` do not decide."""
    return tuple(one for one in REMEDIES if one.is_free(options) and one.applies(error))


def with_remedies(options: Options, remedies: Sequence[Remedy]) -> Options:
    """Returns ``options`` with those that the remedies set for a trial."""
    changes = {key: value for remedy in remedies for key, value in remedy.options.items()}
    return replace(options, **changes)  # type: ignore[arg-type]


def settings_of(remedies: Sequence[Remedy], report: Report) -> dict[str, object]:
    """Returns the options for users to set for the plans of a trial; empty if they do without all remedies."""
    reports = (report, *report.others)
    return {key: value for remedy in remedies for key, value in remedy.setting(reports).items()}


def left_bytes(remedies: Sequence[Remedy], error: BudgetInfeasible, smaller_batch: bool) -> int:
    """Returns the bytes at the minimum peak that the remedies, and a smaller batch if one is possible, cannot lower."""
    lowers = [remedy.lowers for remedy in remedies]
    return sum(
        size for kind, size in error.parts if not (smaller_batch and kind not in GIVEN) and not any(low(kind) for low in lowers)
    )
