"""Makes the README's links absolute, for package indexes. All other metadata is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def value(key: str) -> str:
    return re.search(rf'^{key} = "(.+)"$', PROJECT, re.MULTILINE)[1]


def absolute(link: re.Match) -> str:
    form = "raw" if link[1] else "blob"  # a picture or a page
    return f"{link[1]}[{link[2]}]({value('Repository')}/{form}/v{value('version')}/{link[3]})"


setup(
    long_description=RELATIVE.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
