"""Displays results: one line at a prompt, tables in ``print`` and ``rich.print``, HTML in notebooks."""

import html
import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoremat.basics.codec import printable

WIDTH = 120


def short_source(source: str) -> str:
    """Returns the last three parts of an absolute path. A path within an installed package is relative, and stays whole."""
    return "/".join(source.replace("\\", "/").split("/")[-3:]) if os.path.isabs(source) else source


def as_text(*parts: RenderableType) -> str:
    """Returns the text that ``rich`` would print, without colours."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, force_terminal=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


class PlainTable(Table):
    """A table without rules, whose cells are plain text, not markup. ``print`` shows it at the width of the reports."""

    def __init__(self, title: str, columns: Iterable[str], numbers: int, show_header: bool = True) -> None:
        """Makes an empty table. The first ``numbers`` columns hold figures and are aligned right."""
        super().__init__(
            title=Text(printable(title)) if title else None, title_justify="left", box=None, pad_edge=False,
            padding=(0, 2, 0, 0), show_header=show_header,
        )  # fmt: skip
        for number, column in enumerate(columns):
            figure = number < numbers
            self.add_column(column, justify="right" if figure else "left", no_wrap=figure, overflow="fold")

    def add_row(self, *cells: Any, **keywords: Any) -> None:
        """Adds a row. Each cell is converted to printable text."""
        super().add_row(*(Text(printable(str(cell))) for cell in cells), **keywords)

    def __str__(self) -> str:
        return as_text(self)


def named_figures(figures: Iterable[tuple[str, str]]) -> PlainTable:
    """Returns a table with one row per (name, figure)."""
    table = PlainTable("", ("", ""), numbers=0, show_header=False)
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    for name, text in figures:
        table.add_row(name, text)
    return table


class Shown:
    """Base class of results that display themselves as a line and as tables."""

    def line(self) -> str:
        """Returns the line that a prompt shows."""
        raise NotImplementedError

    def tables(self) -> Sequence[PlainTable]:
        """Returns the tables that ``print`` shows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {printable(self.line())}>"

    def __str__(self) -> str:
        return as_text(self.__rich__())

    def __rich__(self) -> Group:
        parts: list[RenderableType] = []
        for table in self.tables():
            parts += ["", table] if parts else [table]
        return Group(*parts)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
