"""Streams and events of the emulated card. Work on every stream has finished when its call returns."""

from __future__ import annotations

import time
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


class Stream(torch.Stream):
    """A stream: a number that is the current one of a thread, or not."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Any:
        return super().__new__(cls, **known) if known else super().__new__(cls, DEVICE, priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle of the driver: the stream's number."""
        return int(self.stream_id)


class Event(torch.Event):
    """An event by the host's clock."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
        return super().__new__(cls, DEVICE, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(stream or torch.cuda.current_stream())
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from this event to ``end``."""
        return float(1e3 * (end.seconds - self.seconds))


def _numbers(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def install() -> None:
    """Makes streams and events those of `torch.cuda`."""
    torch.cuda.Stream = torch.cuda.streams.Stream = Stream  # type: ignore[misc,attr-defined]
    torch.cuda.Event = torch.cuda.streams.Event = Event  # type: ignore[misc,attr-defined]
    bindings: Any = torch._C
    bindings._cuda_getCurrentStream = lambda device: _numbers(torch.accelerator.current_stream(DEVICE))
    bindings._cuda_getDefaultStream = lambda device: (0, DEVICE.index, Stream().device_type)
    bindings._cuda_setStream = lambda **numbers: torch.accelerator.set_stream(torch.Stream(**numbers))
