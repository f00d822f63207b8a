"""Reads the package's environment variables as text. An empty variable counts as unset."""

import difflib
import os

from autoremat.basics.errors import OptionWarning
from autoremat.basics.warn import warn_user

PREFIX = "AUTOREMAT_"
BUDGET, COST_MODEL, POLICY = "AUTOREMAT_MEMORY_BUDGET", "AUTOREMAT_COST_MODEL", "AUTOREMAT_POLICY"
PROGRESS, CACHE_FOLDER, CACHE_SIZE = "AUTOREMAT_PROGRESS", "AUTOREMAT_CACHE_DIR", "AUTOREMAT_CACHE_SIZE"
NEWER_TORCH = "AUTOREMAT_NEWER_TORCH"
KNOWN = (BUDGET, COST_MODEL, POLICY, PROGRESS, CACHE_FOLDER, CACHE_SIZE, NEWER_TORCH)

_refused: set[str] = set()
"""Unknown variables that a warning has named already."""


def said(variable: str) -> str:
    """Returns the value of a variable without surrounding spaces, or "" if it is unset."""
    return os.environ.get(variable, "").strip()


def given() -> dict[str, str]:
    """Returns the variables that begin with ``AUTOREMAT_``, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}


def warn_of_unknown() -> None:
    """Warns of variables that begin with ``AUTOREMAT_`` but are unknown, once per variable."""
    unknown = [name for name in given() if name not in KNOWN and name not in _refused]
    for name in unknown:
        _refused.add(name)
        nearest = difflib.get_close_matches(name[len(PREFIX) :], [known[len(PREFIX) :] for known in KNOWN], n=1)
        hint = f"Is {PREFIX}{nearest[0]} meant?" if nearest else "None of these names is close."
        warn_user(
            f"the environment variable {name} has no effect: nothing reads it. {hint} Known: {', '.join(KNOWN)}", OptionWarning
        )
