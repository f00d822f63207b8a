"""Advice for a step that does not fit: what is tried, in which sequence, and what the error says in the end."""

import dataclasses
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from reports import report_for
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible, DeviceTooSmall, OptionsError, PlanInvalid
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.report import Report
from autoremat.tools import advice as advice_module
from autoremat.tools.advice import advise

BUDGET, PER_SAMPLE, GRADIENTS = 1000, 100, 300
CARD = "H100-80GB"


def refusal(minimum: int, gradients: int = GRADIENTS, budget: int = BUDGET, **figures: object) -> BudgetInfeasible:
    """An error for a step of that minimum peak, on a card, whose loss is as finely chunked as is tried by itself."""
    parts = [("gradients", gradients), ("saved tensors", minimum - gradients)]
    given = {"device": CARD, "loss_chunks": 16, "lower_bound_bytes": 0, **figures}
    return BudgetInfeasible(budget_bytes=budget, minimum_bytes=minimum, parts=parts, **given)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Made(Report):
    """A report whose figures follow from no plan."""

    budget_bytes: int = 0
    peak_bytes: int = 0
    predicted_seconds: float = 0.0
    host_peak_bytes: int = 0


class Step:
    """Stands for a step of ``rows`` samples, of which each needs memory that remedies lower and that takes time."""

    def __init__(self, chunked: float = 1.0, on_host: float = 1.0, rows_of: Callable[[int], int] = int) -> None:
        self.chunked, self.on_host, self.rows_of = chunked, on_host, rows_of
        self.asked: list[tuple[Options, int]] = []

    def __call__(self, args, kwargs, options: Options) -> Report:
        rows = self.rows_of(len(args[0]))
        self.asked.append((options, rows))
        stores, chunks = options.host_memory is not None, options.chunk_loss if type(options.chunk_loss) is int else 1
        share = (self.on_host if stores else 1.0) * (self.chunked if chunks > 1 else 1.0)
        peak = int(GRADIENTS * (2 if options.accumulate else 1) + share * PER_SAMPLE * rows)
        if peak > BUDGET:
            raise refusal(peak, GRADIENTS)
        is_on_host = stores and self.on_host < 1
        return Made(
            **vars(report_for(None, loss_chunks=chunks)), budget_bytes=BUDGET, peak_bytes=peak,
            predicted_seconds=rows * (2.0 if is_on_host else 1.0), host_peak_bytes=is_on_host * (2**30 + 1),
        )  # fmt: skip


def advice_on(step: Step, rows: int, **options: object):
    return advise(step, Options(**options), (torch.zeros(rows, 2),), {}, refusal(GRADIENTS + PER_SAMPLE * rows), 9.0)


def test_micro_batches_come_first_then_all_remedies_and_the_fastest_that_fits_is_named():
    advice = advice_on(Step(chunked=0.5, on_host=0.5), 12)
    micro, both, smaller, _ = advice.trials
    assert (smaller.batch, smaller.micro_batches, smaller.seconds) == (3, 4, 12)
    assert both.options == {"chunk_loss": 64, "host_memory": "1025MiB"}
    assert (both.peak_bytes, both.seconds) == (600, 24)
    assert (micro.options, micro.batch, micro.micro_batches, micro.seconds) == ({"accumulate": True}, 4, 3, 12)
    assert advice.best == micro
    assert "accumulate=True, 3 micro-batches of 4: 1000 B of 1000 B, predicted 12.00 s" in str(advice)


def test_advice_takes_no_longer_than_the_plan_that_it_follows(monkeypatch):
    monkeypatch.setattr(advice_module, "LEAST_SECONDS", 0.0)
    clock = itertools.count()
    monkeypatch.setattr(advice_module.time, "perf_counter", lambda: 10.0 * next(clock))
    step = Step(0.5, 0.5)
    advise(step, Options(), (torch.zeros(12, 2),), {}, refusal(GRADIENTS + PER_SAMPLE * 12), 25.0)
    assert len(step.asked) == 1
    assert step.asked[0][0].time_limit == 7.5


def test_one_sample_is_tried_if_a_straight_line_misses():
    advice = advice_on(Step(rows_of=lambda n: n if n == 1 else n + 3), 12, chunk_loss=False, store=("device",), tiles=2)
    assert [(one.batch, one.seconds is None) for one in advice.trials] == [(4, True), (1, False), (3, True), (2, True)]


def test_micro_batches_take_remedies_if_not_even_one_sample_fits_without():
    step = Step(on_host=0.5, rows_of=lambda n: 8 * n)
    advice = advise(step, Options(chunk_loss=False), (torch.zeros(8, 2),), {}, refusal(GRADIENTS + 8 * 8 * PER_SAMPLE), 9.0)
    assert [one.micro_batches for one in advice.trials] == [8, 1, 8]
    assert advice.best.options == {"host_memory": "1025MiB", "accumulate": True}
    assert advice.best.peak_bytes == 2 * GRADIENTS + 4 * PER_SAMPLE


@pytest.mark.parametrize(("options", "key"), [({"chunk_loss": False}, "chunk_loss"), ({"store": ("device",)}, "host_memory")])
def test_options_of_the_user_stay(options, key):
    step = Step(0.5, 0.5)
    advice_on(step, 12, **options)
    assert step.asked
    for asked, _ in step.asked:
        assert getattr(asked, key) == getattr(Options(**options), key)


def test_tiles_are_tried_with_all_others_and_their_number_is_named():
    class Tiled(Step):
        def __call__(self, args, kwargs, options):
            rows = args[0].shape[0] // (2 if options.tiles == "auto" else 1)
            report = super().__call__((torch.zeros(rows, 2),), kwargs, options)
            return dataclasses.replace(report, tiles=16 if options.tiles else 1)

    advice = advice_on(Tiled(), 12, chunk_loss=False, store=("device",), accumulate=False)
    assert [one.options for one in advice.trials] == [{"tiles": 16}]
    assert advice.best
    step = Tiled()
    advice_on(step, 12, tiles=4, chunk_loss=False, store=("device",), accumulate=False)
    assert step.asked == []


def test_gradients_beyond_the_budget_end_it_before_any_trial():
    step = Step()
    advice = advise(step, Options(), (torch.zeros(12, 2),), {}, refusal(2000, gradients=1500), 9.0)
    assert (step.asked, advice.trials, advice.best) == ([], (), None)
    assert "1.46 KiB (75%)" in str(advice)


@pytest.mark.parametrize("error", [PlanInvalid("op 3 reads a lost value"), OptionsError("no such host")])
def test_an_error_of_a_trial_ends_it(error):
    def explain(args, kwargs, options):
        raise error

    advice = advise(explain, Options(), (torch.zeros(12, 2),), {}, refusal(GRADIENTS + PER_SAMPLE * 12), 9.0)
    assert advice.trials == ()


def test_a_device_counts_its_ledger_and_its_micro_batches():
    budget = DeviceBudget(5000, (), 200, accumulate=2)
    step = Step()
    advice = advice_on(step, 12, memory_budget=budget, host_memory=1)
    options, _ = step.asked[-1]
    assert options.memory_budget.accumulate == 2 * advice.trials[-1].micro_batches
    assert {one.limit_bytes for one in advice.trials} == {4800}
    too_small = DeviceTooSmall(part="the optimizer's steps", budget_bytes=1, minimum_bytes=2, lower_bound_bytes=2)
    assert advise(step, Options(), (), {}, too_small, 9.0).best is None


def test_explain_ends_with_advice_that_holds_for_the_step():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)), torch.zeros(8, 1024, 64)

    def loss(x):
        return model(x).square().mean()

    options = {"memory_budget": "20MiB", "compiler": "aot_eager"}
    with pytest.raises(BudgetInfeasible) as caught:
        autoremat.explain(loss, x, options=options, device=CARD)
    error = caught.value
    best = error.advice.best
    assert str(error).endswith(f"It fits with {best}.")
    rows = best.batch
    report = autoremat.explain(loss, x[:rows], options=options | dict(best.options), device=CARD)
    assert report.predicted_peak_bytes == best.peak_bytes <= 20 * 2**20
    assert best.seconds == pytest.approx(best.micro_batches * report.predicted_seconds)
    assert pickle.loads(pickle.dumps(error)).advice == error.advice
    with pytest.raises(BudgetInfeasible) as bare:
        autoremat.explain(loss, x, options=options, device=CARD, advice=False)
    assert bare.value.advice is None
