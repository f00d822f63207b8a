"""Registers the backend with other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoremat.torch_private import hooks

NAME = "AUTOREMAT"


def accept_in_accelerate() -> None:
    """Makes Accelerate, and with it Hugging Face's Trainer, accept "autoremat" as the name of a backend.

    Both look names up in the enumeration ``DynamoBackend``, which contains a fixed list. This function adds the name in this
    process. A model that you compile yourself (``model.compile(backend="autoremat")``) does not need it.

    Raises ``ImportError`` if Accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    if any(str(getattr(backend, "value", "")) == NAME for backend in DynamoBackend):
        return  # a later version may know the name
    ours: Any = str.__new__(DynamoBackend, NAME)
    ours._name_ = ours._value_ = NAME
    otherwise = DynamoBackend._missing_

    def look_up(value: object) -> Any:
        return ours if value == NAME else otherwise(value)

    DynamoBackend._member_map_[NAME] = ours  # copies of members are looked up by name here before Python 3.11.4
    DynamoBackend._missing_ = look_up  # the hook of enumerations for unknown values


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
