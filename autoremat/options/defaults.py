"""Records the defaults that compiled graphs used, so that ``configure`` can warn that it comes too late for them."""

from collections.abc import Callable, Mapping
from typing import Any

from autoremat.basics.checks import options_of, underscored
from autoremat.basics.errors import OptionWarning
from autoremat.basics.warn import warn_user

_taken: dict[str, object] = {}
"""For each option, the default that the latest compiled graph used."""
_is_left: Callable[[], bool] = bool
"""Returns False once the compiled graphs are gone, because torch was reset."""


def note_compiled(options: Any, given: Mapping[str, object] | None, keys: tuple[str, ...], is_left: Callable[[], bool]) -> None:
    """Records the values of those options ``keys`` that were not ``given`` for a graph.

    The record is valid as long as ``is_left()`` returns True.
    """
    global _is_left
    if not _is_left():
        _taken.clear()
    own, _is_left = underscored(options_of(given)), is_left
    _taken.update({key: getattr(options, key) for key in keys if key not in own})


def warn_if_late(configured: Mapping[str, object]) -> None:
    """Warns if compiled graphs used other defaults than those now ``configured``."""
    if not _is_left():
        _taken.clear()
    late = [key for key, value in configured.items() if key in _taken and _taken[key] != value]
    if late:
        warn_user(
            f"configure({', '.join(f'{key}=...' for key in late)}) comes too late for what is compiled already, which stays "
            "as it is. Call configure before the first step, or torch.compiler.reset() now, so that all is compiled again",
            OptionWarning,
        )
