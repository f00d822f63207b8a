"""Pieces of text that errors and reports share: aligned rows, and what binds a peak."""

from __future__ import annotations

from collections.abc import Sequence

from autoremat.basics.units import format_bytes

PARTS_SHOWN = 3
"""Number of kinds of bytes that are named as what binds a peak."""


def aligned(rows: Sequence[tuple[str, ...]], alignments: str) -> list[str]:
    """Returns rows of cells as lines with aligned columns. ``alignments`` holds "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths, strict=True)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def binding(parts: Sequence[tuple[str, int]]) -> str:
    """Returns the largest kinds of bytes at a peak, each with its share. ``parts`` are all kinds, the largest first."""
    total = max(1, sum(size for _, size in parts))
    return ", ".join(f"{format_bytes(size)} ({size / total:.0%}) of {name}" for name, size in parts[:PARTS_SHOWN])
