"""Decides after each attempt: accept the generated code, plan again with other headroom, or raise an error.

An attempt plans a graph, and Inductor generates code for the plan. The decision is a function of the attempts so far. This
module needs no torch.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MAX_REPLANS = 4
"""Number of replans after which the best code is taken, or an error raised. An error may need one more, to name its figures."""

LEAST_ROOM, ROOM_USED = 0.03, 0.9
"""Two shares. A looser plan is tried if at least the first share of the budget is unused. It aims to use the second share of
the unused bytes."""

LEAST_GAIN = 0.02
"""Share of the step's seconds that a looser plan must save, by the cost model, to justify generating code again."""

LOOSER = 1.05
"""Peak of another plan as a multiple of the minimum peak found. That plan is tried if the code of the plan with the minimum
peak needs far more memory than simulated."""


class Purpose(enum.Enum):
    """The reason for an attempt."""

    FIT = "a plan that shall fit, by the peaks of the earlier attempts"
    LOOSEN = "a faster plan, because the code of the attempt before leaves memory unused"
    RETURN = "the plan before a looser one, whose code does not fit"
    MINIMIZE = "another plan of low peak, because nothing fits; its code may need less memory"
    SETTLE = "the plan whose code needed the least memory, although it exceeds the budget"


@dataclass(frozen=True)
class Rules:
    """Facts about a compilation that hold for all its attempts."""

    must_fit: bool = True
    """False to take the code with the least memory if none fits."""
    may_loosen: bool = True
    """False if an earlier process has loosened already, or if the budget is a share of a step's budget."""
    budget_is_shared: bool = False
    """True if forward and backward have limits of their own, as parts of a step of several graphs."""


@dataclass(frozen=True)
class Trial:
    """Facts about one attempt. All sizes are in bytes. Halves are named by ``is_backward``, as False and True."""

    headroom_bytes: int = 0
    """Headroom of the plan below the budget; a negative number loosens the plan."""
    purpose: Purpose = Purpose.FIT
    code_peaks: Mapping[bool, int] = field(default_factory=dict)
    """Peaks of the halves whose code this attempt or an earlier one has generated. A cache may answer for the others."""
    pool_bytes: int | None = None
    """Part of the peaks that the pool of CUDA graphs keeps. None without CUDA graphs."""
    limits: Mapping[bool, int | None] = field(default_factory=dict)
    """Limits on the peaks of the halves; None for no limit."""
    slacks: Mapping[bool, int] = field(default_factory=dict)
    """Bytes by which the plan stays below its limits in simulation, if the budget is shared."""
    is_complete: bool = True
    """False while Inductor still generates code."""
    budget_bytes: int = 0
    simulated_bytes: int = 0
    """Simulated peak of the plan, with code headroom."""
    minimum_bytes: int = 0
    """Minimum simulated peak of all plans."""
    code_headroom_bytes: int = 0
    is_last_plan: bool = False
    """True if no plan of lower peak can be tried."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a half with generated code."""
        return max(self.code_peaks.values(), default=0)

    @property
    def shows_both_halves(self) -> bool:
        """True if code was generated for both halves, so that ``peak_bytes`` is the peak of the step."""
        return len(self.code_peaks) == 2

    @property
    def code_peak_bytes(self) -> int | None:
        """The peak of the step; None if a cache answered for a half that no attempt has generated."""
        return self.peak_bytes if self.shows_both_halves else None

    @property
    def excesses(self) -> list[tuple[int, int]]:
        """Peaks above their limits, each with its limit."""
        pairs = [(peak, self.limits.get(half)) for half, peak in self.code_peaks.items()]
        return [(peak, limit) for peak, limit in pairs if limit is not None and peak > limit]

    @property
    def failed(self) -> bool:
        """True if the code exceeds the budget and no plan before it fitted."""
        return bool(self.excesses) and self.purpose is not Purpose.LOOSEN

    @property
    def minimizing_headroom_bytes(self) -> int | None:
        """Headroom of another plan, if the code needs far more memory than the minimum simulated peak; else None.

        The large difference may be particular to this plan.
        """
        other = int(LOOSER * self.minimum_bytes) + self.code_headroom_bytes
        return self.budget_bytes - other if self.shows_both_halves and self.peak_bytes > LOOSER * other else None

    @property
    def loosening_headroom_bytes(self) -> int:
        """Headroom of a looser plan that uses most of the memory that the code leaves unused."""
        return self.headroom_bytes - int(ROOM_USED * (self.budget_bytes - self.peak_bytes))


@dataclass(frozen=True)
class Accept:
    """The compilation ends with the code of the last attempt."""


@dataclass(frozen=True)
class Again:
    """Another attempt follows."""

    headroom_bytes: int = 0
    purpose: Purpose = Purpose.FIT


@dataclass(frozen=True)
class Infeasible:
    """The compilation ends with an error. ``minimum_bytes`` is the least peak of code that this peak as a budget leads to."""

    minimum_bytes: int


Verdict = Accept | Again | Infeasible


def next_step(attempts: Sequence[Trial], rules: Rules, gain_of: Callable[[int], float]) -> Verdict | None:
    """Returns the verdict on the last of ``attempts``; None if Inductor shall go on with it.

    ``gain_of`` returns the share of the step's seconds that the plan for a headroom saves. It is asked only if that decides.
    """
    last = attempts[-1]
    if not last.excesses or _is_tolerated(attempts, rules):
        if _may_loosen(attempts, rules) and gain_of(last.loosening_headroom_bytes) >= LEAST_GAIN:
            return Again(last.loosening_headroom_bytes, Purpose.LOOSEN)
        return Accept() if last.is_complete else None
    may_raise = rules.must_fit and (last.is_last_plan or _is_final(attempts))
    if not (last.is_complete or last.shows_both_halves) and (may_raise or _is_minimizing(attempts)):
        return None  # an error names the peak of the step, so it needs the code of both halves
    if last.purpose is Purpose.LOOSEN:
        return Again(attempts[-2].headroom_bytes, Purpose.RETURN)
    late = len(attempts) >= MAX_REPLANS
    if last.is_last_plan or _is_minimizing(attempts) or (_is_final(attempts) if rules.must_fit else late):
        return _minimize_or_end(attempts, rules)
    return Again(_tighter_headroom_bytes(last, rules, late))


def _is_final(attempts: Sequence[Trial]) -> bool:
    return len(attempts) > MAX_REPLANS or any(attempt.purpose is Purpose.SETTLE for attempt in attempts)


def _is_minimizing(attempts: Sequence[Trial]) -> bool:
    return any(attempt.purpose is Purpose.MINIMIZE for attempt in attempts)


def _is_tolerated(attempts: Sequence[Trial], rules: Rules) -> bool:
    """Returns True if code over the budget is taken, as the best effort."""
    *earlier, last = attempts
    least = all(last.peak_bytes <= attempt.peak_bytes for attempt in earlier if attempt.failed)
    minimizing = _is_minimizing(attempts)
    settled = least and (minimizing or (last.is_last_plan and last.minimizing_headroom_bytes is None))
    return not rules.must_fit and (settled or _is_final(attempts))


def _may_loosen(attempts: Sequence[Trial], rules: Rules) -> bool:
    """Returns True if the code leaves enough memory unused for a faster plan, and the rules allow to try one."""
    last = attempts[-1]
    fresh = all(attempt.purpose is Purpose.FIT and not attempt.excesses for attempt in attempts)
    bounded = any(limit is not None for limit in last.limits.values())
    has_room = last.budget_bytes - last.peak_bytes >= LEAST_ROOM * last.budget_bytes
    return rules.may_loosen and fresh and bounded and last.shows_both_halves and not last.is_complete and has_room


def _minimize_or_end(attempts: Sequence[Trial], rules: Rules) -> Verdict:
    """Returns one more attempt if the code of another plan may need less memory; else the best plan so far, or the error.

    The error names the peak of a plan that every budget tries before an error. With that peak as the budget the plan is
    therefore tried again, and fits. The code of another plan may need less, but that budget might not lead to it.
    """
    last, failed = attempts[-1], [attempt for attempt in attempts if attempt.failed]
    closest = min(failed, key=lambda attempt: (attempt.peak_bytes, attempt.headroom_bytes, attempt.shows_both_halves))
    headroom = last.minimizing_headroom_bytes
    if rules.must_fit and not last.shows_both_halves:
        headroom = closest.headroom_bytes
    if headroom is not None and not _is_minimizing(attempts) and (rules.must_fit or len(attempts) < MAX_REPLANS):
        return Again(headroom, Purpose.MINIMIZE)
    if not rules.must_fit:
        return Again(closest.headroom_bytes, Purpose.SETTLE)
    whole = [attempt for attempt in failed if attempt.shows_both_halves]
    sure = [attempt.peak_bytes for attempt in whole if attempt.is_last_plan or attempt.purpose is Purpose.MINIMIZE]
    return Infeasible(min(sure or [attempt.peak_bytes for attempt in whole], default=closest.peak_bytes))


def _tighter_headroom_bytes(last: Trial, rules: Rules, late: bool) -> int:
    """Returns the headroom that makes up for the bytes by which the simulator underestimated the last plan."""
    peak, limit = max(last.excesses)
    if rules.budget_is_shared:
        least = last.headroom_bytes + peak - limit
        # A little more headroom did not help: no plan fits that the simulator underestimates as much as the last one.
        pairs = [(half, code, last.limits.get(half)) for half, code in last.code_peaks.items()]
        missed = [last.slacks.get(half, 0) + code - most for half, code, most in pairs if most and code > most]
        return max(least, *missed) if last.headroom_bytes > 0 and missed else least
    headroom = max(peak - last.simulated_bytes, last.headroom_bytes + 1)
    return max(last.budget_bytes, headroom) if late else headroom  # the minimum peak is tried before an error
