"""Matches patterns that select parts of a model: globs of module paths, names of ops, names of tensors.

A star stands for any characters, including dots. A pattern may omit the beginning of a module path: "layers.*.mlp" also matches
"model.layers.0.mlp".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from autoremat.planner.graph.op import Op

NEAREST = 3
"""Number of similar names that are listed for a pattern that matches nothing."""


def matches_path(path: str, pattern: str) -> bool:
    """Returns True if ``pattern`` matches a module's path or the end of it."""
    return any(fnmatchcase(f".{path}", one) for one in (pattern, f"*.{pattern}"))


def prefixes(path: str) -> list[str]:
    """Returns the path of a module and of all modules around it: "a", "a.b", "a.b.c"."""
    parts = path.split(".") if path else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def targets(op: Op) -> list[str]:
    """Returns the names of an op and of the model's op that it was decomposed from, each with and without overload."""
    names = [name for name in (op.target, op.decomposed_from) if name]
    return names + [name.rpartition(".")[0] for name in names if name.count(".") > 1]


def matches_op(op: Op, pattern: str) -> bool:
    """Returns True if ``pattern`` matches the op's target, a name of its result, or a module that it runs in."""
    if any(fnmatchcase(name, pattern) for name in (*targets(op), *op.tensor_names)):
        return True
    return any(matches_path(prefix, pattern) for scope in op.scopes[-1:] for prefix in prefixes(scope.path))


def nearest(pattern: str, ops: Iterable[Op], others: Iterable[str] = ()) -> str:
    """Returns a phrase with the known names that are similar to ``pattern``. Numbers in paths are shown as stars."""
    known = dict.fromkeys(others)
    for op in ops:
        known.update(dict.fromkeys((*op.tensor_names, *targets(op))))
        for scope in op.scopes:
            path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", scope.path)
            known.update(dict.fromkeys([path, path.rpartition("*.")[2]]))
    known.pop("", None)
    close = difflib.get_close_matches(pattern, known, n=NEAREST, cutoff=0.5)
    return f"nearest: {', '.join(map(repr, close))}" if close else "nothing there is similar"
