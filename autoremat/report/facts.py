"""The facts of a report that its plan lacks. Bytes are peaks above the bytes that were live at the start of the step."""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.planner.cost.rates import Pricing
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.peak_snapshot import PeakSnapshot, Profile


@dataclass(frozen=True, kw_only=True)
class PlanningFacts(Pricing):
    """What was planned, how long it took, and what other plans of the graph need."""

    compiler: str
    device: str
    planning_seconds: float
    ended_by_clock: bool = False
    """True if the clock ended the search before its work was done, so that another run may find another plan."""
    baseline_peak_bytes: int
    """Simulated peak without recomputation."""
    peak_before: PeakSnapshot | None = None
    """Live tensors at the peak without recomputation."""
    profile_before: Profile | None = None
    """Memory over the step without recomputation."""
    smallest_peak_bytes: int
    """Minimum simulated peak found over all plans."""
    minimum_is_searched: bool = False
    """True if ``minimum_peak_bytes`` is the least that a search for it finds. Other budgets make none, and less may fit."""
    loss_chunks: int = 1
    """Number of chunks of the projection and the loss (see the option ``chunk_loss``)."""
    loss_chunked_by: str = ""
    """What computes the loss in chunks instead of autoremat: a function of torch or a setting of Inductor. Empty if nothing
    does."""
    minimum_unchunked_bytes: int | None = None
    """Minimum peak found without chunking the loss. None if no such plan was searched."""
    tiles: int = 1
    """Number of tiles of each stretch of ops that compute row by row (see the option ``tiles``)."""
    tiled_stretches: int = 0
    """Number of stretches that are tiled."""
    accumulated_bytes: int = 0
    """Bytes of the gradients of parameters. Later micro-batches of a step find them live."""
    unused_forms: tuple[str, ...] = ()
    """For each form that the options ask for and that no value of this graph can have, the option and the reason."""
    constraint_warnings: tuple[str, ...] = ()
    """Messages of the ``ConstraintWarning`` of this graph. A process that takes its code from torch's caches warns again."""
    ranks: tuple[int, ...] = ()
    """Ranks of a distributed job that share this plan. Empty if the process planned by itself."""
    notes: tuple[str, ...] = ()
    """Further remarks on these figures."""
    hints: tuple[str, ...] = ()
    """What may have been overlooked: no budget, checkpoints left on in the model, outputs beside the loss."""


@dataclass(frozen=True, kw_only=True)
class BudgetFacts:
    """What was asked for. The budgets in bytes belong to the plan."""

    limit_bytes: int | None = None
    """The bound on the simulated peak that the plan keeps to: the budget without all headroom, or the soft budget."""
    budget_share: float | None = None
    """The budget as the user gave it, if that is a share of the reference peak."""
    reference_bytes: int | None = None
    """Reference peak: what the step needs without this package, with code headroom. None unless the budget is a share of it."""
    reference_saved_bytes: int | None = None
    """Bytes that the plan with the reference peak saves for the backward."""
    reference_source: str = ""
    """The plan that has the reference peak."""
    granted_bytes: int | None = None
    """The budget of an earlier graph of the function, if a share is to be no less (see ``budget_share``)."""
    soft_budget_bytes: int | None = None
    """Soft budget: the simulated peak of torch's own partition, used if no budget is given."""
    device_ledger: DeviceBudget | None = None
    """The ledger of the whole device. None unless the budget is a device budget, or "auto" with a live optimizer."""
    max_slowdown: float | None = None
    """Budget of time: the share by which the step may take longer than under its plan without a budget. None without one."""
    seconds_without_budget: float | None = None
    """Seconds of the step under its plan without a budget, by the cost model. None without a budget of time."""
    timed_minimum_bytes: int | None = None
    """Simulated minimum peak found within ``max_slowdown``, if that exceeds the budget of memory."""


@dataclass(frozen=True, kw_only=True)
class CodeFacts:
    """What the generated code needs beside the plan."""

    code_headroom_bytes: int = 0
    """Bytes that the plan leaves free below the budget, not part of the predicted peak. They serve small
    allocations of the generated code, and what it copies for CUDA graphs."""
    compiled_peak_bytes: int | None = None
    """Peak of the generated code, after fusion. None if no code was generated (``compiler="aot_eager"``)."""
    replans: int = 0
    """Number of further attempts, with a tighter plan, because the generated code was over the budget."""
    room_left_because: str = ""
    """Reason why the compiled code needs much less than the budget. Empty if it does not, or if no code was generated."""
    graph_pool_bytes: int | None = None
    """Bytes that the pool of CUDA graphs keeps from its recording on, between steps too. They are part of
    ``compiled_peak_bytes``. None without CUDA graphs."""
    unknown_workspaces: tuple[str, ...] = ()
    """Kernels that may need more memory than counted, because their workspace is unknown and cannot be measured."""
    assumed_sizes: tuple[tuple[int, int], ...] = ()
    """For sizes that depend on data and have no upper bound: the place among the numbers that the forward saves for the
    backward, and the largest value for which the plan holds."""
