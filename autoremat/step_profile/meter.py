"""Measures the live memory at marks within a step, and the peak between two marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from types import TracebackType

import torch

from autoremat.basics.errors import StepProfileError
from autoremat.measure.peak import CpuTracker, Timeline


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes above those that were live when the meter was started."""

    live_bytes: int
    """Bytes live at the mark."""
    peak_bytes: int
    """Peak in bytes since the previous mark, or since the start."""


class Meter(ABC):
    """Measures the body of a ``with`` statement; ``readings`` then has one entry for each mark and one for the end."""

    def __init__(self) -> None:
        self.readings: tuple[Reading, ...] = ()

    @abstractmethod
    def mark(self) -> None:
        """Sets a mark at the present time."""

    @abstractmethod
    def __enter__(self) -> Meter: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def meter_of(device: torch.device) -> Meter:
    """Returns a meter for ``device``. Raises ``StepProfileError`` for devices other than the CPU and CUDA."""
    if device.type == "cpu":
        return _CpuMeter()
    if device.type == "cuda":
        return _CudaMeter(device)
    raise StepProfileError(f"a step profile measures the CPU and CUDA devices, not {device.type!r}")


class _CpuMeter(Meter):
    """Measures the CPU: evaluates the recorded timeline after the body has ended."""

    def __enter__(self) -> Meter:
        self._tracker = CpuTracker()
        self._tracker.__enter__()
        return self

    def mark(self) -> None:
        self._tracker.mark()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tracker.__exit__(kind, error, trace)
        if error is None:
            self.readings = readings_at(self._tracker.timeline or (), self._tracker.marks)


def readings_at(timeline: Timeline, marks: tuple[float, ...]) -> tuple[Reading, ...]:
    """Returns the readings of ``timeline`` at the ascending times ``marks``, and at its end."""
    times, levels = [time for time, _ in timeline], [level for _, level in timeline]
    found, begin = [], 0
    for time in (*marks, float("inf")):
        end = max(bisect_left(times, time), 1)
        # The level at the last mark is valid until the next event.
        stretch = levels[max(begin - 1, 0) : end]
        found.append(Reading(levels[end - 1], max(stretch)))
        begin = end
    return tuple(found)


class _CudaMeter(Meter):
    """Measures a CUDA device by the counters of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._found = device, list[Reading]()

    def __enter__(self) -> Meter:
        self._start = torch.cuda.memory_allocated(self._device)
        self._found.clear()
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def mark(self) -> None:
        live, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._found.append(Reading(live - self._start, peak - self._start))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.mark()
        self.readings = tuple(self._found)
