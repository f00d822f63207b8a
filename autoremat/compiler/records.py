"""Records of compilations on disk. They supply the report and the plan of a compilation that torch's caches answer."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from autoremat.basics.disk_cache import UNUSABLE, checked_bytes, read_text, write_text
from autoremat.basics.errors import PlanFileError
from autoremat.planner.plans.plan import Plan
from autoremat.report.report import Report


@dataclass(frozen=True)
class Record:
    """The record of a compilation.

    ``report`` is None if the graph has no backward. ``extra_headroom_bytes`` is the headroom below the user's budget at which
    the generated code fitted.
    """

    report: Report | None
    extra_headroom_bytes: int = 0
    agreement: str = ""
    """Name of the agreement of several ranks under which the code was made; empty for a process by itself."""


def load(key: str) -> Record | None:
    """Returns the record of ``key``, or None if it is missing or unusable."""
    try:
        fields: dict[str, Any] = json.loads(read_text("reports", key) or "")
        headroom, agreement = fields["extra_headroom_bytes"], str(fields.get("agreement", ""))
        checked_bytes(max(headroom, -headroom))  # negative for a plan that is looser than the budget
        if fields["report"] is None:
            return Record(None, headroom, agreement)
        report = Report.from_json(json.dumps(fields["report"]))
        return Record(dataclasses.replace(report, plan=_plan(key)), headroom, agreement)
    except UNUSABLE:
        return None


def _plan(key: str) -> Plan | None:
    """Returns the plan that belongs to the report of ``key``; None if it is lost, because the report works without it."""
    text = read_text("plans", key)
    try:
        return None if text is None else Plan.loads(text)
    except PlanFileError:
        return None


def save(key: str, record: Record) -> None:
    """Writes the record of ``key``, and its plan."""
    if record.report is not None and record.report.plan is not None:
        write_text("plans", key, record.report.plan.dumps())
    report = None if record.report is None else json.loads(record.report.to_json())
    fields = {"report": report, "extra_headroom_bytes": record.extra_headroom_bytes, "agreement": record.agreement}
    write_text("reports", key, json.dumps(fields))
