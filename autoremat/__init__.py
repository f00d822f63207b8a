"""A torch.compile backend that makes a training step fit a memory budget by recomputing activations.

    compiled = torch.compile(model, backend="autoremat", options={"memory_budget": "6GiB"})

    plan = autoremat.plan(autoremat.Graph.from_dag(seconds, sizes, edges), memory_budget=0.5)

The imports in ``__init__.pyi`` are the public interface. A name is imported on first use, so that a program that only plans
graphs does not import torch.
"""

import ast
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    __version__ = version("autoremat")
except PackageNotFoundError:  # used from a clone that is not installed
    __version__ = "0+unknown"

_MODULE_OF = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module == __name__:  # a public module
        value: object = import_module(f"{module}.{name}")
    else:
        value = getattr(import_module(module), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


import_module("autoremat.tools.accelerate_name").watch()
if "torch" in sys.modules:
    import_module("autoremat.capture.tensor_names")  # so that `torch.ops.autoremat.named` is there without a look-up here
