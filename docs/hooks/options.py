"""Writes the table of options on their page from `autoremat/options/options.py`, where each option has its statement.

python docs/hooks/options.py
"""

import ast
import inspect
from pathlib import Path

from autoremat.options.options import Options

PAGE = Path(__file__).parents[1] / "options.md"
HEAD = "| Key | Values | Default | Effect |\n|---|---|---|---|\n"


def table() -> str:
    """Returns the rows, one per option: the text below a field is its values, a bar, and its effect."""
    (kind,) = ast.parse(inspect.getsource(Options)).body
    assert isinstance(kind, ast.ClassDef)
    rows = []
    for field, text in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name, words = ast.unparse(field.target), str(ast.literal_eval(text.value))
            values, effect = " ".join(words.split()).split(" | ")
            default = getattr(Options(), name)
            shown = f"{default >> 20} MiB" if name == "auto_headroom" else "`{}`".format(repr(default).replace("'", '"'))
            rows.append(f"| `{name}` | {values} | {shown} | {effect} |\n")
    return HEAD + "".join(rows)


def with_table(page: str) -> str:
    """Returns the page with the table of today."""
    before, rest = page.split(HEAD)
    return before + table() + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
