"""The block whose call runs, and graphs that are compiled once for each plan that their blocks follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

Compiled = Callable[..., Any]
Option = TypeVar("Option", bound=Hashable)

_running: ContextVar[int | None] = ContextVar("autoremat_block", default=None)


def current_block() -> int | None:
    """Returns the number of the block whose forward runs in this thread; None outside of the blocks of ``compile_blocks``."""
    return _running.get()


@contextlib.contextmanager
def running_block(number: int) -> Iterator[None]:
    """Names the block whose forward is the body."""
    token = _running.set(number)
    try:
        yield
    finally:
        _running.reset(token)


def compiled_for_blocks(option_of: Mapping[int | None, Option], compile_with: Callable[[Option], Compiled]) -> Compiled:
    """Returns a callable that runs each block by the code for its option.

    ``option_of`` has the option of each block. ``compile_with`` is called once for each different one. A call from elsewhere
    runs the code of the first block.
    """
    compiled = {option: compile_with(option) for option in dict.fromkeys(option_of.values())}
    if len(compiled) == 1:
        return next(iter(compiled.values()))
    code_of = {block: compiled[option] for block, option in option_of.items()}
    first = next(iter(code_of.values()))

    def call(*args: Any) -> Any:
        return code_of.get(_running.get(), first)(*args)

    return call
