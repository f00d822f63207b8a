"""Published trade-offs of memory against time: the stored table, and the order of the clearest ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "benchmarks" / "results" / "published_tradeoffs.json"


@pytest.fixture
def tradeoffs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published_tradeoffs

    return published_tradeoffs


def test_each_stored_row_is_in_range_or_says_why(tradeoffs):
    lines = json.loads(STORED.read_text())["rows"]
    assert len(lines) >= 20
    assert {line["name"]: line["layers"] for line in lines} == {row.name: row.step.layers for row in tradeoffs.ROWS}
    for line in lines:
        assert not line["in_range"] or line["low"] <= line["added"] <= line["high"]
        assert line["in_range"] or line["reason"], line["name"]


@pytest.mark.slow
def test_policies_cost_what_is_published_in_the_published_order(tradeoffs):
    step = dataclasses.replace(tradeoffs.LLAMA_H100, layers=1)
    fastest = step.reports(memory_budget=None).predicted_seconds

    def added(**options) -> float:
        return step.reports(**options).predicted_seconds / fastest - 1

    norms, attention = added(policy="selective:*norm,*.act"), added(recompute=("*scaled_dot_product*",))
    mlp, full = added(policy="selective:mlp"), added(policy="full")
    assert norms <= 0.02
    assert norms < attention < mlp < full
    assert 0.2 <= full <= 0.33
