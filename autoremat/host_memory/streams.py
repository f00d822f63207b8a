"""Streams and events of an accelerator, and what stands for them on a CPU, where a copy is complete when its call returns."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch


class Event(Protocol):
    """What is used of an event. One that was never recorded counts as complete."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """What is used of a stream."""

    def wait_event(self, event: Event, /) -> None: ...
    def wait_stream(self, stream: Stream, /) -> None: ...
    def record_event(self, event: Event, /) -> Event: ...
    def __enter__(self) -> object: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> object: ...


class _Complete:
    """An event that has happened."""

    def synchronize(self) -> None: ...


class _Immediate:
    """A stream on which all work is complete."""

    def wait_event(self, event: Event, /) -> None: ...
    def wait_stream(self, stream: Stream, /) -> None: ...
    def record_event(self, event: Event, /) -> Event:
        return event

    def __enter__(self) -> object: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> object: ...


_COMPLETE, _IMMEDIATE = _Complete(), _Immediate()


def new_event(device: torch.device) -> Event:
    """Returns an event for work on the streams of ``device``."""
    return _COMPLETE if device.type == "cpu" else torch.Event(device)


def new_stream(device: torch.device) -> Stream:
    """Returns a stream of its own on ``device``."""
    return _IMMEDIATE if device.type == "cpu" else torch.Stream(device)


def compute_stream(device: torch.device) -> Stream:
    """Returns the stream on which this thread computes on ``device``."""
    return _IMMEDIATE if device.type == "cpu" else torch.accelerator.current_stream(device)
