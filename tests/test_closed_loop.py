"""The loop of compiling, checking the generated code and planning again, with attempts that only say what they need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autoremat import Options
from autoremat.compiler import compile_loop

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")


def run_with_code_peaks(monkeypatch, code_peaks, exhausted_at=None, worth_loosening=False):
    """The margins of all attempts of a compilation for 100 bytes whose attempts generate code with these peaks."""
    planned = []

    def attempt(self, partitioner):
        number = len(planned)
        planned.append(partitioner.extra_headroom_bytes)
        partitioner.report = SimpleNamespace(predicted_peak_bytes=100 - partitioner.extra_headroom_bytes, budget_bytes=100)
        partitioner.exhausted = number == exhausted_at
        if code_peaks[number] > 100 and not self.last:
            raise compile_loop._OverBudget(code_peaks[number])
        if worth_loosening and self.may_loosen:
            raise compile_loop._RoomLeft(code_peaks[number])
        return "compiled"

    compilation = compile_loop.CompileLoop
    monkeypatch.setattr(compilation, "attempt", attempt)
    monkeypatch.setattr(compilation, "finish", lambda self, compiled, partitioner, record, replans: compiled)
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    parsed = Options(cost_model="roofline", memory_budget=100, on_infeasible="best_effort")
    assert compilation(module, [torch.zeros(1, 2)], parsed, {}).run() == "compiled"
    return planned


@pytest.mark.parametrize(
    ("code_peaks", "exhausted_at", "margins"),
    [
        ([120, 110, 90], None, [0, 20, 30]),  # fits at last
        ([110, 130, 110], 1, [0, 10, 0]),  # the smallest plan's code is larger than the first's: that one is taken
        ([150, 140, 130, 120, 150], None, [0, 50, 90, 120, 120]),  # never fits: the best of all tries
    ],
)
def test_best_effort_takes_the_best_code_that_was_seen(monkeypatch, code_peaks, exhausted_at, margins):
    assert run_with_code_peaks(monkeypatch, code_peaks, exhausted_at) == margins


def test_room_that_is_left_is_used_once_and_given_back_if_that_does_not_fit(monkeypatch):
    assert run_with_code_peaks(monkeypatch, [90, 99], worth_loosening=True) == [0, -9]
    assert run_with_code_peaks(monkeypatch, [90, 101, 90], worth_loosening=True) == [0, -9, 0]


@pytest.mark.parametrize(
    ("attempts", "named"),
    [
        # The first plan's forward is over the budget, so its backward is not generated; the plan of least memory has worse
        # code. At last all of the first plan's code is generated.
        ([({False: 105}, 0, False), ({False: 104, True: 140}, 5, True), ({False: 105, True: 110}, 0, False)], 110),
        # The plan of least memory, simulated to need 102, has far worse code. One for 107 is made.
        ([({False: 90, True: 140}, 0, True), ({False: 90, True: 107}, -7, False)], 107),
        ([({False: 90, True: 108}, 0, True)], 108),
    ],
)
def test_an_error_names_what_holds_and_not_code_that_needs_more(monkeypatch, attempts, named):
    remaining, found = list(attempts), []

    def attempt(self, partitioner):
        (self.peaks, margin, partitioner.exhausted), number = remaining.pop(0), len(attempts) - len(remaining)
        assert (partitioner.extra_headroom_bytes, self.naming) == (margin, number == len(attempts) > 1)
        partitioner.report = SimpleNamespace(predicted_peak_bytes=100, budget_bytes=100, device="cpu")
        partitioner.planning = SimpleNamespace(smallest=SimpleNamespace(peak_bytes=102))
        raise compile_loop._OverBudget(max(self.peaks.values()), 100)

    def infeasible(planning, budget, device, least, plan_file):
        found.append(least)
        return RuntimeError("nothing fits")

    monkeypatch.setattr(compile_loop, "infeasible", infeasible)
    monkeypatch.setattr(compile_loop.CompileLoop, "attempt", attempt)
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    parsed = Options(cost_model="roofline", memory_budget=100, on_infeasible="raise")
    with pytest.raises(RuntimeError, match="nothing fits"):
        compile_loop.CompileLoop(module, [torch.zeros(1, 2)], parsed, {}).run()
    assert (found, remaining) == ([named], [])


def test_best_effort_tries_a_looser_plan_where_that_of_least_memory_has_far_worse_code(monkeypatch):
    """The plan of least memory is simulated to need 102 and its code needs 140; that of a plan for 107 needs 107."""
    remaining = [(140, 0, True), (107, -7, False)]

    def attempt(self, partitioner):
        peak, margin, partitioner.exhausted = remaining.pop(0)
        assert partitioner.extra_headroom_bytes == margin
        self.peaks = {False: 90, True: peak}
        partitioner.report = SimpleNamespace(predicted_peak_bytes=100, budget_bytes=100, device="cpu")
        partitioner.planning = SimpleNamespace(smallest=SimpleNamespace(peak_bytes=102))
        partitioner.limit_bytes = lambda half: 100
        self.check_peaks(partitioner)
        return "compiled"

    monkeypatch.setattr(compile_loop.CompileLoop, "attempt", attempt)
    monkeypatch.setattr(compile_loop.CompileLoop, "finish", lambda self, compiled, *_: compiled)
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    parsed = Options(cost_model="roofline", memory_budget=100, on_infeasible="best_effort")
    assert compile_loop.CompileLoop(module, [torch.zeros(1, 2)], parsed, {}).run() == "compiled"
    assert not remaining


@pytest.mark.parametrize("planned_around", [False, True])
def test_a_region_that_could_not_be_planned_does_not_hide_the_report_around_it(monkeypatch, planned_around):
    """No record is kept of either, so that the next process warns of it too."""
    published, saved = [], []

    def attempt(self, partitioner):
        partitioner.fell_back = True  # by the region, which is planned first
        if planned_around:
            partitioner.report = SimpleNamespace(compiled=lambda *_: "a report", budget_bytes=None)
        return "compiled"

    monkeypatch.setattr(compile_loop.CompileLoop, "attempt", attempt)
    monkeypatch.setattr(compile_loop, "published", lambda compiled, report, _: published.append(report) or compiled)
    monkeypatch.setattr(compile_loop.records, "save", lambda *_: saved.append(1))
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    compilation = compile_loop.CompileLoop(module, [torch.zeros(1, 2)], Options(cost_model="roofline", memory_budget=100), {})
    assert compilation.run() == "compiled"
    assert (published, saved) == ((["a report"] if planned_around else []), [])
