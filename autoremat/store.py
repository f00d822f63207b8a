"""Reports on disk, so that a compilation that is answered from torch's caches has its report too.

One JSON file per compiled graph, under ``AUTOREMAT_CACHE_DIR`` or the user's cache folder. Nothing read from it is executed;
a file that does not parse is as good as none.
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


def folder() -> Path:
    """Where the records lie."""
    chosen = os.environ.get("AUTOREMAT_CACHE_DIR")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("autoremat")) / "reports"


def load(key: str) -> Record | None:
    """The record of ``key``, or None."""
    try:
        fields = json.loads((folder() / f"{key}.json").read_text())
        report = fields["report"]
        return Record(None if report is None else Report.from_json(json.dumps(report)), int(fields["margin_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: str, record: Record) -> None:
    """Write the record of ``key`` in one piece. A folder that cannot be written is no error: the next process plans anew."""
    report = None if record.report is None else json.loads(record.report.to_json())
    text = json.dumps({"report": report, "margin_bytes": record.margin_bytes})
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(), suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, folder() / f"{key}.json")
    except OSError:
        return
