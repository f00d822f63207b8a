"""Helpers of the ablation's parts: switches of mechanisms, means in tables, and the folder of results."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Switch = Callable[[], contextlib.AbstractContextManager[Any]]
"""Switches a mechanism off, inside."""


def nothing(*_: Any, **__: Any) -> int:
    return 0


def mean(figures: Sequence[float]) -> str:
    return f"{statistics.fmean(figures):.2f}" if figures else "-"
