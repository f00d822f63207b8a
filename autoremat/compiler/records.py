"""Records of compilations on disk. They supply the report and the plan of a compilation that torch's caches answer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from autoremat.basics.codec import plain
from autoremat.basics.disk_cache import UNUSABLE, checked_bytes, read_text, write_text
from autoremat.report.data import CODEC
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
        record: Record = CODEC.read(Record, json.loads(read_text("reports", key) or ""))
        checked_bytes(abs(record.extra_headroom_bytes))  # negative for a plan that is looser than the budget
        return record
    except UNUSABLE:
        return None


def save(key: str, record: Record) -> None:
    """Writes the record of ``key``."""
    write_text("reports", key, json.dumps(plain(record)))
