"""Streams and events of an accelerator, and what stands for them on a CPU, where a copy is complete when its call returns."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Immediate(contextlib.AbstractContextManager[None]):
    """A stream on which all work is complete, and an event on it."""

    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def record_event(self, event: object) -> object:
        return event

    def synchronize(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_IMMEDIATE = _Immediate()


def new_event(device: torch.device) -> Any:
    """Returns an event for work on the streams of ``device``. Until it is recorded, it counts as complete."""
    return _IMMEDIATE if device.type == "cpu" else torch.Event(device)


def new_stream(device: torch.device) -> Any:
    """Returns a stream of its own on ``device``."""
    return _IMMEDIATE if device.type == "cpu" else torch.Stream(device)


def compute_stream(device: torch.device) -> Any:
    """Returns the stream on which this thread computes on ``device``."""
    return _IMMEDIATE if device.type == "cpu" else torch.accelerator.current_stream(device)
