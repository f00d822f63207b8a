"""Formulas as MathML, which browsers draw themselves: no script, nothing loaded from elsewhere. Roles of docstrings as code."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
ROLE = re.compile(r":(?:class|meth|func|attr|data):(<code>)")


def on_page_content(content: str, **_: Any) -> str:
    """What mkdocs calls with the HTML of each page."""

    def drawn(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]), display="inline" if match[1] == "span" else "block")

    return ROLE.sub(r"\1", FORMULA.sub(drawn, content))
