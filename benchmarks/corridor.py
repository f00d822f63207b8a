"""The way from ``backend`` to Inductor, by a trace of a real compilation: own frames on the stack, and functions passed.

    python benchmarks/corridor.py

Functions count once, in the sequence of their first calls, up to the call of Inductor's ``compile_fx`` for the first attempt.
Those of the standard library, of torch and below ``basics`` do not count.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._inductor.compile_fx as inductor
from torch import nn

import autoremat

PACKAGE = Path(autoremat.__file__).resolve().parent


def own_name(frame: FrameType) -> str | None:
    """Returns module and name of a function of the package; None for any other, for contexts and for comprehensions."""
    file, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
    if PACKAGE not in file.parents or "basics" in file.parts or name.endswith(">") and "<locals>" not in name:
        return None
    return f"{file.relative_to(PACKAGE).with_suffix('').as_posix()}:{name}"


def main() -> None:
    passed: dict[str, None] = {}
    stack: list[str] = []
    original: Any = inductor.compile_fx

    def watch(frame: FrameType, event: str, argument: object) -> None:
        name = own_name(frame) if event == "call" else None
        if name is not None and (passed or name.endswith("dynamo_backend:backend")):
            passed[name] = None

    def compile_fx(*arguments: Any, **keywords: Any) -> Any:
        sys.setprofile(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not stack:
            names: list[str] = []
            while frame is not None:
                name = own_name(frame)
                if name is not None:
                    names.append(name)
                if name is not None and name.endswith("dynamo_backend:backend"):
                    break
                frame = frame.f_back
            stack.extend(reversed(names))
        inductor.compile_fx = original
        return original(*arguments, **keywords)

    inductor.compile_fx = compile_fx
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    os.environ["AUTOREMAT_CACHE_DIR"] = tempfile.mkdtemp()  # an earlier process may know the compilation
    options = {"memory_budget": "1MiB", "cost_model": "roofline", "force_disable_caches": True}
    compiled = torch.compile(model, backend="autoremat", options=options)
    sys.setprofile(watch)
    try:
        compiled(torch.randn(64, 32)).sum().backward()
    finally:
        sys.setprofile(None)
    print(f"{len(stack)} own frames on the stack when Inductor is called:")
    print("\n".join(f"  {name}" for name in stack))
    print(f"{len(passed)} own functions passed on the way")
    print("\n".join(f"  {name}" for name in passed))


if __name__ == "__main__":
    main()
