"""Lets Accelerate, and with it the Trainer of Hugging Face, know the names "autoremat" and "autoremat:6GiB".

Both look names of backends up in the enumeration ``DynamoBackend``, a fixed list. The Trainer passes no options, so a name may
state the budget. Imports neither torch nor Accelerate.
"""

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

MODULE, NAME = "accelerate.utils.dataclasses", "AUTOREMAT"


class _Watch(MetaPathFinder):
    """Calls :func:`accept` once Accelerate has defined its list."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_accept(module: Any) -> None:
                execute(module)
                accept(module.DynamoBackend)

            spec.loader.exec_module = execute_and_accept  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Accepts the names when Accelerate is imported, or now if it is. Torch calls this at its import, by an entry point."""
    if MODULE in sys.modules:
        accept(sys.modules[MODULE].DynamoBackend)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def accept(backends: Any) -> None:
    """Adds the names to the enumeration ``backends``."""
    if any(str(getattr(backend, "value", "")) == NAME for backend in backends):
        return  # a later version may know the name
    otherwise = backends._missing_

    @functools.cache
    def named(name: str) -> Any:
        if name != NAME:
            _register(name.lower())
        ours: Any = str.__new__(backends, name)
        ours._name_ = ours._value_ = name
        backends._member_map_[name] = ours  # copies of members are looked up by name here before Python 3.11.4
        return ours

    def look_up(value: object) -> Any:
        is_ours = isinstance(value, str) and (value == NAME or value.startswith(f"{NAME}:"))
        return named(value) if is_ours else otherwise(value)

    backends._missing_ = look_up  # the hook of enumerations for unknown values


def _register(name: str) -> None:
    from autoremat.compiler.dynamo_backend import backend
    from autoremat.torch_private.dynamo import register_backend

    def with_budget(gm: Any, inputs: Any, *, options: Any = None, mode: str | None = None) -> Any:
        return backend(gm, inputs, options={"memory_budget": name.partition(":")[2], **(options or {})}, mode=mode)

    register_backend(with_budget, name=name)
