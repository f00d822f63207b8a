"""The loop of attempts with a stage of lowering that only says what its code needs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from requests_of_options import request_with

import autoremat
from autoremat import Options
from autoremat.compiler import compile_loop, peers, records
from autoremat.compiler.lowering import GraphSource, Lowered
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.partitioning import Partitioning
from autoremat.planner.search.planner import Planner
from autoremat.torch_private import compilers
from autoremat.torch_private.inductor_lowering import LoweredPeak

pytestmark = pytest.mark.filterwarnings("ignore::autoremat.basics.errors.BudgetWarning")


def fake_lower(monkeypatch: pytest.MonkeyPatch, code_peaks: Sequence[int]) -> list[Partitioning]:
    """From here on, attempts generate code of these peaks, after all stages up to it. Returns the attempts."""
    found: list[Partitioning] = []

    def lower(source, partitioning, identity, decide):
        compilers.compile_uncompiled(source.module, source.inputs, Partitioner(partitioning))
        peak = code_peaks[len(found)]
        found.append(partitioning)
        lowered = Lowered({False: peak, True: peak})
        verdict = decide(lowered)
        return (None if verdict else "compiled"), lowered, verdict

    monkeypatch.setattr(compile_loop, "lower", lower)
    monkeypatch.setattr(compile_loop.records, "load", lambda key: None)
    return found


def compiled(budget: int | None, **options: object) -> compile_loop.CompiledGraph:
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
    found: list[compile_loop.CompiledGraph] = []

    def backend(module, inputs):
        parsed = Options(cost_model="roofline", memory_budget=budget, **options)
        found.append(compile_loop.compile_graph(GraphSource(module, inputs, {}), request_with(parsed)))
        return module.forward

    torch.compile(torch.nn.Sequential(*layers), backend=backend)(torch.ones(64, 32))
    return found[0]


BASELINE = 192_640
"""Bytes of the model's baseline with code headroom. The minimum peak is about 39,000 bytes lower."""


def test_the_budget_of_the_next_plan_is_lower_by_what_the_code_needs_more(monkeypatch):
    attempts = fake_lower(monkeypatch, [BASELINE + 2000, BASELINE - 1])
    found = compiled(BASELINE)
    first, second = (attempt.planned for attempt in attempts)
    excess = BASELINE + 2000 - first.report.predicted_peak_bytes - first.code_headroom_bytes
    assert second.context.extra_headroom_bytes == excess
    assert second.plan.peak_bytes + second.code_headroom_bytes <= BASELINE - excess
    assert (found.function, found.report.replans, found.report.compiled_peak_bytes) == ("compiled", 1, BASELINE - 1)
    assert found.record.extra_headroom_bytes == excess


@pytest.mark.slow
def test_a_planner_serves_all_attempts_on_its_graph(monkeypatch):
    made, original = [], Planner.__post_init__
    monkeypatch.setattr(Planner, "__post_init__", lambda self: made.append(self) or original(self))
    attempts = fake_lower(monkeypatch, [BASELINE + 2000, BASELINE + 1, BASELINE])
    compiled(BASELINE)
    assert len(attempts) == 3
    (planner,) = made
    for attempt in attempts:
        planned = attempt.planned
        assert planned.planner is planner
        limit = BASELINE - planned.code_headroom_bytes - planned.context.extra_headroom_bytes
        assert Planner(planner.graph).find(limit).plan.schedule == planned.plan.schedule


def test_a_share_of_one_is_the_peak_of_the_baselines_code(monkeypatch):
    fake_lower(monkeypatch, [10 * BASELINE])
    assert compiled(1.0).report.budget_bytes == 10 * BASELINE


@pytest.mark.parametrize("planned_around", [False, True])
def test_a_region_that_could_not_be_planned_does_not_hide_the_report_around_it(monkeypatch, planned_around):
    def fails(priced, context, earlier):
        raise RuntimeError("as if")

    attempts = fake_lower(monkeypatch, [1000])
    lower = compile_loop.lower

    def region_first(source, attempt, identity, decide):
        attempt.fell_back = True  # by the region, which is planned first
        return lower(source, attempt, identity, decide)

    monkeypatch.setattr(compile_loop, "lower", region_first)
    if not planned_around:
        monkeypatch.setattr(peers, "plan_graph", fails)
        with pytest.warns(autoremat.FallbackWarning):
            found = compiled(None, on_planning_error="fallback")
    else:
        found = compiled(None, on_planning_error="fallback")
    assert (found.report is not None, found.record) == (planned_around, None)
    assert len(attempts) == 1


def test_both_halves_are_held_to_the_pool_of_cuda_graphs_at_its_largest():
    forward = LoweredPeak(False, peak_bytes=700, pool_bytes=600)
    backward = LoweredPeak(True, peak_bytes=950, pool_bytes=900)
    assert Lowered.of({False: forward}) == Lowered({False: 700}, pool_bytes=600)
    assert Lowered.of({False: forward, True: backward}) == Lowered({False: 1000, True: 950}, pool_bytes=900)
    without = {False: LoweredPeak(False, 700), True: LoweredPeak(True, 950, is_estimate=True)}
    assert Lowered.of(without) == Lowered({False: 700, True: 950}, is_estimate=True)


@pytest.mark.parametrize("number", [10**60, 1.5, "1"])
def test_a_record_with_an_implausible_headroom_counts_as_absent(number: object, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"report": None, "extra_headroom_bytes": 512, "agreement": ""}
    monkeypatch.setattr(records, "read_text", lambda *_: json.dumps(stored))
    assert records.load("key") == records.Record(None, 512)
    stored["extra_headroom_bytes"] = -512  # of a plan that is looser than the budget
    assert records.load("key") == records.Record(None, -512)
    stored["extra_headroom_bytes"] = number  # type: ignore[assignment]
    assert records.load("key") is None
