"""Reports of plans for a chain of values with places in a model."""

from __future__ import annotations

import dataclasses

from strategies import chain

from autoremat.planner.graph.graph import Graph
from autoremat.planner.search.planner import Planner
from autoremat.report.report import Report

LENGTH = 24
SIZE = 1 << 20


def network() -> Graph:
    """A chain of values of 1 MiB, each with a place in a model."""
    graph = chain(LENGTH, size=SIZE, seconds=1e-3, forward_outputs=(LENGTH,))
    values = tuple(
        dataclasses.replace(v, module=f"layers.{i}", source=f"/home/user/project/net/model.py:{i}")
        for i, v in enumerate(graph.values)
    )
    return dataclasses.replace(graph, values=values, saving_seconds_per_byte=1e-12)


def report_for(budget: int | None, **fields: object) -> Report:
    planning = Planner(network()).find(budget)
    given = {"budget_bytes": budget, "planning_seconds": 0.25, "compiler": "aot_eager", "device": "cpu", **fields}
    return Report.of(planning, planning.plan or planning.smallest, **given)
