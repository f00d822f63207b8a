"""The decisions after each attempt, as tables: peaks of generated code in, further attempts and the end out. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from autoremat.compiler.attempts import MAX_REPLANS, Accept, Again, Infeasible, Purpose, Rules, Trial, Verdict, next_step

BUDGET = 100
BEST_EFFORT = Rules(must_fit=False, may_loosen=False)
RAISE = Rules(must_fit=True, may_loosen=False)
FIT, LOOSEN, RETURN, MINIMIZE, SETTLE = Purpose


@dataclass(frozen=True)
class Made(Trial):
    """An attempt, and the share of the step's seconds that a looser plan saves."""

    gain: float = 0.0


def attempt(peaks: dict[bool, int] | int, **facts: object) -> Made:
    """An attempt for 100 bytes whose halves need these bytes of code; one number is the peak of both."""
    peaks = {False: peaks, True: peaks} if isinstance(peaks, int) else peaks
    limits = {False: BUDGET, True: BUDGET}
    return replace(Made(code_peaks=peaks, limits=limits, budget_bytes=BUDGET, minimum_bytes=BUDGET), **facts)


def run(rules: Rules, codes: Sequence[Made], record: int = 0) -> tuple[list[tuple[int, Purpose]], Verdict, list[Trial]]:
    """All attempts of a compilation, with headroom and purpose, and its end. ``codes`` are the facts of one attempt each."""
    steps: list[tuple[int, Purpose]] = []
    seen: list[Trial] = []
    verdict: Verdict | None = Again(record)
    for code in codes:
        assert isinstance(verdict, Again)
        steps.append((verdict.headroom_bytes, verdict.purpose))
        simulated = code.simulated_bytes or BUDGET - verdict.headroom_bytes
        code = replace(
            code, headroom_bytes=verdict.headroom_bytes, purpose=verdict.purpose, simulated_bytes=simulated, is_complete=False
        )
        forward = {half: peak for half, peak in code.code_peaks.items() if not half}
        stages = [replace(code, code_peaks=forward), code, replace(code, is_complete=True)]
        verdict = None
        for stage in stages:
            if stage.code_peaks or stage.is_complete:
                verdict = next_step([*seen, stage], rules, lambda headroom, gain=code.gain: gain)
            if verdict is not None:
                seen.append(stage)
                break
    assert verdict is not None
    return steps, verdict, seen


@pytest.mark.parametrize("rules", [RAISE, BEST_EFFORT])
def test_code_within_the_budget_is_accepted(rules):
    assert run(rules, [attempt(100)])[:2] == ([(0, FIT)], Accept())
    assert run(rules, [attempt(100)], record=7)[:2] == ([(7, FIT)], Accept())


def test_no_limit_accepts_everything():
    unlimited = attempt(1000, limits={False: None, True: None}, gain=1.0)
    assert run(Rules(), [unlimited])[:2] == ([(0, FIT)], Accept())


def test_a_cache_may_answer_for_both_halves():
    assert run(Rules(), [attempt({})])[:2] == ([(0, FIT)], Accept())


@pytest.mark.parametrize(
    ("codes", "headrooms"),
    [
        ([attempt(120), attempt(90)], [0, 20]),  # 20 more than simulated
        ([attempt(120), attempt(110), attempt(90)], [0, 20, 30]),  # planned for 80, the code needs 110
        ([attempt({False: 101, True: 90}), attempt(90)], [0, 1]),  # the forward alone ends the attempt
        ([attempt(130, simulated_bytes=200), attempt(90)], [0, 1]),  # the simulation is over the budget already
    ],
)
@pytest.mark.parametrize("rules", [RAISE, BEST_EFFORT])
def test_excess_becomes_headroom(rules, codes, headrooms):
    steps, verdict, _ = run(rules, codes)
    assert (steps, verdict) == ([(headroom, FIT) for headroom in headrooms], Accept())


def test_the_attempt_before_the_last_plans_for_the_minimum_peak():
    codes = [attempt(101 + number) for number in range(MAX_REPLANS)]
    steps, _, _ = run(RAISE, [*codes, attempt(100)])
    assert [headroom for headroom, _ in steps] == [0, 1, 3, 6, BUDGET]


def test_a_half_whose_plan_stays_far_below_its_limit_gets_the_headroom_that_its_code_needs():
    shared, limits = Rules(must_fit=True, may_loosen=False, budget_is_shared=True), {False: 50, True: 70}
    code = attempt({False: 40, True: 75}, limits=limits, slacks={False: 10, True: 30})
    fits = attempt({False: 40, True: 60}, limits=limits)
    steps, verdict, _ = run(shared, [code, code, fits])
    assert (steps, verdict) == ([(0, FIT), (5, FIT), (35, FIT)], Accept())


def faster(peaks: dict[bool, int] | int, gain: float = 0.5) -> Made:
    return attempt(peaks, gain=gain)


@pytest.mark.parametrize(
    ("codes", "steps"),
    [
        ([faster(90), faster(99)], [(0, FIT), (-9, LOOSEN)]),
        ([faster(90), faster(101), faster(90)], [(0, FIT), (-9, LOOSEN), (0, RETURN)]),  # the looser code does not fit
        ([faster(90), faster(50)], [(0, FIT), (-9, LOOSEN)]),  # loosened once only
        ([faster(98)], [(0, FIT)]),  # too little room
        ([faster(90, gain=0.01)], [(0, FIT)]),  # too little gain
        ([faster(110), faster(90)], [(0, FIT), (10, FIT)]),  # not after a plan whose code did not fit
    ],
)
def test_unused_memory_is_used_once(codes, steps):
    assert run(Rules(), codes)[:2] == (steps, Accept())


def test_the_gain_is_that_of_the_looser_headroom():
    asked = []
    verdict = next_step([attempt(50, is_complete=False)], Rules(), lambda headroom: asked.append(headroom) or 0.5)
    assert (asked, verdict) == ([-45], Again(-45, LOOSEN))


def test_the_gain_is_not_asked_for_where_it_decides_nothing():
    def never(headroom_bytes: int) -> float:
        raise AssertionError(headroom_bytes)

    for peak, rules in ((101, Rules()), (98, Rules()), (50, Rules(may_loosen=False))):
        next_step([attempt(peak, is_complete=False)], rules, never)


@pytest.mark.parametrize(
    ("codes", "steps"),
    [
        # The plan of the minimum peak has larger code than the first one, which is taken.
        ([attempt(110), attempt(130, is_last_plan=True, minimum_bytes=130), attempt(110)],
         [(0, FIT), (10, FIT), (0, SETTLE)]),
        # Four attempts exceed the budget. The best of them is taken.
        ([attempt(150), attempt(140), attempt(130), attempt(120, minimum_bytes=120), attempt(120)],
         [(0, FIT), (50, FIT), (90, FIT), (120, FIT), (120, SETTLE)]),
        # The plan of the minimum peak is simulated to need 102, and its code needs 140. A plan for 107 is tried.
        ([attempt(140, is_last_plan=True, minimum_bytes=102), attempt(107, minimum_bytes=102)],
         [(0, FIT), (-7, MINIMIZE)]),
        # The first plan is the last one, and its code is close to the simulation.
        ([attempt(103, is_last_plan=True, minimum_bytes=102)], [(0, FIT)]),
    ],
)  # fmt: skip
def test_the_best_effort_takes_the_code_of_least_memory(codes, steps):
    assert run(BEST_EFFORT, codes)[:2] == (steps, Accept())


@pytest.mark.parametrize(
    ("codes", "steps", "named"),
    [
        # The code of the first plan needs less than that of the minimum peak, but the budget 110 leads to another first plan.
        ([attempt({False: 90, True: 110}), attempt({False: 104, True: 140}, is_last_plan=True, minimum_bytes=135)],
         [(0, FIT), (10, FIT)], 140),
        # A cache answers for the forward of the last plan. The last attempt generates all of the first plan's code.
        ([attempt({False: 105}), attempt({True: 140}, is_last_plan=True), attempt({False: 105, True: 110})],
         [(0, FIT), (5, FIT), (0, MINIMIZE)], 110),
        # The plan of the minimum peak, simulated to need 102, has far worse code. A plan for 107 is tried.
        ([attempt({False: 90, True: 140}, is_last_plan=True, minimum_bytes=102), attempt({False: 90, True: 107})],
         [(0, FIT), (-7, MINIMIZE)], 107),
        ([attempt({False: 90, True: 108}, is_last_plan=True, minimum_bytes=105)], [(0, FIT)], 108),
    ],
)  # fmt: skip
def test_an_error_names_the_least_memory_of_any_code(codes, steps, named):
    assert run(RAISE, codes)[:2] == (steps, Infeasible(named))


@pytest.mark.parametrize("rules", [RAISE, BEST_EFFORT, Rules(True, False, True), Rules(False, False, True)])
@pytest.mark.parametrize("peak", [101, 150, 10_000])
def test_every_compilation_ends(rules, peak):
    limit = MAX_REPLANS + 2
    codes = [attempt(peak, simulated_bytes=100 + number) for number in range(limit)]
    verdict: Verdict | None = None
    for count in range(1, limit + 1):
        steps, verdict, _ = run(rules, codes[:count])
        if not isinstance(verdict, Again):
            break
    assert isinstance(verdict, Infeasible if rules.must_fit else Accept)
    assert len(steps) <= limit
