"""Records of compilations on disk: a compilation that torch's caches answer has its report and its plan from here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from autoremat.basics.disk_cache import UNUSABLE, read_text, write_text
from autoremat.basics.errors import PlanFileError
from autoremat.planner.plans.plan import Plan
from autoremat.report.report import Report


@dataclass(frozen=True)
class Record:
    """What is remembered of a compilation: the report (None: the graph has no backward) and how far the plan's own budget
    was set below the user's before the code generator's schedule fitted."""

    report: Report | None
    extra_headroom_bytes: int = 0


def load(key: str) -> Record | None:
    """The record of ``key``, or None."""
    try:
        fields: dict[str, Any] = json.loads(read_text("reports", key) or "")
        if fields["report"] is None:
            return Record(None, int(fields["extra_headroom_bytes"]))
        report = Report.from_json(json.dumps(fields["report"]))
        return Record(dataclasses.replace(report, plan=_plan(key)), int(fields["extra_headroom_bytes"]))
    except UNUSABLE:
        return None


def _plan(key: str) -> Plan | None:
    """The plan of the report under ``key``; None if it is gone, for the report does without it."""
    text = read_text("plans", key)
    try:
        return None if text is None else Plan.loads(text)
    except PlanFileError:
        return None


def save(key: str, record: Record) -> None:
    """Write the record of ``key``, and its plan."""
    if record.report is not None and record.report.plan is not None:
        write_text("plans", key, record.report.plan.dumps())
    report = None if record.report is None else json.loads(record.report.to_json())
    write_text("reports", key, json.dumps({"report": report, "extra_headroom_bytes": record.extra_headroom_bytes}))
