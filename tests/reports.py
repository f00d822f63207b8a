"""Reports of plans for a chain of values with places in a model."""

import dataclasses

from strategies import chain, changed

from autoremat.planner.plans.limits import Limits
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.report.peak_snapshot import peak_of, profile_of
from autoremat.report.report import Report

LENGTH = 24
SIZE = 1 << 20


def report_for(budget: int | None, **fields: object) -> Report:
    """The report of a plan for a chain of values of 1 MiB, each with a place in a model."""
    graph = chain(LENGTH, size=SIZE, seconds=1e-3, forward_outputs=(LENGTH,))
    values = tuple(
        dataclasses.replace(v, module=f"layers.{i}", source=f"/home/user/project/net/model.py:{i}")
        for i, v in enumerate(graph.values)
    )
    graph = changed(dataclasses.replace(graph, values=values), saving_seconds_per_byte=1e-12)
    return report_on(Planner(graph).find(Limits(budget)), budget, **fields)


def report_on(planning: PlanningResult, budget: int | None, **fields: object) -> Report:
    found, baseline = planning.plan or planning.smallest, planning.baseline
    plan = dataclasses.replace(
        found,
        budget_bytes=budget,
        lower_bound_bytes=planning.lower_bound_bytes,
        lower_bound_seconds=planning.lower_bound_seconds,
        interrupted=planning.interrupted,
    )
    facts = {
        "cost_model": "roofline", "calibrated_share": 0.0, "assumed_share": 1.0, "compiler": "aot_eager", "device": "cpu",
        "planning_seconds": 0.25, "baseline_peak_bytes": baseline.peak_bytes, "peak_before": peak_of(baseline),
        "profile_before": profile_of(baseline), "smallest_peak_bytes": planning.smallest.peak_bytes, "limit_bytes": budget,
        "ended_by_clock": planning.ended_by_clock, "fastest_seconds": baseline.predicted_seconds,
    }  # fmt: skip
    return Report(plan=plan, **facts | fields)
