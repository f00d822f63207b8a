"""Writes what pages take from the code: the table of options, and the sections on errors and warnings.

    python docs/hooks/pages.py

An option has its statement below its default in `autoremat/options/options.py`; an error's is its docstring.
"""

import ast
import inspect
import re
from pathlib import Path

from autoremat.basics import errors
from autoremat.options.options import Options

DOCS = Path(__file__).parents[1]
HEAD = "| Key | Values | Default | Effect |\n|---|---|---|---|\n"
CHAPTER = "## Other errors\n"
SECTION = re.compile(r"^### (\w+)\n\n.+?(?=\n\n#)", re.MULTILINE | re.DOTALL)


def option_rows() -> str:
    """Returns the rows of the table, one per option: the text below a field is its values, a bar, and its effect."""
    (kind,) = ast.parse(inspect.getsource(Options)).body
    assert isinstance(kind, ast.ClassDef)
    rows = []
    for field, text in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name, words = ast.unparse(field.target), str(ast.literal_eval(text.value))
            values, effect = " ".join(words.split()).split(" | ")
            default = getattr(Options(), name)
            shown = f"{default >> 20} MiB" if type(default) is int else "`{}`".format(repr(default).replace("'", '"'))
            rows.append(f"| `{name}` | {values} | {shown} | {effect} |\n")
    return "".join(rows)


def options_page(page: str) -> str:
    """Returns the page of options with the table of today."""
    before, rest = page.split(HEAD)
    return before + HEAD + option_rows() + "\n" + rest.partition("\n\n")[2]


def errors_page(page: str) -> str:
    """Returns the page of errors with the docstrings of today; its sections before "Other errors" are written by hand."""
    before, rest = page.split(CHAPTER)
    return before + CHAPTER + SECTION.sub(lambda match: f"### {match[1]}\n\n{inspect.getdoc(getattr(errors, match[1]))}", rest)


PAGES = {DOCS / "options.md": options_page, DOCS / "troubleshooting.md": errors_page}

if __name__ == "__main__":
    for path, written in PAGES.items():
        path.write_text(written(path.read_text()))
