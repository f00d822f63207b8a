"""What is kept on disk: reports and plans, so that a compilation that is answered from torch's caches has them too; the
rates of devices and the times of ops, so that they are measured once.

JSON files under ``AUTOREMAT_CACHE_DIR`` or the user's cache folder, one for each compiled graph or device. Nothing read from
them is executed; a file that does not parse is as good as none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from autoremat import plan_files
from autoremat.errors import PlanFileError
from autoremat.plans import Plan
from autoremat.report import Report


@dataclass(frozen=True)
class Record:
    """What is remembered of a compilation: the report (None: the graph has no backward) and how far the plan's own budget
    was set below the user's before the code generator's schedule fitted."""

    report: Report | None
    margin_bytes: int = 0


def folder(kind: str = "reports") -> Path:
    """Where the files of one kind lie."""
    chosen = os.environ.get("AUTOREMAT_CACHE_DIR")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("autoremat")) / kind


def read_text(kind: str, key: str) -> str | None:
    """What was written of ``kind`` under ``key``, or None."""
    try:
        return (folder(kind) / f"{key}.json").read_text()
    except (OSError, ValueError):
        return None


def write_text(kind: str, key: str, text: str) -> None:
    """Write a file in one piece. A folder that cannot be written is no error: the next process does the work again."""
    try:
        folder(kind).mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(kind), suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, folder(kind) / f"{key}.json")
    except OSError:
        return


def load(key: str) -> Record | None:
    """The record of ``key``, or None."""
    try:
        fields = json.loads(read_text("reports", key) or "")
        if fields["report"] is None:
            return Record(None, int(fields["margin_bytes"]))
        report = Report.from_json(json.dumps(fields["report"]))
        return Record(dataclasses.replace(report, plan=_plan(key)), int(fields["margin_bytes"]))
    except (ValueError, KeyError, TypeError):
        return None


def _plan(key: str) -> Plan | None:
    """The plan of the report under ``key``; None if it is gone, for the report does without it."""
    text = read_text("plans", key)
    try:
        return None if text is None else plan_files.parse(text)
    except PlanFileError:
        return None


def save(key: str, record: Record) -> None:
    """Write the record of ``key``, and its plan."""
    if record.report is not None and record.report.plan is not None:
        write_text("plans", key, plan_files.dump(record.report.plan))
    report = None if record.report is None else json.loads(record.report.to_json())
    write_text("reports", key, json.dumps({"report": report, "margin_bytes": record.margin_bytes}))
