"""Habits of the package's code: where it reads the environment, and what it leaves to tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

from layers import SOURCES

FILES = sorted({path.resolve() for path in SOURCES.values()})


def names_in(path: Path) -> Iterator[str]:
    """Dotted names that a file uses or imports, and its texts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield repr(node.value)


def test_production_code_uses_no_mocks():
    found = {path.name for path in FILES for name in names_in(path) if name.split(".")[0] == "unittest"}
    assert not found, "mocks are for tests"


def test_one_module_names_the_variables_of_the_environment():
    found = {path.name for path in FILES for name in names_in(path) if name.startswith("'AUTOREMAT_")}
    assert found == {"environment.py"}, "it strips their values, and lists them for the warning of unknown ones"


def test_one_function_warns_users():
    found = {path.name for path in FILES for name in names_in(path) if name in ("warnings.warn", "warnings.warn_explicit")}
    assert found == {"warn.py"}, "it finds the user's line"
