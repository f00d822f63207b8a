"""What is kept on disk: reports, so that a compilation that is answered from torch's caches has its report too; the rates
of devices and the times of ops, so that they are measured once.

JSON files under ``AUTOREMAT_CACHE_DIR`` or the user's cache folder, one for each compiled graph or device. Nothing read from
them is executed; a file that does not parse is as good as none.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

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
        report = fields["report"]
        return Record(None if report is None else Report.from_json(json.dumps(report)), int(fields["margin_bytes"]))
    except (ValueError, KeyError, TypeError):
        return None


def save(key: str, record: Record) -> None:
    """Write the record of ``key``."""
    report = None if record.report is None else json.loads(record.report.to_json())
    write_text("reports", key, json.dumps({"report": report, "margin_bytes": record.margin_bytes}))
