"""Torch's private name for the frame in which a module runs."""

from __future__ import annotations

import inspect

from torch import nn


def running_module() -> nn.Module | None:
    """Returns the innermost module whose forward this thread runs at present; None outside of all modules."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
