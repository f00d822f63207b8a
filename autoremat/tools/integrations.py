"""Gives code that asks for Inductor this backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoremat.torch_private import hooks


@contextlib.contextmanager
def as_inductor() -> Iterator[None]:
    """Makes ``torch.compile`` use autoremat where code in this thread asks for Inductor, by name or by default, while active.

    Some libraries accept no other name of a backend, such as torchtitan for models with FlexAttention. autoremat generates code
    with Inductor, so what those libraries require of the backend still holds. The budget comes from ``autoremat.configure``.

    The calls of ``torch.compile`` and ``module.compile`` must lie inside. The compiled functions may run, and compile, later.
    """

    def with_this_backend(compile_: Callable[..., Any], *arguments: Any, backend: Any = "inductor", **settings: Any) -> Any:
        return compile_(*arguments, backend="autoremat" if backend == "inductor" else backend, **settings)

    with hooks.hooked(torch, "compile", with_this_backend):
        yield
