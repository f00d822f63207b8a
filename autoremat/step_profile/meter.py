"""Measures the live memory at marks within a step, and the peak between two marks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from autoremat.basics.errors import StepProfileError
from autoremat.measure.peak import CpuTracker


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes above those that were live when the meter was started."""

    live_bytes: int
    """Bytes live at the mark."""
    peak_bytes: int
    """Peak in bytes since the previous mark, or since the start."""


class CpuMeter(CpuTracker):
    """Measures the CPU: evaluates the recorded timeline after the body of its ``with`` statement."""

    @property
    def readings(self) -> tuple[Reading, ...]:
        """One reading for each mark, and one for the end."""
        timeline = self.timeline or ()
        times, levels = [time for time, _ in timeline], [level for _, level in timeline]
        found, begin = [], 0
        for mark in (*self.marks, float("inf")):
            end = max(bisect_left(times, mark), 1)
            # The level at the last mark is valid until the next event.
            found.append(Reading(levels[end - 1], max(levels[max(begin - 1, 0) : end])))
            begin = end
        return tuple(found)


class CudaMeter:
    """Measures a CUDA device by the counters of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._found, self._start = device, list[Reading](), 0

    @property
    def readings(self) -> tuple[Reading, ...]:
        """One reading for each mark, and one for the end."""
        return tuple(self._found)

    def __enter__(self) -> CudaMeter:
        self._start = torch.cuda.memory_allocated(self._device)
        self._found.clear()
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def mark(self) -> None:
        """Sets a mark at the present time."""
        live, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._found.append(Reading(live - self._start, peak - self._start))

    def __exit__(self, *_: object) -> None:
        self.mark()


Meter = CpuMeter | CudaMeter


def meter_of(device: torch.device) -> Meter:
    """Returns a meter for ``device``. Raises ``StepProfileError`` for devices other than the CPU and CUDA."""
    if device.type not in ("cpu", "cuda"):
        raise StepProfileError(f"a step profile measures the CPU and CUDA devices, not {device.type!r}")
    return CpuMeter() if device.type == "cpu" else CudaMeter(device)
